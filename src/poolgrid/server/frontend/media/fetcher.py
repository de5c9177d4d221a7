"""Fetches a URL that a client chose, from inside the operator's network, without trusting either.

Rules
    1. A host is resolved once, every address of it is judged (``addresses``), and the connection goes to one of these
       very addresses: the name is never looked up again between the check and the connect.
    2. Redirects are followed here, not by the library; each target is a new URL with a new check. HTTPS never
       redirects to HTTP.
    3. The size limit holds for what arrives, not for what ``content-length`` says; no encoding is accepted, so nothing
       expands.
    4. One time-out covers everything from the first name lookup to the last byte.
    5. No connection is kept: an idle one would be reused for another name with the same address.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable, Sequence

import httpx

from poolgrid.server.frontend.media.addresses import AddressPolicy
from poolgrid.server.frontend.media.references import URL_CHARS_MAX, MediaRefused, shown
from poolgrid.server.frontend.media.settings import FETCHES_MAX, REDIRECTS_MAX

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, or raises ``OSError``."""

ADDRESSES_TRIED_MAX = 3
"""Addresses of one host that are tried, one after the other, when connecting fails."""

JOINED_AT_ONCE_BYTES = 2**20
"""Files up to this size are put together on the event loop."""

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "poolgrid", "connection": "close"}


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host as the system resolves it, in the order of preference."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


class MediaFetcher:
    """Fetches over HTTP; ``close`` ends what is left of its connections."""

    def __init__(
        self,
        policy: AddressPolicy,
        *,
        schemes: Sequence[str] = ("http", "https"),
        timeout_ms: int = 10_000,
        redirects_max: int = REDIRECTS_MAX,
        connections_max: int = FETCHES_MAX,
        resolver: Resolver = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._schemes = tuple(scheme for scheme in schemes if scheme in _PORTS)
        self._timeout_ms = timeout_ms
        self._redirects_max = redirects_max
        self._connections_max = connections_max
        self._resolver = resolver
        self._tls = tls
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: str, bytes_max: int, on_bytes: Callable[[int], None]) -> bytes:
        """Return the body behind a URL, at most ``bytes_max`` bytes; raises ``MediaRefused``.

        ``on_bytes`` gets the size of every piece that arrives, and may raise ``MediaRefused`` to stop.
        """
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                return await self._follow(url, bytes_max, on_bytes)
        except TimeoutError:
            raise MediaRefused(
                "media_fetch_timeout", f"fetching {shown(url)} took more than {self._timeout_ms} ms, the limit"
            ) from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _follow(self, url: str, bytes_max: int, on_bytes: Callable[[int], None]) -> bytes:
        target = _parse(url)
        for _ in range(self._redirects_max + 1):
            answer = await self._get(target, bytes_max, on_bytes)
            if isinstance(answer, bytes):
                return answer
            if target.scheme == "https" and answer.scheme != "https":
                raise MediaRefused(
                    "media_redirect_refused", f"{shown(str(target))} redirects from https to {answer.scheme}"
                )
            target = answer
        raise MediaRefused(
            "media_redirect_refused", f"{shown(url)} redirects more than {self._redirects_max} times, the limit"
        )

    async def _get(self, target: httpx.URL, bytes_max: int, on_bytes: Callable[[int], None]) -> bytes | httpx.URL:
        port = target.port or _PORTS.get(target.scheme, 0)
        addresses = await self._addresses(target, port)
        for position, address in enumerate(addresses):
            try:
                return await self._get_from(address, target, bytes_max, on_bytes)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if position == len(addresses) - 1:
                    raise MediaRefused(
                        "media_fetch_failed", f"connecting to the host of {shown(str(target))} failed: {error}"
                    ) from None
        raise AssertionError("a host has at least one address")

    async def _addresses(self, target: httpx.URL, port: int) -> Sequence[str]:
        """Return the addresses of a URL's host, all of them allowed."""
        if target.scheme not in self._schemes:
            raise MediaRefused(
                "media_scheme_not_allowed",
                f"{shown(str(target))} has the scheme {target.scheme!r}: allowed are {', '.join(self._schemes)}",
            )
        if target.userinfo:
            raise MediaRefused("media_reference_invalid", "the URL carries a user name or password: allowed is none")
        try:
            addresses = await self._resolver(target.raw_host.decode("ascii").strip("[]"), port)
        except socket.gaierror as error:
            code = "media_fetch_failed" if error.errno == socket.EAI_AGAIN else "media_host_unknown"
            raise MediaRefused(code, f"the host of {shown(str(target))} cannot be resolved: {error.strerror}") from None
        except (OSError, UnicodeError) as error:
            raise MediaRefused(
                "media_host_unknown", f"the host of {shown(str(target))} cannot be resolved: {error}"
            ) from None
        if not addresses:
            raise MediaRefused("media_host_unknown", f"the host of {shown(str(target))} has no address")
        for address in addresses:
            why = self._policy.refusal(address)
            if why is not None:
                raise MediaRefused(
                    "media_address_not_allowed",
                    f"the host of {shown(str(target))} has the address {address}, {why}: media are fetched from "
                    "public addresses and media-allowed-networks only; nothing was connected",
                )
        return addresses[:ADDRESSES_TRIED_MAX]

    async def _get_from(
        self, address: str, target: httpx.URL, bytes_max: int, on_bytes: Callable[[int], None]
    ) -> bytes | httpx.URL:
        client = self._opened()
        request = client.build_request(
            "GET",
            target.copy_with(host=address, fragment=None),
            headers={**_HEADERS, "host": target.netloc.decode("ascii")},
            # The certificate must be that of the name, although the connection goes to the address.
            extensions={"sni_hostname": target.raw_host.decode("ascii").strip("[]")},
        )
        try:
            response = await client.send(request, stream=True)
            try:
                return await _read(response, target, bytes_max, on_bytes)
            finally:
                await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, ssl.SSLError) as error:
            _let_go(error)
            raise MediaRefused(
                "media_fetch_failed",
                f"fetching {shown(str(target))} failed: {error or type(error).__name__}",
            ) from None

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                verify=self._tls if self._tls is not None else ssl.create_default_context(),
                # No proxy and no .netrc of this machine: both would go around the checks above.
                trust_env=False,
                follow_redirects=False,
                timeout=self._timeout_ms / 1000,
                limits=httpx.Limits(max_connections=self._connections_max, max_keepalive_connections=0),
            )
        return self._client


def _let_go(error: BaseException) -> None:
    """Have the frames that an error came through hold nothing any more.

    In Python 3.13 those of ``contextlib`` keep the error itself, a circle in which what was read of a file would stay
    until the garbage collector comes round.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__


def _parse(url: str) -> httpx.URL:
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise MediaRefused("media_reference_invalid", f"the URL {shown(url)} is not valid: {error}") from None
    if not target.host:
        raise MediaRefused("media_reference_invalid", f"the URL {shown(url)} names no host")
    return target


async def _read(
    response: httpx.Response, target: httpx.URL, bytes_max: int, on_bytes: Callable[[int], None]
) -> bytes | httpx.URL:
    status = response.status_code
    if status in _REDIRECTS:
        return _location(response, target)
    if status != 200:
        code = "media_not_found" if 400 <= status < 500 else "media_fetch_failed"
        raise MediaRefused(code, f"fetching {shown(str(target))}: its server answered {status}, allowed is 200")
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaRefused(
            "media_fetch_failed",
            f"fetching {shown(str(target))}: its server encoded the body ({encoding[:40]!r}), which was not asked for",
        )
    claimed = response.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > bytes_max:
        raise MediaRefused(
            "media_too_large", f"{shown(str(target))} has {claimed[:20]} bytes, allowed are at most {bytes_max}"
        )
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_raw():
        size += len(piece)
        if size > bytes_max:
            raise MediaRefused("media_too_large", f"{shown(str(target))} has more than {bytes_max} bytes, the limit")
        on_bytes(len(piece))
        pieces.append(piece)
    # Copying much takes the loop's time; Python releases the interpreter's lock meanwhile.
    return b"".join(pieces) if size < JOINED_AT_ONCE_BYTES else await asyncio.to_thread(b"".join, pieces)


def _location(response: httpx.Response, target: httpx.URL) -> httpx.URL:
    location = response.headers.get("location", "")
    if not location or len(location) > URL_CHARS_MAX:
        raise MediaRefused("media_redirect_refused", f"{shown(str(target))} redirects without saying where to")
    try:
        joined = target.join(location)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise MediaRefused(
            "media_redirect_refused", f"{shown(str(target))} redirects to {shown(location)}, which is not a URL"
        ) from None
    if not joined.host:
        raise MediaRefused("media_redirect_refused", f"{shown(str(target))} redirects to {shown(location)}")
    return joined
