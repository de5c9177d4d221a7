"""The messages of each rank as they were read, live and replayed, with those that could not be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from poolgrid.tools.engine_check.core.evidence import Evidence
from poolgrid.tools.engine_check.core.said import SaidMessage, SaidStored, read_message, read_sequence
from poolgrid.wire.errors import DecodeError


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A message of the subscription; ``number`` is its place among all that was heard, from 0."""

    number: int
    sequence: int
    said: SaidMessage | None
    """``None`` = it could not be read."""
    error: str = ""


@dataclass(slots=True)
class RankStream:
    """What one rank's publisher said."""

    rank: int
    live: list[LiveMessage] = field(default_factory=list)
    shapeless: list[tuple[int, str]] = field(default_factory=list)
    """Messages without a sequence number: their places, and what was wrong."""
    replayed: dict[int, bytes] = field(default_factory=dict)
    """Payloads by sequence number."""
    replayed_said: dict[int, SaidMessage] = field(default_factory=dict)
    whole: list[LiveMessage] = field(default_factory=list)
    """What was heard live, with what the replay has in place of what was lost."""

    def said(self) -> Iterator[tuple[int, SaidMessage]]:
        return ((each.number, each.said) for each in self.whole if each.said is not None)

    def stored(self) -> Iterator[tuple[int, SaidMessage, SaidStored]]:
        """Yield every stored event."""
        for number, said in self.said():
            for event in said.events:
                if isinstance(event, SaidStored):
                    yield number, said, event


def read_streams(evidence: Evidence) -> dict[int, RankStream]:
    """Return the streams by rank; ranks that said nothing have an empty one."""
    streams = {source.rank: RankStream(source.rank) for source in evidence.sources}
    for number, heard in enumerate(evidence.heard):
        stream = streams.setdefault(heard.rank, RankStream(heard.rank))
        try:
            sequence = read_sequence(heard.message)
        except DecodeError as error:
            stream.shapeless.append((number, error.detail))
            continue
        try:
            stream.live.append(LiveMessage(number, sequence, read_message(heard.message)))
        except DecodeError as error:
            stream.live.append(LiveMessage(number, sequence, None, error.detail))
    for replay in evidence.replays:
        stream = streams.setdefault(replay.rank, RankStream(replay.rank))
        for message in replay.messages:
            try:
                stream.replayed[read_sequence(message)] = message[-1]
                said = read_message(message)
            except DecodeError:
                continue  # the live message of this number says what is wrong with it
            stream.replayed_said[said.sequence] = said
    for stream in streams.values():
        _fill(stream)
    return streams


def _fill(stream: RankStream) -> None:
    """Put what was lost and is in the replay where it belongs."""
    expected = None
    for message in stream.live:
        if expected is not None:
            for sequence in range(expected, message.sequence):
                said = stream.replayed_said.get(sequence)
                if said is None:
                    break  # what follows a lost message is not known either
                stream.whole.append(LiveMessage(message.number, sequence, said))
        stream.whole.append(message)
        expected = message.sequence + 1
