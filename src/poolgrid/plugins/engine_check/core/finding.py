"""What a check found: a typed value for each mismatch, with the words that name it, its place, and what to set."""

from __future__ import annotations

from enum import Enum

import msgspec

from poolgrid.server.diagnosis.causes import Cause


class FindingSeverity(Enum):
    """Severity of a finding for routing by the events."""

    FAULT = "fault"
    """The events cannot be used as they are."""
    WARNING = "warning"
    """They can, within the limits of the finding."""
    NOTE = "note"
    """Good to know."""


class Kind(Enum):
    """What messages show, the area it belongs to, and the cause that it proves as a fault; ``None`` = none alone.

    The order is that of the report: causes before what follows.
    """

    def __new__(cls, name: str, area: str, cause: Cause | None = None) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = name
        kind.area = area
        kind.cause = cause
        return kind

    area: str
    cause: Cause | None

    EVENTS_OFF = ("events off", "publishers", Cause.NO_EVENTS)
    PUBLISHER_CONNECTS = ("publisher connects", "publishers", Cause.WRONG_ENDPOINT)
    ENDPOINT_REFUSED = ("endpoint refused", "publishers", Cause.WRONG_ENDPOINT)
    NO_PUBLISHER = ("no publisher", "publishers", Cause.WRONG_ENDPOINT)
    PORTS_COLLIDE = ("ports collide", "publishers", Cause.WRONG_ENDPOINT)
    RANK_WITHOUT_SOURCE = ("rank without source", "publishers", Cause.WRONG_ENDPOINT)
    RANK_SILENT = ("rank silent", "publishers")
    WRONG_RANK = ("wrong rank", "messages", Cause.WRONG_ENDPOINT)
    WRONG_TOPIC = ("wrong topic", "messages", Cause.WRONG_ENDPOINT)
    MESSAGE_SHAPE = ("message shape", "messages", Cause.EVENTS_UNFIT)
    UNDECODABLE = ("undecodable", "messages", Cause.EVENTS_UNFIT)
    FORMS_MIXED = ("forms mixed", "messages")
    UNKNOWN_EVENTS = ("unknown events", "messages")
    RESTARTED = ("restarted", "messages", Cause.RESTART)
    SEQUENCE_JUMPS = ("sequence jumps", "messages", Cause.GAP)
    REPLAY_MISSING = ("replay missing", "replay")
    REPLAY_SILENT = ("replay silent", "replay", Cause.EVENTS_UNFIT)
    REPLAY_DIFFERS = ("replay differs", "replay", Cause.WRONG_ENDPOINT)
    BLOCK_SIZE = ("block size", "blocks", Cause.BLOCK_SIZE)
    TOKENS_MISSING = ("tokens missing", "blocks", Cause.EVENTS_UNFIT)
    TOKENS_AND_HASHES = ("tokens and hashes", "blocks", Cause.EVENTS_UNFIT)
    PARENT_UNKNOWN = ("parent unknown", "blocks", Cause.EVENTS_UNFIT)
    WINDOWS = ("windows", "blocks", Cause.EVENTS_UNFIT)
    GROUPS_UNNAMED = ("groups unnamed", "blocks", Cause.GROUP)
    SALT_MISSING = ("salt missing", "salts and adapters", Cause.SALT)
    SALT_IGNORED = ("salt ignored", "salts and adapters", Cause.SALT)
    LORA_UNNAMED = ("LoRA unnamed", "salts and adapters", Cause.ADAPTER)
    KEYS_ORDER = ("order of keys", "salts and adapters", Cause.SALT)
    KEYS_UNKNOWN = ("keys unknown", "salts and adapters", Cause.EVENTS_UNFIT)
    OTHER_MEDIUM = ("other medium", "blocks")
    BLOCKS_MISSING = ("blocks missing", "blocks")
    BLOCKS_TOO_MANY = ("blocks too many", "blocks")
    NOT_TAKEN_IN = ("not taken in", "blocks", Cause.EVENTS_UNFIT)
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
