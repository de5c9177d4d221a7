"""The header line of a request that a global router forwards to the router of a pool.

It is for requests that the global router has let through already: it has checked the client's key, charged the tenant
and chosen the pool. A pool's router takes the line from holders of an operator's key, or from all senders where it has
no keys. Such a request is for the pool's servers alone: paths of the pool's router itself are closed to it. It waits at
the global router and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

HOP_HEADER: Final = b"x-poolgrid-hop"
"""It ends at the pool's router: neither a client's nor a global router's line reaches an engine server."""

HOP: Final = "poolgrid.hop"
"""Key of the ``Hop`` in the ASGI scope of a request that a global router forwarded."""

WORKER_HEADER: Final = b"x-poolgrid-worker"
"""Names who answered. Where it lacks, the router of a pool answers in its own words."""

OWN_HEADERS: Final = b"x-poolgrid-"
"""Begins the names of the lines of an answer that have a router's choice."""


class Hop(Struct, frozen=True, omit_defaults=True):
    """Whose request it is, how urgent, and what it is called."""

    tenant: Annotated[str, Meta(max_length=64)] = ""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """The tenant's share of turns."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Higher goes first; at most what the tenant may ask for."""
    request_id: Annotated[str, Meta(max_length=256, pattern=r"^[!-~]*\Z")] = ""
    """Of the global router's dispatch: the pool's router calls the request so. Empty for what is no work."""


_decode = msgspec.json.Decoder(Hop).decode


def hop_line(hop: Hop) -> tuple[bytes, bytes]:
    """Return the header line."""
    return HOP_HEADER, msgspec.json.encode(hop)


def read_hop(value: bytes) -> Hop:
    """Return what a line says; raises ``ValueError``. Members that are not known here are skipped."""
    try:
        return _decode(value)
    except msgspec.MsgspecError as error:
        shown = value[:80].decode("latin-1")
        raise ValueError(f"reading {HOP_HEADER.decode()}: it is {shown!r}: {error}") from None
