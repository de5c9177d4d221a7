"""Where one source stands in its numbered stream, and what the next number means.

Rules for this file:

1. A position is ``(epoch, next_seq)``: the epoch of the source, and the number of the batch that is wanted next.
2. Judging a number changes nothing. The owner moves the cursor (``advance``, ``begin``) once it has acted.

Batches of one source carry ``(epoch, seq)``. Within an epoch the numbers run from 0 without holes, so one comparison
tells what a batch is; a batch of another epoch never moves the cursor by itself:

    epoch      seq         verdict      what the owner does
    ---------  ----------  -----------  -------------------------------------------------------------
    equal      = next      NEXT         applies it, ``advance``
    equal      < next      DUPLICATE    drops it, acknowledges again (the acknowledgement was lost)
    equal      > next      GAP          asks again from ``next_seq``; a batch that restates the whole
                                        cache is accepted instead of the missing ones
    larger     any         NEW_EPOCH    drops the old epoch's state first, then ``begin``
    smaller    any         OLD_EPOCH    refuses it: a process of an earlier epoch still sends

A source that announces itself (``Hello``, ``Heartbeat``) states the number it will use next:

    epoch      announced   verdict      what the owner does
    ---------  ----------  -----------  -------------------------------------------------------------
    equal      = next      NEXT         nothing is missing
    equal      > next      GAP          batches were lost at the end: asks again from ``next_seq``
    equal      < next      BACKWARDS    the source started over under its old epoch: treats it as a new epoch
    larger     any         NEW_EPOCH    as above
    smaller    any         OLD_EPOCH    as above
"""

from __future__ import annotations

from enum import Enum


class SequenceVerdict(Enum):
    """What a number means to the stream it arrived on."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"
    BACKWARDS = "backwards"
    NEW_EPOCH = "new epoch"
    OLD_EPOCH = "old epoch"


class Cursor:
    """Position of one source: its epoch, and the batch wanted next."""

    __slots__ = ("epoch", "next_seq")

    def __init__(self, epoch: int, next_seq: int = 0) -> None:
        self.epoch = epoch
        self.next_seq = next_seq

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cursor) and (self.epoch, self.next_seq) == (other.epoch, other.next_seq)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Cursor(epoch={self.epoch}, next_seq={self.next_seq})"

    def judge_batch(self, epoch: int, seq: int) -> SequenceVerdict:
        if epoch != self.epoch:
            return SequenceVerdict.NEW_EPOCH if epoch > self.epoch else SequenceVerdict.OLD_EPOCH
        if seq == self.next_seq:
            return SequenceVerdict.NEXT
        return SequenceVerdict.DUPLICATE if seq < self.next_seq else SequenceVerdict.GAP

    def judge_announcement(self, epoch: int, next_seq: int) -> SequenceVerdict:
        """Say what it means that the source will number its next batch ``(epoch, next_seq)``."""
        if epoch != self.epoch:
            return SequenceVerdict.NEW_EPOCH if epoch > self.epoch else SequenceVerdict.OLD_EPOCH
        if next_seq == self.next_seq:
            return SequenceVerdict.NEXT
        return SequenceVerdict.BACKWARDS if next_seq < self.next_seq else SequenceVerdict.GAP

    def advance(self) -> None:
        self.next_seq += 1

    def begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_seq = 0
