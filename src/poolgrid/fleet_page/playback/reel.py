"""Frames of a pool's past: the fold of its journal, looked at again and again on its way.

The first frame has everything, a later one what changed since the one before. Pure: records come from an iterator, and
its caller decides where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from poolgrid.consolidator.core.pool_state import MemberRank, PoolState
from poolgrid.wire.events import (
    BlocksRemoved,
    BlocksStored,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
)
from poolgrid.wire.feed import own_stream
from poolgrid.wire.identifiers import Tier, WorkerKey

CELLS_MAX = 60_000
"""Workers times frames: a few megabytes of JSON. A larger pool gets fewer frames."""

REQUESTS_PER_FRAME_MAX = 500
"""Starts and ends in one frame; what is beyond is counted."""

ACTIVE_MAX = 5_000
"""Requests named that were on workers when the reel begins."""

LOOK_EVERY_RECORDS = 256
"""Records between two looks at whether the time is up."""

HASH_BYTES = 8

WORKER_COLUMNS = ("state", "role", "running", "waiting", "requests", "held", "total", "stored", "removed", "stream")

Path = tuple[str, Sequence[int], int]
"""A conversation's name, the sequence hashes of its prompt, the tokens of a block."""

WorkerFrame = tuple[str, str, int, int, int, int, int, int, int, str]


class ReelFrame(msgspec.Struct):
    """One moment."""

    time_ms: int
    offset: int
    """Records before this one are in it."""
    workers: dict[str, WorkerFrame]
    gone: list[str]
    holders: dict[str, list[tuple[str, int]]]
    """By conversation, the holders and their number of leading blocks."""
    began: list[tuple[str, str, int, int]]
    """Requests that engines began: dispatch, worker, prompt tokens, reused tokens."""
    ended: list[tuple[str, str]]
    """Requests that ended: dispatch, why."""
    untold: int
    """Starts and ends beyond the limit."""


class Reel(msgspec.Struct):
    """A stretch of a pool's past."""

    from_ms: int
    to_ms: int
    columns: tuple[str, ...]
    conversations: list[tuple[str, int, int]]
    """Names, with the whole blocks of their prompts and the tokens of a block."""
    active: list[tuple[str, str, int, int]]
    """Requests that were on workers when it begins, as in ``ReelFrame.began``."""
    frames: list[ReelFrame]
    records: int
    """Records folded."""
    cut: str
    """Why it ends before ``to_ms``; empty when it does not."""


def moments(from_ms: int, to_ms: int, frames: int, workers: int) -> list[int]:
    """Return the times of the frames: the last is ``to_ms``."""
    count = max(1, min(frames, CELLS_MAX // max(1, workers)))
    if count == 1:
        return [to_ms]
    return [from_ms + (to_ms - from_ms) * number // (count - 1) for number in range(count)]


class _Camera:
    """Sees what changed in a pool from frame to frame."""

    def __init__(self, pool: PoolState, paths: Sequence[Path]) -> None:
        self._pool = pool
        self._paths = paths
        self._shown: dict[str, WorkerFrame] = {}
        self._holders: dict[str, dict[str, int]] = {name: {} for name, _, _ in paths}
        self._flows: dict[WorkerKey, list[int]] = {}
        """Blocks stored and removed since the last frame."""
        self._touched: set[WorkerKey] = set(pool.workers)
        self._cached: set[WorkerKey] = set(pool.workers)
        """Workers whose blocks changed."""
        self._began: list[tuple[str, str, int, int]] = []
        self._ended: list[tuple[str, str]] = []
        self._untold = 0

    def see(self, record: JournalRecord) -> None:
        """Take note of a record that is about to be folded."""
        key = record.worker
        self._touched.add(key)
        for event in record.events:
            if type(event) is BlocksStored or type(event) is BlocksRemoved:
                flow = self._flows.setdefault(key, [0, 0])
                flow[type(event) is BlocksRemoved] += len(event.sequence_hashes) // HASH_BYTES
                self._cached.add(key)
            elif type(event) is RequestStarted:
                if self._has_room():
                    self._began.append((event.request_id, str(key), event.isl, event.cached_tokens))
            elif type(event) is RequestFinished:
                if self._has_room():
                    self._ended.append((event.request_id, event.reason))
            else:
                self._cached.add(key)

    def _has_room(self) -> bool:
        full = len(self._began) + len(self._ended) >= REQUESTS_PER_FRAME_MAX
        self._untold += full
        return not full

    def take(self, time_ms: int) -> ReelFrame:
        """Return what changed since the last frame."""
        workers: dict[str, WorkerFrame] = {}
        gone: list[str] = []
        for key in sorted(self._touched | self._flows.keys()):
            name = str(key)
            worker = self._pool.workers.get(key)
            if worker is None:
                if self._shown.pop(name, None) is not None:
                    gone.append(name)
                continue
            seen = self._worker(worker)
            if self._shown.get(name) != seen:
                workers[name] = self._shown[name] = seen
        # What flowed in this frame is over in the next: its worker is looked at once more.
        self._touched = set(self._flows)
        self._flows = {}
        frame = ReelFrame(
            time_ms, self._pool.offset, workers, gone, self._look_at_holders(), self._began, self._ended, self._untold
        )
        self._began, self._ended, self._untold = [], [], 0
        return frame

    def _worker(self, worker: MemberRank) -> WorkerFrame:
        load = worker.load
        stored, removed = self._flows.get(worker.key, (0, 0))
        return (
            "draining" if worker.draining else "restating" if worker.restating else "ready",
            worker.card.role.name.lower(),
            load.running_requests if load else 0,
            load.waiting_requests if load else 0,
            len(worker.requests),
            len(worker.presence),
            worker.card.limits.total_kv_blocks,
            stored,
            removed,
            own_stream(worker.streams.values()).state.name.lower(),
        )

    def _look_at_holders(self) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for key in sorted(self._cached):
            worker = self._pool.workers.get(key)
            name = str(key)
            for conversation, path, _ in self._paths:
                depth = 0 if worker is None else held_depth(worker, path)
                holders = self._holders[conversation]
                if holders.get(name, 0) != depth:
                    if depth:
                        holders[name] = depth
                    else:
                        del holders[name]
                    found[conversation] = []
        self._cached = set()
        for conversation in found:
            found[conversation] = sorted(self._holders[conversation].items(), key=lambda item: (-item[1], item[0]))
        return found


def held_depth(worker: MemberRank, path: Sequence[int]) -> int:
    """Return how many leading blocks of a path a worker holds, on any tier."""
    holds = worker.presence.holds
    for depth, block in enumerate(path):
        if not any(holds(block, tier) for tier in Tier):
            return depth
    return len(path)


def make_reel(
    pool: PoolState,
    records: Iterable[JournalRecord],
    from_ms: int,
    to_ms: int,
    frames: int,
    paths: Sequence[Path],
    time_is_up: Callable[[], bool] = lambda: False,
) -> Reel:
    """Fold records into ``pool`` and return what was to be seen on the way.

    ``records`` continue the pool's offset. Those recorded up to ``from_ms`` are folded without a frame.
    """
    active = [
        (request.request_id, str(key), request.isl, request.cached_tokens)
        for key, worker in sorted(pool.workers.items())
        for request in worker.requests.values()
    ][:ACTIVE_MAX]
    camera = _Camera(pool, paths)
    conversations = [(name, len(path), block_size) for name, path, block_size in paths]
    reel = Reel(from_ms, to_ms, WORKER_COLUMNS, conversations, active, [], 0, "")
    waiting: Iterator[JournalRecord] = iter(records)
    record = next(waiting, None)
    for moment in moments(from_ms, to_ms, frames, len(pool.workers)):
        while record is not None and record.recorded_ms <= moment:
            camera.see(record)
            pool.apply(record)
            reel.records += 1
            if reel.records % LOOK_EVERY_RECORDS == 0 and time_is_up():
                reel.cut = f"reading so many records takes too long: it ends at record {pool.offset}"
                moment = record.recorded_ms  # noqa: PLW2901 - the last frame is of here
                record = None
                break
            record = next(waiting, None)
        reel.frames.append(camera.take(moment))
        if reel.cut:
            break
    return reel


RECORDS_MAX = 200_000
"""Records read for the legs of one request: minutes of a busy pool. What is later is not found."""


class Leg(msgspec.Struct):
    """One dispatch and when what happened to it: Unix milliseconds, ``None`` for what has not happened yet.

    The first is by the router's clock, the others by the worker's.
    """

    dispatch_id: str
    worker: str
    stage: str
    placed_ms: int | None = None
    """When its worker was chosen."""
    started_ms: int | None = None
    """When the engine scheduled it."""
    prefilled_ms: int | None = None
    """When its first token existed."""
    ended_ms: int | None = None
    end: str = ""
    """Why it ended, in the worker's word."""
    released: bool = False
    """Whether the router has taken it off its books."""
    cached_tokens: int | None = None
    conversation: str = ""
    queued_ms: float = 0.0
    """How long the request waited for a worker with room before this one was chosen: in the router's queue, or in that
    of the global router before it."""

    @property
    def status(self) -> str:
        if self.ended_ms is not None:
            return self.end
        if self.released:
            return "released"
        if self.prefilled_ms is not None:
            return "output"
        return "placed" if self.started_ms is None else "prefill"


def note_event(leg: Leg, event: object, time_ms: int) -> None:
    """Take what a worker reports of one of its requests."""
    if type(event) is RequestStarted:
        leg.started_ms, leg.cached_tokens = time_ms, event.cached_tokens
    elif type(event) is PrefillCompleted:
        leg.prefilled_ms = time_ms
    elif type(event) is RequestFinished:
        leg.ended_ms, leg.end = time_ms, event.reason
        if event.cached_tokens is not None:
            leg.cached_tokens = event.cached_tokens


def fill(legs: Sequence[Leg], records: Iterable[JournalRecord]) -> None:
    """Fill in the journal's times of legs; stops once all have ended."""
    by_id = {leg.dispatch_id: leg for leg in legs}
    open_legs = len(by_id)
    for number, record in enumerate(records):
        if not open_legs or number >= RECORDS_MAX:
            return
        for event in record.events:
            if type(event) is RequestStarted or type(event) is PrefillCompleted or type(event) is RequestFinished:
                leg = by_id.get(event.request_id)
                if leg is not None:
                    note_event(leg, event, record.time_ms)
                    open_legs -= type(event) is RequestFinished
