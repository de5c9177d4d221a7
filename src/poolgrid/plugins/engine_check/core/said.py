"""An engine's message, read without judging: unlike ``decode_pub``, which leaves out what cannot be used.

A check wants to know what was left out, and why. Nothing here raises but ``DecodeError``, for a message that is none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from poolgrid.kernel.kv_events.pub import HASH_BYTES_MAX, WHAT, event_fields, read_envelope
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.plugins.engine_check.core.evidence import Evidence

SEQUENCE_BYTES = 8
_U64 = 2**64 - 1


class SaidStored(Struct, frozen=True):
    """Blocks became reusable."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...] | None
    """``None`` = the event has no list of tokens."""
    block_size: int | None
    lora_name: str = ""
    lora_id: int | None = None
    salt: str = ""
    keys: tuple[tuple[Any, ...], ...] = ()
    """What the hash of each block covers in addition to tokens; empty = the event does not list it."""
    medium: str = ""
    group: int | None = None
    attention: str = ""
    """Kind of the layers' cache, as the engine calls it; empty = not reported."""
    looks_ahead: bool = False
    """Whether the hash of a block covers tokens behind it, as drafting layers have it."""

    @property
    def stands_for_prefixes(self) -> bool:
        """Whether the blocks are those of full attention, as far as is reported."""
        kind = self.attention.lower()
        return not kind or "full" in kind or "mla" in kind


class SaidRemoved(Struct, frozen=True):
    """Blocks are gone from a medium."""

    hashes: tuple[int, ...]
    medium: str = ""
    group: int | None = None


class SaidCleared(Struct, frozen=True):
    """The cache is empty."""


class SaidOther(Struct, frozen=True):
    """An event of a name that is not known, or one of a known name that has no sense."""

    words: str


SaidEvent = SaidStored | SaidRemoved | SaidCleared | SaidOther


class SaidMessage(Struct, frozen=True):
    """One message of a publisher or of its replay."""

    topic: str
    sequence: int
    payload: bytes
    envelope_form: str
    """``array`` or ``map``."""
    event_forms: frozenset[str]
    dp_rank: int | None
    events: tuple[SaidEvent, ...]


def read_sequence(message: Sequence[bytes]) -> int:
    """Return the number of a message; raises ``DecodeError`` when it is not of the usual three parts."""
    if len(message) < 2 or len(message[-2]) != SEQUENCE_BYTES:
        parts = ", ".join(f"{len(part)} bytes" for part in message[:4])
        raise DecodeError(WHAT, f"parts of {parts}; expected are a topic, 8 bytes of sequence number and a payload")
    return int.from_bytes(message[-2], "big")


def read_message(message: Sequence[bytes]) -> SaidMessage:
    """Return the content of a message; raises ``DecodeError``."""
    sequence = read_sequence(message)
    try:
        value = msgspec.msgpack.decode(message[-1])
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError) as error:
        raise DecodeError(WHAT, f"its payload is no msgpack: {error}") from None
    _, raw_events, rank = read_envelope(value)
    return SaidMessage(
        topic=b"".join(message[:-2]).decode(errors="replace"),
        sequence=sequence,
        payload=message[-1],
        envelope_form=_form(value),
        event_forms=frozenset(map(_form, raw_events)),
        dp_rank=rank if type(rank) is int else None,
        events=tuple(map(_event, raw_events)),
    )


def _form(value: Any) -> str:
    return "map" if isinstance(value, dict) else "array"


def _event(raw: Any) -> SaidEvent:
    kind, fields = event_fields(raw)
    if kind == "AllBlocksCleared":
        return SaidCleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return SaidOther(f"an event of the name {str(kind)[:60]!r}")
    names = fields.get("block_hashes")
    hashes = tuple(map(_hash, names)) if isinstance(names, list) else ()
    if not isinstance(names, list) or None in hashes:
        return SaidOther(f"a {kind} whose block_hashes are {str(names)[:60]!r}")
    medium, group = _text(fields.get("medium")), fields.get("group_idx")
    known = tuple(name for name in hashes if name is not None)
    number = group if type(group) is int else None
    if kind == "BlockRemoved":
        return SaidRemoved(known, medium, number)
    parent = fields.get("parent_block_hash")
    size, lora_id = fields.get("block_size"), fields.get("lora_id")
    return SaidStored(
        hashes=known,
        parent=None if parent is None else _hash(parent),
        tokens=_tokens(fields.get("token_ids")),
        block_size=size if type(size) is int else None,
        lora_name=_text(fields.get("lora_name")),
        lora_id=lora_id if type(lora_id) is int else None,
        salt=_text(fields.get("cache_salt")),
        keys=_keys(fields.get("extra_keys")),
        medium=medium,
        group=number,
        attention=_text(fields.get("kv_cache_spec_kind")),
        looks_ahead=_are_pairs(fields.get("token_ids")) or bool(fields.get("lookahead_token_ids")),
    )


def _hash(value: Any) -> int | None:
    """Return the u64 that stands for a hash, as ``decode_pub`` makes it; ``None`` = it is none."""
    if type(value) is int:
        return value & _U64
    if isinstance(value, bytes) and 0 < len(value) <= HASH_BYTES_MAX:
        return int.from_bytes(value[-8:], "big")
    return None


def _tokens(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if _are_pairs(value):
        value = [pair[0] for pair in value]
    try:
        struct.pack(f"<{len(value)}I", *value)
    except struct.error:
        return None
    return tuple(value)


def _are_pairs(value: Any) -> bool:
    """Return whether tokens come each with the one behind it."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, list) and len(each) == 2 for each in value)


def _keys(value: Any) -> tuple[tuple[Any, ...], ...]:
    if not isinstance(value, list):
        return ()
    keys = tuple(tuple(each) if isinstance(each, list) else () if each is None else (each,) for each in value)
    return keys if any(keys) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A message of the subscription; ``number`` is its place among all that arrived, from 0."""

    number: int
    sequence: int
    said: SaidMessage | None
    """``None`` = it could not be read."""
    error: str = ""


@dataclass(slots=True)
class RankStream:
    """Messages of one rank's publisher."""

    rank: int
    live: list[LiveMessage] = field(default_factory=list)
    shapeless: list[tuple[int, str]] = field(default_factory=list)
    """Messages without a sequence number: their places, and what was wrong."""
    replayed: dict[int, bytes] = field(default_factory=dict)
    """Payloads by sequence number."""
    replayed_said: dict[int, SaidMessage] = field(default_factory=dict)
    whole: list[LiveMessage] = field(default_factory=list)
    """Live messages, with those of the replay in place of lost ones."""

    def said(self) -> Iterator[tuple[int, SaidMessage]]:
        return ((each.number, each.said) for each in self.whole if each.said is not None)

    def stored(self) -> Iterator[tuple[int, SaidMessage, SaidStored]]:
        for number, said in self.said():
            for event in said.events:
                if isinstance(event, SaidStored):
                    yield number, said, event


def read_streams(evidence: Evidence) -> dict[int, RankStream]:
    """Return the streams by rank; silent ranks have an empty one."""
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
                continue  # the live message of this number shows what is wrong with it
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
