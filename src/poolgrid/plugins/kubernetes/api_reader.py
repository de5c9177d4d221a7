"""What an API server of Kubernetes is asked: lists, by a label selector. Nothing is written there.

Rules
    1. A list is asked for with nothing kept between looks. ``resourceVersion=0`` asks for what the API server has in
       memory, which costs it little and may be a second old. Pages are asked for, and bounded, because a server may
       answer them all in one, or never end.
    2. A list that became too old between its pages (410) is begun again, ``LISTS_MAX`` times. A server that is
       asked too much (429) or is not well (5xx) is left alone for as long as it asks.
    3. The service account's token and authority are files that are renewed under us. They are read again every
       ``ACCOUNT_READ_S``, and when the server no longer takes the token (401).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.server.discovery.registry import DiscoveryUnavailable
from poolgrid.server.http.http_client import ClientExchange, HttpClient, HttpTarget, RequestFailed
from poolgrid.server.process.clock import Clock

log = logging.getLogger(__name__)

ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, ca.crt and namespace of a pod's service account: Kubernetes mounts them here in every pod."""

PAGE_ITEMS = 250
"""Items of a page: slices of 25,000 pods, of which a page is some 10 MB, or pods with some 2 MB."""

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Of one page: servers may ignore the limit and answer all at once, which this much is enough for."""

LOOK_S = 2.0
"""Between two looks, at most: a hundred processes then ask the API server 50 to 70 times a second.

Pods become ready and end within seconds, and the cluster itself tells of it a second later.
"""

LOOK_SHARE_MIN = 0.7
"""The pace of a process is between this share of ``LOOK_S`` and all of it."""

LISTS_MAX = 3
"""How often a list is begun until it counts as failed."""

REQUEST_TIMEOUT_S = 10.0
"""How long an answer may take; API servers end what takes them a minute."""

CONNECT_TIMEOUT_S = 5.0

ACCOUNT_READ_S = 60.0
"""As often as clients of Kubernetes read their token; the kubelet renews it minutes before it ends."""

ALONE_S = 5.0
"""Pause after an overloaded server's refusal without a time."""

ALONE_MAX_S = 60.0
"""Longest pause, for any answer."""

T = TypeVar("T", covariant=True)


class Page(Protocol[T]):
    """A page of a list."""

    @property
    def more(self) -> str:
        """Token for the next page; empty = there is none."""
        ...

    @property
    def found(self) -> Sequence[T]: ...


class ServiceAccount(NamedTuple):
    """Identity of this process for the API server, and the server's certificate authority."""

    token: str
    authority: str


class _Status(msgspec.Struct):
    message: str = ""


class _Answer(ClientExchange):
    __slots__ = ("body", "retry_after")

    def __init__(self) -> None:
        super().__init__()
        self.body = bytearray()
        self.retry_after = b""

    def take_header(self, name: bytes, value: bytes) -> None:
        if name == b"retry-after":
            self.retry_after = value

    def take_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > ANSWER_BYTES_MAX:
            raise RequestFailed("protocol", f"the answer exceeds {ANSWER_BYTES_MAX} bytes")
        self.body += data

    def said(self) -> str:
        try:
            return self.excerpt(msgspec.json.decode(self.body, type=_Status).message.encode())
        except msgspec.MsgspecError:
            return self.excerpt(self.body)


class _Expired(Exception):
    """A list is too old to continue from."""


def api_server(what: str = "names is kubernetes") -> str:
    """Return where the API server of this pod's cluster is; raises ``ValueError`` that begins with ``what`` outside of
    one."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ValueError(
            f"{what} and KUBERNETES_SERVICE_HOST is not set: this process is in no pod. Give "
            "kubernetes_api, for instance http://127.0.0.1:8001 with kubectl proxy"
        )
    return f"https://{bracketed(host)}:{port}"


def look_pace_s(chance: float) -> float:
    """Return the time between two looks of one process, drawn once, so that a fleet that started together does not ask
    together; ``chance`` is a number between 0 and 1."""
    return LOOK_S * (LOOK_SHARE_MIN + (1 - LOOK_SHARE_MIN) * chance)


class ApiReader:
    """Lists of one API server."""

    def __init__(self, api: str, account_dir: Path, clock: Clock) -> None:
        """``api`` is the API server's URL."""
        self._target = HttpTarget(api)
        self.url = self._target.url
        self._account_dir = account_dir
        self._clock = clock
        self._account = ServiceAccount("", "")
        self._account_read_ms = 0.0
        self._client: HttpClient | None = None
        self._alone_until_ms = 0.0

    async def open(self) -> None:
        """Read the account; raises ``ValueError`` or ``OSError`` without one."""
        await self._read_account()

    async def own_namespace(self) -> str:
        """Return the namespace of the account; raises ``OSError`` without one."""
        return (await asyncio.to_thread((self._account_dir / "namespace").read_text)).strip()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    async def begin_look(self) -> None:
        """Prepare for the lists of one look; raises ``DiscoveryUnavailable`` while the server is left alone."""
        left_ms = self._alone_until_ms - self._clock.monotonic_ms()
        if left_ms > 0:
            raise DiscoveryUnavailable(f"the API server asked to be left alone for {left_ms / 1000:.0f} s more")
        if self._clock.monotonic_ms() - self._account_read_ms >= 1000 * ACCOUNT_READ_S:
            await self._read_account_again()

    async def every(
        self, path: str, selector: str, decode: Callable[[bytes], Page[T]], what: str, most: int
    ) -> list[T]:
        """Return all items at a path that a selector finds, at most so many; raises ``DiscoveryUnavailable``.

        ``decode`` raises ``ValueError`` for what is no page; ``what`` is what people call the items.
        """
        for _ in range(LISTS_MAX):
            try:
                return await self._pages(path, selector, decode, what, most)
            except _Expired:
                continue
        raise DiscoveryUnavailable(f"a list of {what} became too old between its pages, {LISTS_MAX} times")

    async def _pages(
        self, path: str, selector: str, decode: Callable[[bytes], Page[T]], what: str, most: int
    ) -> list[T]:
        found: list[T] = []
        # Only the first page may have the version.
        question = {"labelSelector": selector, "limit": str(PAGE_ITEMS), "resourceVersion": "0"}
        while True:
            answer = await self._ask(f"{path}?{urlencode(question)}", what)
            try:
                page = decode(answer)
            except ValueError as error:
                raise DiscoveryUnavailable(f"listing {path}: {error}") from None
            found += page.found
            if len(found) > most:
                raise DiscoveryUnavailable(f"{path} has more than {most} {what} with {selector}")
            if not page.more:
                return found
            question = {"labelSelector": selector, "limit": str(PAGE_ITEMS), "continue": page.more}

    async def _ask(self, path: str, what: str) -> bytes:
        answer = await self._send(path)
        if answer.status == 401 and await self._read_account_again():
            answer = await self._send(path)
        if answer.status == 200:
            return bytes(answer.body)
        if answer.status == 410:
            raise _Expired
        if answer.status == 429 or answer.status >= 500:
            self._leave_alone(answer.retry_after)
        hint = ""
        if answer.status == 401:
            hint = f". The token in {self._account_dir} is not taken"
        elif answer.status == 403:
            hint = f". A Role has to allow this account to list {what} there"
        raise DiscoveryUnavailable(f"asking {self._target.url}{path}: status {answer.status}: {answer.said()}{hint}")

    async def _send(self, path: str) -> _Answer:
        answer = _Answer()
        assert self._client is not None, "it was opened"
        try:
            await self._client.send("GET", path, b"", answer, timeout_s=REQUEST_TIMEOUT_S)
        except RequestFailed as failure:
            # Perhaps the authority was replaced.
            await self._read_account_again()
            raise DiscoveryUnavailable(f"asking {self._target.url}: {failure.detail}") from None
        return answer

    def _leave_alone(self, said: bytes) -> None:
        # Dates are allowed there, and API servers send none.
        alone_s = min(float(said), ALONE_MAX_S) if said.isdigit() else ALONE_S
        self._alone_until_ms = self._clock.monotonic_ms() + 1000 * alone_s

    async def _read_account_again(self) -> bool:
        """Read the account's files, and return whether they have changed; an unreadable file keeps its value."""
        try:
            return await self._read_account()
        except (OSError, ValueError) as error:
            log.warning(
                "reading the account in %s again failed (%s): the previous one stays in use", self._account_dir, error
            )
            return False

    async def _read_account(self) -> bool:
        self._account_read_ms = self._clock.monotonic_ms()
        account = await asyncio.to_thread(self._read_files)
        if account == self._account and self._client is not None:
            return False
        headers = ["Accept: application/json", "User-Agent: poolgrid"]
        trusted: ssl.SSLContext | None = None
        if self._target.secure:
            trusted = await asyncio.to_thread(ssl.create_default_context, cadata=account.authority)
        before, self._client = (
            self._client,
            HttpClient(
                self._target,
                self._clock,
                headers,
                api_key=account.token if self._target.secure else "",
                connect_timeout_s=CONNECT_TIMEOUT_S,
                trusted=trusted,
            ),
        )
        self._account = account
        if before is not None:
            before.close()
        return True

    def _read_files(self) -> ServiceAccount:
        if not self._target.secure:
            return ServiceAccount("", "")  # kubectl proxy, which has an account of its own
        return ServiceAccount(
            (self._account_dir / "token").read_text().strip(), (self._account_dir / "ca.crt").read_text()
        )
