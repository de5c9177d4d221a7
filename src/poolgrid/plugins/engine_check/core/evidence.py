"""What a check has gathered of an engine server, as it was: nothing here is read or judged yet.

A record (``Evidence.to_json``) is all of a check, so a check is repeated anywhere from the file alone.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from poolgrid.plugins.engine_check.core.transfer_rules import TransferTotals

RECORD_VERSION = 1


class RecordError(ValueError):
    """A record cannot be read; the message has the reason."""


class Contact(Enum):
    """What came of the subscription to a publisher."""

    CONNECTED = "connected"
    REFUSED = "refused"
    """No process listens there."""
    CONNECTS = "connects"
    """No process listens there, and the publisher connected to a socket that was bound there in its place."""
    NO_PUBLISHER = "no publisher"
    """A process listens there that is no ZMQ publisher."""


class Source(msgspec.Struct, frozen=True):
    """Addresses of the events of one rank; endpoints as a subscriber connects to them."""

    rank: int
    endpoint: str
    replay_endpoint: str = ""
    """Empty = none is known."""
    topic: str = ""
    """What the topics of its messages should begin with."""
    doubt: str = ""
    """What is probably wrong with it if no publisher is reached there, by the server's facts."""


class Heard(msgspec.Struct, frozen=True):
    """One live message, in the order of arrival."""

    rank: int
    message: tuple[bytes, ...]
    at_ms: float


class ReplayAnswer(msgspec.Struct, frozen=True):
    """What a replay socket answered."""

    rank: int
    asked_from: int
    messages: tuple[tuple[bytes, ...], ...]
    ended: bool
    """Whether the mark of the end came; without it the answer broke off, or there was none."""


class CheckProbe(msgspec.Struct, frozen=True):
    """A request of the check's own."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int
    salt: str = ""
    lora: str = ""
    rank: int | None = None
    """The rank that it was sent to; ``None`` = the server's choice."""

    @property
    def domain(self) -> str:
        """Return what its blocks are hashed with besides the tokens."""
        return "salt" if self.salt else "adapter" if self.lora else ""


class ProbeExchange(msgspec.Struct, frozen=True):
    """A probe, and what came back."""

    probe: CheckProbe
    heard_before: int
    """How many live messages had arrived when it was sent."""
    heard_after: int
    """The same, once its events had arrived."""
    output: tuple[int, ...] = ()
    cached_tokens: int | None = None
    """As the server reports; ``None`` = it does not."""
    ended_ms: float = 0.0
    """When the answer was complete."""
    failure: str = ""
    """Why there was no answer."""
    prompt_tokens: int | None = None
    """Length of the prompt as the server counts it; ``None`` = it does not report that."""


class ServerStatement(msgspec.Struct, frozen=True):
    """Facts from the server, or an option, before anything was sent."""

    kind: str = ""
    model: str = ""
    version: str = ""
    block_size: int | None = None
    ranks: int = 1
    """Data-parallel ranks."""
    publishes: bool | None = None
    """Whether it reports that it publishes events; ``None`` = not reported."""
    events_option: str = ""
    """What servers of its kind are started with so that they publish."""


class Evidence(msgspec.Struct, frozen=True):
    """All of one check."""

    told: ServerStatement
    sources: tuple[Source, ...]
    contacts: dict[int, Contact]
    """By rank."""
    exchanges: tuple[ProbeExchange, ...]
    heard: tuple[Heard, ...]
    replays: tuple[ReplayAnswer, ...] = ()
    transfers: TransferTotals | None = None
    """What the server counts of KV that moved; ``None`` = it does not."""
    version: int = RECORD_VERSION

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Evidence:
        """Return what a record holds; raises ``RecordError``."""
        try:
            evidence = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise RecordError(f"reading a record of a check: {error}") from None
        if evidence.version != RECORD_VERSION:
            raise RecordError(f"reading a record of a check: its version is {evidence.version}, read is 1")
        return evidence
