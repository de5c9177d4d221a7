"""What a process publishes under its name: the entry that a directory or a key-value bucket keeps for its lease.

An entry is JSON, so that people can read it where it lies. It is written by all that may write there and read by
others, so nothing of it is used before it was checked: a reader refuses an entry with the field and its value, and
continues with the next.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from poolgrid.kernel.wire.addresses import EndpointName, http_url_problem, part_problem, zmq_endpoint_problem
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX

ENTRY_BYTES_MAX = 4096
"""A dozen endpoints with long host names, twice."""

ENDPOINTS_MAX = 16
"""No process of ours has more than five."""

LEASE_MS_MIN = 1_000
LEASE_MS_MAX = 600_000
"""Bounds of a lease: NATS counts whole seconds, and what was dead for ten minutes is found out by connecting."""

SHOWN_CHARS = 80

UNKNOWN_START = "0000"
"""How a life with an unknown start begins: as time this is the first three days of 1970."""

_LIFE = re.compile(r"[0-9a-f]{24}")


class RegistrationRefused(ValueError):
    """An entry cannot be used; the message names it, the field and the value."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One process under its name, for one life."""

    namespace: str
    component: str
    instance: str
    """What the process is called among those of its component: a router's, a worker's id."""
    life: str
    """24 hexadecimal digits: when it began in nanoseconds, then chance; a later life sorts after an earlier one.

    Where its start is unknown it starts with ``UNKNOWN_START``.
    """
    endpoints: Annotated[dict[str, str], msgspec.Meta(max_length=ENDPOINTS_MAX)]
    """Addresses by endpoint, ``tcp://`` or ``http(s)://``."""
    lease_ms: Annotated[int, msgspec.Meta(ge=LEASE_MS_MIN, le=LEASE_MS_MAX)]
    """How long it counts after it was last renewed."""

    @property
    def key(self) -> str:
        return f"{self.namespace}.{self.component}.{self.life}"

    @property
    def started_ms(self) -> int:
        """Return when this life began, as Unix time; 0 = unknown."""
        return 0 if self.life.startswith(UNKNOWN_START) else int(self.life[:16], 16) // 1_000_000

    def name(self, endpoint: str) -> EndpointName:
        return EndpointName(self.namespace, self.component, endpoint)


_DECODER = msgspec.json.Decoder(Registration)


def encode_registration(registration: Registration) -> bytes:
    """Return an entry as it is kept; raises ``RegistrationRefused`` for one that readers would refuse."""
    data = msgspec.json.format(msgspec.json.encode(registration), indent=1) + b"\n"
    decode_registration(registration.key, data)
    return data


def decode_registration(key: str, data: bytes) -> Registration:
    """Return the registration of an entry; raises ``RegistrationRefused``."""
    what = f"the entry {_shown(key)}"
    if len(data) > ENTRY_BYTES_MAX:
        raise RegistrationRefused(f"{what} has {len(data)} bytes or more, allowed are {ENTRY_BYTES_MAX}")
    try:
        found = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RegistrationRefused(f"{what} is no registration: {error}") from None
    problem = _problem(found)
    if problem is not None:
        raise RegistrationRefused(f"{what}: {problem}")
    if found.key != key:
        raise RegistrationRefused(
            f"{what} has the key {_shown(found.key)}: an entry belongs under its own namespace, component and epoch"
        )
    return found


def _problem(found: Registration) -> str | None:
    for field in ("namespace", "component"):
        value: str = getattr(found, field)
        problem = part_problem(value)
        if problem is not None:
            return f"{field} is {_shown(value)}, which {problem}"
    if not _LIFE.fullmatch(found.life):
        return f"life is {_shown(found.life)}, allowed are 24 hexadecimal digits"
    if (
        not 1 <= len(found.instance.encode(errors="replace")) <= IDENTIFIER_BYTES_MAX
        or not found.instance.isprintable()
    ):
        return f"instance is {_shown(found.instance)}, allowed are 1 to {IDENTIFIER_BYTES_MAX} printable bytes"
    for endpoint, address in found.endpoints.items():
        problem = part_problem(endpoint)
        if problem is not None:
            return f"endpoints has {_shown(endpoint)}, which {problem}"
        if len(address) > IDENTIFIER_BYTES_MAX:
            return f"endpoints.{endpoint} has {len(address)} characters, allowed are {IDENTIFIER_BYTES_MAX}"
        problem = http_url_problem(address) if address.startswith("http") else zmq_endpoint_problem(address)
        if problem is not None:
            return f"endpoints.{endpoint} is {_shown(address)}, which {problem}"
    return None


def _shown(value: str) -> str:
    return repr(value) if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]!r}… ({len(value)} characters)"
