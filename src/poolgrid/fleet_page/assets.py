"""The files of the fleet page: read once, served with what keeps a browser from running anything else."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from poolgrid.frontend.errors import RequestError

DIRECTORY = Path(__file__).parent / "static"

INDEX = "index.html"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What may lie in the directory; anything else there is not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""Scripts and styles come from files of this directory alone, nothing is sent anywhere else, and no text becomes
markup: names of workers and requests are others' words."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}
"""``no-cache`` lets a browser keep a file and ask each time whether it still holds: an upgrade is seen at once."""


class Asset(NamedTuple):
    """One file."""

    body: bytes
    content_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Return the files by name; read on the first call."""
    found: dict[str, Asset] = {}
    for path in sorted(DIRECTORY.iterdir()):
        content_type = TYPES.get(path.suffix)
        if content_type is not None:
            body = path.read_bytes()
            found[path.name] = Asset(body, content_type, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
    return found


def asset(name: str) -> Asset:
    """Return a file of the page; raises ``RequestError`` 404."""
    found = assets().get(name)
    if found is None:
        raise RequestError(404, "not_found", f"the fleet page has no file {name[:80]!r}; it begins at /ui")
    return found
