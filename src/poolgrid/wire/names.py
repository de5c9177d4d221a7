"""Names in place of addresses: ``namespace.component.endpoint``, as ``dyn://`` addresses and as parts of settings.

A *namespace* is one pool, a *component* what some of its processes do (``router``, ``consolidator``, ``worker``,
``prefill``, ``decode``, ``encode``, ``embedding``, …), an *endpoint* one of the places where such a process listens
(``http``, ``select``, ``ingest``, ``feed``, ``query``, ``generate``). The global router is no part of a pool; it has a
namespace all the same.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from poolgrid.wire.identifiers import Role

SCHEME = "dyn://"

ROUTER = "router"
CONSOLIDATOR = "consolidator"
GLOBAL_ROUTER = "global-router"

COMPONENTS = {role: "worker" if role is Role.AGGREGATED else role.name.lower() for role in Role}
"""What workers are called by what they do."""

PART_CHARS_MAX = 64
"""Characters of each of the three; all of them and the scheme stay below what an identifier may have."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""What a file name, a subject of NATS and a label of Kubernetes can carry alike, but for the underscore there."""


class EndpointName(NamedTuple):
    """The name of an endpoint."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}.{self.component}.{self.endpoint}"


def is_name(address: str) -> bool:
    """Return whether an address is a name, well formed or not."""
    return address.startswith(SCHEME)


def part_problem(part: str) -> str | None:
    """Say why a part of a name cannot be used, in words that follow it, or ``None``."""
    if _PART.fullmatch(part):
        return None
    return f"is no name: allowed are 1 to {PART_CHARS_MAX} letters, digits, '-' and '_', and no '-' at the beginning"


def parse_name(address: str) -> EndpointName:
    """Return the name in a ``dyn://`` address; raises ``ValueError``."""
    parts = address.removeprefix(SCHEME).split(".")
    if not is_name(address) or len(parts) != 3:
        raise ValueError(f"{address!r} is not of the form {SCHEME}namespace.component.endpoint")
    for word, part in zip(("namespace", "component", "endpoint"), parts, strict=True):
        problem = part_problem(part)
        if problem is not None:
            raise ValueError(f"the {word} of {address!r} is {part!r}, which {problem}")
    return EndpointName(*parts)
