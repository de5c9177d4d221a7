"""What a check found: a typed value for each mismatch, with the words that name it, its place, and what to set."""

from __future__ import annotations

from enum import Enum

import msgspec


class Severity(Enum):
    """How much a finding matters to who routes by the events."""

    FAULT = "fault"
    """The events cannot be used as they are."""
    WARNING = "warning"
    """They can, with what the finding says in mind."""
    NOTE = "note"
    """Good to know."""


class Kind(Enum):
    """What can be wrong with an engine's events. The order is that of the report: causes before what follows."""

    EVENTS_OFF = "events off"
    PUBLISHER_CONNECTS = "publisher connects"
    ENDPOINT_REFUSED = "endpoint refused"
    NO_PUBLISHER = "no publisher"
    PORTS_COLLIDE = "ports collide"
    RANK_WITHOUT_SOURCE = "rank without source"
    RANK_SILENT = "rank silent"
    WRONG_RANK = "wrong rank"
    WRONG_TOPIC = "wrong topic"
    MESSAGE_SHAPE = "message shape"
    UNDECODABLE = "undecodable"
    FORMS_MIXED = "forms mixed"
    UNKNOWN_EVENTS = "unknown events"
    RESTARTED = "restarted"
    SEQUENCE_JUMPS = "sequence jumps"
    REPLAY_MISSING = "replay missing"
    REPLAY_SILENT = "replay silent"
    REPLAY_DIFFERS = "replay differs"
    BLOCK_SIZE = "block size"
    TOKENS_MISSING = "tokens missing"
    TOKENS_AND_HASHES = "tokens and hashes"
    PARENT_UNKNOWN = "parent unknown"
    WINDOWS = "windows"
    GROUPS_UNNAMED = "groups unnamed"
    SALT_MISSING = "salt missing"
    SALT_IGNORED = "salt ignored"
    LORA_UNNAMED = "LoRA unnamed"
    KEYS_ORDER = "order of keys"
    KEYS_UNKNOWN = "keys unknown"
    OTHER_MEDIUM = "other medium"
    CACHING_OFF = "caching off"
    BLOCKS_MISSING = "blocks missing"
    BLOCKS_TOO_MANY = "blocks too many"
    NOT_TAKEN_IN = "not taken in"
    CACHED_TOKENS_UNSAID = "cached tokens unsaid"
    CACHED_TOKENS_DIFFER = "cached tokens differ"
    PROBE_FAILED = "probe failed"


RANK = {kind: number for number, kind in enumerate(Kind)}


class Finding(msgspec.Struct, frozen=True):
    """One mismatch."""

    kind: Kind
    severity: Severity
    place: str
    """Where it was seen: a rank, a message's number, a probe."""
    words: str
    """What was seen and what was expected, in a sentence."""
    remedy: str = ""
    """What to set; empty = nothing that a setting changes."""


def fault(kind: Kind, place: str, words: str, remedy: str = "") -> Finding:
    """Return a finding that keeps the events from being used."""
    return Finding(kind, Severity.FAULT, place, words, remedy)


def warning(kind: Kind, place: str, words: str, remedy: str = "") -> Finding:
    """Return a finding that limits what the events are good for."""
    return Finding(kind, Severity.WARNING, place, words, remedy)


def note(kind: Kind, place: str, words: str, remedy: str = "") -> Finding:
    """Return a finding that changes nothing."""
    return Finding(kind, Severity.NOTE, place, words, remedy)
