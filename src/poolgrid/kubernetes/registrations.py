"""Names on Kubernetes: EndpointSlices, read from the API server. Nothing is written there.

Rules
    1. A look lists the slices with the labels of names in each Kubernetes namespace, with nothing kept between looks.
       ``resourceVersion=0`` asks for what the API server has in memory, which costs it little and may be a second old.
       Pages are asked for, and bounded, because a server may answer them all in one, or never end.
    2. A list that became too old between its pages (410) is begun again, ``LISTS_MAX`` times. A server that is
       asked too much (429) or is not well (5xx) is left alone for as long as it asks.
    3. The service account's token and authority are files that are renewed under us. They are read again every
       ``ACCOUNT_READ_S``, and when the server no longer takes the token (401).
    4. Each process looks at a pace of its own, drawn when it begins, so that a fleet that started together does not
       ask together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec

from poolgrid.discovery.registry import DiscoveryUnavailable, Scope, Seen
from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.http.http_client import ClientExchange, HttpClient, HttpTarget, RequestFailed, bearer
from poolgrid.kubernetes.slices import COMPONENT_LABEL, NAMESPACE_LABEL, EndpointSlice, decode_slices, seen_in
from poolgrid.process.clock import Clock
from poolgrid.wire.registration import Registration

log = logging.getLogger(__name__)

ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, ca.crt and namespace of a pod's service account: Kubernetes mounts them here in every pod."""

LOOK_S = 2.0
"""Between two looks, at most: a hundred processes then ask the API server 50 to 70 times a second.

Pods become ready and end within seconds, and the cluster itself tells of it a second later.
"""

LOOK_SHARE_MIN = 0.7
"""The pace of a process is between this share of ``LOOK_S`` and all of it."""

PAGE_SLICES = 250
"""Slices of a page: 25,000 pods, of which a page is some 10 MB."""

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Of one page: servers may ignore the limit and answer all at once, which this much is enough for."""

SLICES_MAX = 10_000
"""Slices of one look; more are something else."""

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

SAID_BYTES = 300
"""How much of a refusal stands in an error."""


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
            return msgspec.json.decode(self.body, type=_Status).message[:SAID_BYTES]
        except msgspec.MsgspecError:
            return self.body[:SAID_BYTES].decode(errors="replace")


class _Expired(Exception):
    """A list is too old to continue from."""


def api_server() -> str:
    """Return where the API server of this pod's cluster is; raises ``ValueError`` outside of one."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ValueError(
            "names is kubernetes and KUBERNETES_SERVICE_HOST is not set: this process is in no pod. Give "
            "kubernetes_api, for instance http://127.0.0.1:8001 with kubectl proxy"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class KubernetesRegistrations:
    """Implements ``poolgrid.discovery.registry.RegistrationStore``; reads only."""

    kind = "kubernetes"
    writable = False

    def __init__(self, api: str, account_dir: Path, namespaces: Sequence[str], clock: Clock, chance: float) -> None:
        """``api`` is the API server's URL and ``namespaces`` are Kubernetes'; none = the one of the account.

        ``chance`` is a number between 0 and 1, of which the pace is made.
        """
        self.where = api
        self._target = HttpTarget(api)
        self._account_dir = account_dir
        self._namespaces = tuple(namespaces)
        self._clock = clock
        self.look_s = LOOK_S * (LOOK_SHARE_MIN + (1 - LOOK_SHARE_MIN) * chance)
        self._account = ServiceAccount("", "")
        self._account_read_ms = 0.0
        self._client: HttpClient | None = None
        self._alone_until_ms = 0.0
        self._looks = 0

    async def open(self) -> None:
        """Read the account; raises ``ValueError`` or ``OSError`` without one."""
        await self._read_account()
        if not self._namespaces:
            path = self._account_dir / "namespace"
            self._namespaces = ((await asyncio.to_thread(path.read_text)).strip(),)
        self.where = f"{self._target.url}, {', '.join(self._namespaces)}"

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()

    async def write(self, registration: Registration, data: bytes) -> None:
        raise DiscoveryUnavailable(f"{registration.key} is not written: names on Kubernetes are read only")

    async def remove(self, key: str) -> None:
        raise DiscoveryUnavailable(f"{key} is not removed: names on Kubernetes are read only")

    async def look(self, scopes: Sequence[Scope]) -> list[Seen]:
        """Return the entries of some scopes; raises ``DiscoveryUnavailable``."""
        left_ms = self._alone_until_ms - self._clock.monotonic_ms()
        if left_ms > 0:
            raise DiscoveryUnavailable(f"the API server asked to be left alone for {left_ms / 1000:.0f} s more")
        if self._clock.monotonic_ms() - self._account_read_ms >= 1000 * ACCOUNT_READ_S:
            await self._read_account_again()
        self._looks += 1
        found: dict[tuple[str, str], EndpointSlice] = {}
        for selector in sorted({_selector(scope) for scope in scopes}):
            for namespace in self._namespaces:
                for each in await self._list(namespace, selector):
                    found[each.metadata.namespace, each.metadata.name] = each
        return seen_in(found.values(), self._looks)

    async def _list(self, namespace: str, selector: str) -> list[EndpointSlice]:
        for _ in range(LISTS_MAX):
            try:
                return await self._pages(namespace, selector)
            except _Expired:
                continue
        raise DiscoveryUnavailable(f"a list of EndpointSlices became too old between its pages, {LISTS_MAX} times")

    async def _pages(self, namespace: str, selector: str) -> list[EndpointSlice]:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        found: list[EndpointSlice] = []
        # Only the first page may have the version.
        question = {"labelSelector": selector, "limit": str(PAGE_SLICES), "resourceVersion": "0"}
        while True:
            answer = await self._ask(f"{path}?{urlencode(question)}")
            try:
                page = decode_slices(answer)
            except ValueError as error:
                raise DiscoveryUnavailable(f"listing {path}: {error}") from None
            found += page.items or ()
            if len(found) > SLICES_MAX:
                raise DiscoveryUnavailable(f"{namespace} has more than {SLICES_MAX} EndpointSlices with {selector}")
            if not page.metadata.more:
                return found
            question = {"labelSelector": selector, "limit": str(PAGE_SLICES), "continue": page.metadata.more}

    async def _ask(self, path: str) -> bytes:
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
            hint = ". A Role has to allow this account to list endpointslices of discovery.k8s.io there"
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
            headers.append(bearer(account.token))
            trusted = await asyncio.to_thread(ssl.create_default_context, cadata=account.authority)
        before, self._client = (
            self._client,
            HttpClient(self._target, self._clock, headers, connect_timeout_s=CONNECT_TIMEOUT_S, trusted=trusted),
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


def _selector(scope: Scope) -> str:
    namespace = f"{NAMESPACE_LABEL}={scope.namespace}" if scope.namespace else NAMESPACE_LABEL
    component = f"{COMPONENT_LABEL}={scope.component}" if scope.component else COMPONENT_LABEL
    return f"{namespace},{component}"


def open_store(settings: DiscoverySettings, clock: Clock) -> KubernetesRegistrations:
    """Return the registrations that a cluster has (entry point of ``poolgrid.discovery``)."""
    api = settings.kubernetes_api or api_server()
    return KubernetesRegistrations(api, ACCOUNT_DIR, settings.kubernetes_namespace, clock, os.urandom(1)[0] / 255)
