"""Which requests a browser sends for a web page, and which ``Host`` names a server on loopback answers to.

A page can have a browser send a POST without asking first, and can give its own name the address of this machine (DNS
rebinding). Both reach servers that only the browser's machine can reach.

Rules
    1. Browsers set ``Origin`` and ``Sec-Fetch-Site``, and pages cannot change them. Other clients rarely send them, and
       a request without both comes from no page.
    2. A page of the server itself is no foreign one: its ``Origin`` has the authority of ``Host``. The scheme is not
       compared, because TLS may end at a proxy.
    3. A browser asks first (preflight) before it sends anything that a form could not send. So the server's CORS
       answers decide about these requests, and ``Origin`` about the others (``is_unasked``).
    4. A rebound name appears in ``Host``, and is a name of a public domain: it has a dot. Addresses and names of one
       label cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

Headers = Iterable[tuple[bytes, bytes]]

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""

FORM_TYPES = frozenset((b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"))
"""Content types of forms, which pages of any site may send (the Fetch standard's safelist)."""

HOSTS_KEPT_MAX = 64
"""Values of ``Host`` that are known to be allowed; clients of one server use few."""

_ONE_LABEL = re.compile(r"[a-z0-9_-]+")

SHOWN_CHARS_MAX = 100
"""Most of a client's header that an error repeats."""


def foreign_origin(headers: Headers, allowed: Collection[str] = ()) -> str:
    """Return which page of another origin a request comes from; empty when it comes from none, or an allowed one."""
    found = {name: value for name, value in headers if name in (b"origin", b"sec-fetch-site", b"host")}
    site = found.get(b"sec-fetch-site", b"").lower()
    if site in (b"same-origin", b"none"):
        return ""
    origin = found.get(b"origin")
    if origin is None:
        return f"another origin (Sec-Fetch-Site: {shown(site)})" if site else ""
    text = origin.decode("latin-1").lower()
    if text in allowed or text.partition("://")[2] == found.get(b"host", b"").decode("latin-1").lower() != "":
        return ""
    return shown(origin)


def is_preflight(method: str, headers: Headers) -> bool:
    """Return whether a browser asks whether a page may send another request: without a key, and without a body."""
    if method != "OPTIONS":
        return False
    found = dict(headers)
    has_body = b"transfer-encoding" in found or found.get(b"content-length", b"0") != b"0"
    return b"access-control-request-method" in found and not has_body


def is_unasked(method: str, headers: Headers) -> bool:
    """Return whether a browser would send a request for a page of any site without a preflight, though it may change
    something: a POST with the content type of a form or none, or a WebSocket. A key in its headers needs a preflight.
    """
    found = dict(headers)
    if b"authorization" in found or b"x-api-key" in found:
        return False
    kind = found.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return b"upgrade" in found or (method == "POST" and (not kind or kind in FORM_TYPES))


def is_from_page(headers: Headers) -> bool:
    """Return whether a browser sent a request for a page, of any site."""
    found = dict(headers)
    return b"origin" in found or b"sec-fetch-site" in found


class AllowedHosts:
    """The ``Host`` values that a server on a loopback address answers to.

    A web page can give a name of its own this machine's address (DNS rebinding), but only a name of a public domain,
    which has a dot. An IP address has no DNS record, and a name of one label belongs to this machine or its network.
    """

    def __init__(self, bound: str, further: Iterable[str] = ()) -> None:
        """``bound`` is the host that the server is bound to; ``further`` are names that an operator allows."""
        self._names = {bound.lower(), *(each.lower() for each in further)}
        self._known: set[bytes] = set()

    def allow(self, value: bytes) -> bool:
        if value in self._known:
            return True
        name = _name(value.decode("latin-1").lower())
        allowed = name in self._names or name.endswith(".localhost") or _ONE_LABEL.fullmatch(name) or _is_address(name)
        if allowed and len(self._known) < HOSTS_KEPT_MAX:
            self._known.add(value)
        return bool(allowed)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(authority: str) -> str:
    """Return the host of an authority, without its port, brackets and the dot that ends a full name."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.rpartition(":")[0].rstrip(".") if ":" in authority else authority.rstrip(".")


def shown(value: bytes) -> str:
    """Return a header's value for an error."""
    return repr(value.decode("latin-1")[:SHOWN_CHARS_MAX])
