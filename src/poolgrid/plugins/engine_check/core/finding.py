"""What a check found: a typed value for each mismatch, with the words that name it, its place, and what to set."""

from __future__ import annotations

from enum import Enum

import msgspec


class FindingSeverity(Enum):
    """Severity of a finding for routing by the events."""

    FAULT = "fault"
    """The events cannot be used as they are."""
    WARNING = "warning"
    """They can, within the limits of the finding."""
    NOTE = "note"
    """Good to know."""


class Kind(Enum):
    """What can be wrong with an engine's events, and the area it belongs to. The order is that of the report: causes
    before what follows."""

    def __new__(cls, name: str, area: str) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = name
        kind.area = area
        return kind

    area: str

    EVENTS_OFF = ("events off", "publishers")
    PUBLISHER_CONNECTS = ("publisher connects", "publishers")
    ENDPOINT_REFUSED = ("endpoint refused", "publishers")
    NO_PUBLISHER = ("no publisher", "publishers")
    PORTS_COLLIDE = ("ports collide", "publishers")
    RANK_WITHOUT_SOURCE = ("rank without source", "publishers")
    RANK_SILENT = ("rank silent", "publishers")
    WRONG_RANK = ("wrong rank", "messages")
    WRONG_TOPIC = ("wrong topic", "messages")
    MESSAGE_SHAPE = ("message shape", "messages")
    UNDECODABLE = ("undecodable", "messages")
    FORMS_MIXED = ("forms mixed", "messages")
    UNKNOWN_EVENTS = ("unknown events", "messages")
    RESTARTED = ("restarted", "messages")
    SEQUENCE_JUMPS = ("sequence jumps", "messages")
    REPLAY_MISSING = ("replay missing", "replay")
    REPLAY_SILENT = ("replay silent", "replay")
    REPLAY_DIFFERS = ("replay differs", "replay")
    BLOCK_SIZE = ("block size", "blocks")
    TOKENS_MISSING = ("tokens missing", "blocks")
    TOKENS_AND_HASHES = ("tokens and hashes", "blocks")
    PARENT_UNKNOWN = ("parent unknown", "blocks")
    WINDOWS = ("windows", "blocks")
    GROUPS_UNNAMED = ("groups unnamed", "blocks")
    SALT_MISSING = ("salt missing", "salts and adapters")
    SALT_IGNORED = ("salt ignored", "salts and adapters")
    LORA_UNNAMED = ("LoRA unnamed", "salts and adapters")
    KEYS_ORDER = ("order of keys", "salts and adapters")
    KEYS_UNKNOWN = ("keys unknown", "salts and adapters")
    OTHER_MEDIUM = ("other medium", "blocks")
    CACHING_OFF = ("caching off", "reuse")
    BLOCKS_MISSING = ("blocks missing", "blocks")
    BLOCKS_TOO_MANY = ("blocks too many", "blocks")
    NOT_TAKEN_IN = ("not taken in", "blocks")
    CACHED_TOKENS_UNSAID = ("cached tokens unsaid", "reuse")
    CACHED_TOKENS_DIFFER = ("cached tokens differ", "reuse")
    PROBE_FAILED = ("probe failed", "probes")
    TRANSFERS_FAILED = ("transfers failed", "transfers")
    TRANSFERS_SLOW = ("transfers slow", "transfers")
    TRANSFERS_IN_PIECES = ("transfers in pieces", "transfers")


RANK = {kind: number for number, kind in enumerate(Kind)}


class Finding(msgspec.Struct, frozen=True):
    """One mismatch."""

    kind: Kind
    severity: FindingSeverity
    place: str
    """Where it was seen: a rank, a message's number, a probe."""
    words: str
    """What was seen and what was expected, in a sentence."""
    remedy: str = ""
    """What to set; empty = nothing that a setting changes."""


def fault(kind: Kind, place: str, words: str, remedy: str = "") -> Finding:
    """Return a finding that keeps the events from being used."""
    return Finding(kind, FindingSeverity.FAULT, place, words, remedy)


def warning(kind: Kind, place: str, words: str, remedy: str = "") -> Finding:
    """Return a finding that limits what the events are good for."""
    return Finding(kind, FindingSeverity.WARNING, place, words, remedy)


def note(kind: Kind, place: str, words: str, remedy: str = "") -> Finding:
    """Return a finding that changes nothing."""
    return Finding(kind, FindingSeverity.NOTE, place, words, remedy)
