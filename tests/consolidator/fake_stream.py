"""A stream in memory that fails as servers do: answers that are lost, messages that come late, an end that is lost."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.plugins.nats.message import (
    Anchor,
    Outgoing,
    OutOfTurn,
    StoredMessage,
    StreamFacts,
    StreamUnavailable,
    stored_message,
)


class FakeStream:
    """``RecordStream``; several writers may hold the same one."""

    def __init__(self, body_bytes_max: int = 1024 * 1024) -> None:
        self.name = "fake"
        self.body_bytes_max = body_bytes_max
        self.messages: dict[int, StoredMessage] = {}
        self.first = 1
        self.last = 0
        self.objects: dict[Anchor, bytes] = {}
        self.down = False
        self.answers_lost_after: int | None = None
        """How many messages of the next append are stored before its answers are lost."""
        self.late: list[tuple[Outgoing, int, bool]] = []
        """Messages without an answer that are still on their way."""
        self.read_max = 3

    def store(self, message: Outgoing, expected: int, begins: bool) -> None:
        """Do with one message as a server does, which knows nothing of the others."""
        if expected != self.last:
            raise OutOfTurn(f"wrong last sequence: {self.last}, expected {expected}")
        writer = message.message_id.rpartition(".")[0]
        own = max((at for at, each in self.messages.items() if each.message_id.rpartition(".")[0] == writer), default=0)
        if own != (0 if begins else expected):
            raise OutOfTurn(f"wrong last sequence of {writer}: {own}, expected {0 if begins else expected}")
        self.last += 1
        self.messages[self.last] = stored_message(self.last, message.headers(), message.body)

    def deliver_late(self) -> list[bool]:
        """Let what was on its way arrive; say of each whether it was stored."""
        stored = []
        for each in self.late:
            try:
                self.store(*each)
            except OutOfTurn:
                stored.append(False)
            else:
                stored.append(True)
        self.late.clear()
        return stored

    def lose_end(self, last: int) -> None:
        """Forget what was stored last, as a server whose machine lost power."""
        for sequence in range(last + 1, self.last + 1):
            del self.messages[sequence]
        self.last = last

    def _check(self) -> None:
        if self.down:
            raise StreamUnavailable("the stream is down")

    def open(self) -> None:
        self._check()

    def facts(self) -> StreamFacts:
        self._check()
        size = sum(len(message.body) for message in self.messages.values())
        return StreamFacts(self.first, self.last, len(self.messages), size)

    def append(
        self, messages: Sequence[Outgoing], last_sequence: int, begins: bool = False, own_sequence: int | None = None
    ) -> None:
        self._check()
        lost, self.answers_lost_after = self.answers_lost_after, None
        for number, message in enumerate(messages):
            sent = (message, last_sequence + number, begins and not number)
            if number == lost:
                self.late.append(sent)
                raise StreamUnavailable("no answer")
            self.store(*sent)
        if lost is not None:
            raise StreamUnavailable("no answer")

    def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        self._check()
        first = max(from_sequence, self.first)
        return [self.messages[at] for at in range(first, min(self.last + 1, first + min(limit, self.read_max)))]

    def remove_before(self, sequence: int) -> None:
        self._check()
        for at in range(self.first, sequence):
            del self.messages[at]
        self.first = sequence

    def snapshots(self) -> list[Anchor]:
        self._check()
        return sorted(self.objects, key=lambda anchor: anchor.offset)

    def put_snapshot(self, anchor: Anchor, content: bytes) -> None:
        self._check()
        self.objects[anchor] = content

    def get_snapshot(self, anchor: Anchor) -> bytes:
        self._check()
        if anchor not in self.objects:
            raise JournalCorrupt("snapshot", 0, anchor.offset, "gone", "wait")
        return self.objects[anchor]

    def remove_snapshot(self, anchor: Anchor) -> None:
        self._check()
        self.objects.pop(anchor, None)

    def close(self) -> None:
        pass
