"""What a journal's stream needs from who stores it, and what may go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from poolgrid.nats.message import Outgoing, StoredMessage


class StreamUnavailable(OSError):
    """The stream did not answer, or refused for now: whether what was sent is stored is not known."""


class OutOfTurn(Exception):
    """The stream does not end where the writer thinks: what was sent is not stored, or was stored before."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream at one moment."""

    first_sequence: int
    """Of the oldest message kept; ``last_sequence + 1`` when there is none."""
    last_sequence: int
    """Of the newest message that there ever was; 0 before the first."""
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where in the stream a snapshot belongs: it holds all records before ``offset``."""

    offset: int
    sequence: int
    """Of the first piece of the body that holds the last of them."""
    message_id: str
    """Of that message: another name there means that the snapshot is of a history that was lost."""


class Readable(Protocol):
    """As much of a journal's stream as reading it takes, on threads."""

    @property
    def name(self) -> str: ...

    def facts(self) -> StreamFacts: ...

    def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        """Return messages from a sequence on, as many as fit an answer; none only when none is there (yet).

        They have no hole between them: where one was removed there is a foreign one.
        """
        ...

    def snapshots(self) -> list[Anchor]:
        """Return the snapshots that are kept, oldest first."""
        ...

    def get_snapshot(self, anchor: Anchor) -> bytes: ...


class RecordStream(Readable, Protocol):
    """A stream as its writer uses it, on threads: every call waits, and may raise ``StreamUnavailable``."""

    @property
    def body_bytes_max(self) -> int: ...

    def open(self) -> None:
        """Make what is not there yet, and clear away what a writer that was killed left unfinished."""
        ...

    def append(
        self, messages: Sequence[Outgoing], last_sequence: int, begins: bool = False, own_sequence: int | None = None
    ) -> None:
        """Store messages right behind ``last_sequence``, each once the one before it is stored.

        The one before the first must be of the same writer, too; with ``begins`` that writer has none yet. With foreign
        messages behind the writer's last one, ``own_sequence`` is where that one is. Raises
        ``OutOfTurn`` when the stream does not end there, or with another writer's message. Some of the messages may be
        stored then, and when ``StreamUnavailable`` is raised: a number of them from the first on.
        """
        ...

    def remove_before(self, sequence: int) -> None: ...

    def put_snapshot(self, anchor: Anchor, content: bytes) -> None: ...

    def remove_snapshot(self, anchor: Anchor) -> None: ...

    def close(self) -> None: ...
