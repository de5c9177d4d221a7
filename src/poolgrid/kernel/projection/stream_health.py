"""Which workers' overlap is trusted, and what replaces it where it is not.

Rules
    1. A worker is untrusted while its own stream is ``STALE`` (reported by the consolidator) or ``suspect``
       (found by ``OverlapCheck``). All other workers are trusted, regardless of the past, and of what becomes of
       further sources.
    2. From the moment a worker is untrusted, the router's own choices for it are recorded, and its overlap is what they
       predict, for ``ttl_ms`` each. Its part of the index is kept up to date meanwhile and not used.
    3. A worker that is trusted again, or leaves, loses its predictions.
    4. What a chosen worker computed and has not reported yet counts as cached (``ComputedPrompts``), as long as its
       stream is trusted.
    5. It is a fold like the projection it belongs to: events, choices and their times decide, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from poolgrid.kernel.index.lower_tiers import TierOverlap
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.wire.feed import SourceStream, own_stream
from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey

PENDING_MAX: Final = 16_384
"""Chosen requests whose start is awaited for the cross-check; beyond it the oldest is not checked."""

PREDICTION_TTL_MS: Final = 120_000.0
"""How long a choice counts as cached by an untrusted worker, as in approximate mode."""

PREDICTION_BUDGET_BYTES: Final = 64 * 1024 * 1024
"""Memory of the predictions: half a million blocks; beyond it the oldest paths are cut."""


OpenChoice = tuple[WorkerKey, str, Sequence[int], int, int, int]
"""A choice whose start is awaited: worker, dispatch, path, block size, blocks that it held by the index, and the
place among the prompts that are computed, from 1 on, or 0."""

Window = tuple[WorkerKey, list[tuple[int, int, int]], bool]
"""A worker's cross-check: what counts for it (predicted, realised, disagreeing tokens), and whether it is suspect."""


class _Pending(msgspec.Struct, gc=False):
    """A chosen request that its worker has not started yet."""

    path: Sequence[int]
    block_size: int
    blocks: int
    """The index's result for the prompt when it was chosen."""


class StreamHealth:
    """The trust in every worker's stream, over one prefix index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._states: dict[WorkerKey, tuple[StreamState, str]] = {}
        self._checks: dict[WorkerKey, OverlapCheck] = {}
        self._pending: OrderedDict[tuple[WorkerKey, str], _Pending] = OrderedDict()
        self.predictions = ApproximateIndex(PrefixIndex(PREDICTION_BUDGET_BYTES), PREDICTION_TTL_MS)
        """What stands in for the overlap of the workers in ``untrusted``."""
        self.untrusted: dict[WorkerKey, str] = {}
        """Workers whose overlap is not trusted, and why."""
        self.computed = ComputedPrompts()
        """Prompts of choices whose start is awaited and whose first token came."""
        self.verdicts = 0
        """How often a worker became suspect."""

    # Facts

    def note_streams(self, worker: WorkerKey, streams: Iterable[SourceStream]) -> None:
        """Take the journal's events about a worker's streams."""
        own = own_stream(streams)
        self._states[worker] = (own.state, own.reason)
        self._judge(worker)

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that left, or whose life ended."""
        self._states.pop(worker, None)
        self._checks.pop(worker, None)
        self.computed.drop_all_of(worker)
        self._judge(worker)

    def started(self, worker: WorkerKey, request_id: str, cached_tokens: int) -> tuple[Sequence[int], int] | None:
        """Compare what a worker reused with the index's result for it, for a request that was chosen here.

        The index is asked at the choice and now, and the number in between that is nearest to the truth counts: a batch
        may report the request's own blocks before its start, and others may have come since the choice.

        Engines that report the reused tokens only at the end are compared then: what they hold and the index does not
        is not stored again meanwhile, so it is still missed.

        Returns the request's path and the predicted tokens; ``None`` for one that is not awaited.
        """
        pending = self._pending.pop((worker, request_id), None)
        if pending is None:
            return None
        self.computed.drop(worker, request_id)
        block_size = pending.block_size
        predicted = pending.blocks * block_size
        if predicted != cached_tokens:
            now = self._index.overlap(pending.path, worker).blocks * block_size
            predicted = min(max(cached_tokens, min(predicted, now)), max(predicted, now))
        check = self._checks.get(worker)
        if check is None:
            check = self._checks[worker] = OverlapCheck()
        if check.add(predicted, cached_tokens, block_size):
            self.verdicts += check.is_suspect
            self._judge(worker)
        return pending.path, predicted

    def awaited_path(self, worker: WorkerKey, request_id: str) -> Sequence[int]:
        """Return the path of a choice whose start, or report, is awaited; empty where there is none."""
        pending = self._pending.get((worker, request_id))
        return () if pending is None else pending.path

    def not_started(self, worker: WorkerKey, request_id: str) -> None:
        if self._pending.pop((worker, request_id), None) is not None:
            self.computed.drop(worker, request_id)

    def _judge(self, worker: WorkerKey) -> None:
        state, reason = self._states.get(worker, (StreamState.SYNCING, ""))
        check = self._checks.get(worker)
        if state is StreamState.STALE:
            self.untrusted[worker] = f"stale: {reason}"
        elif check is not None and check.is_suspect:
            self.untrusted[worker] = f"suspect: {check.says()}"
        elif self.untrusted.pop(worker, None) is not None:
            self.predictions.drop(worker)

    # Choices

    def chosen(
        self,
        worker: WorkerKey,
        request_id: str,
        path: Sequence[int],
        block_size: int,
        now_ms: float,
        blocks: int | None = None,
    ) -> None:
        """Note a choice: its start will be checked, and for an untrusted worker it is what it holds from now on.

        ``blocks`` is what the worker holds of the path by the index, where the caller has asked it already.
        """
        if not path:
            return
        self._pending[(worker, request_id)] = _Pending(
            path, block_size, self._index.overlap(path, worker).blocks if blocks is None else blocks
        )
        while len(self._pending) > PENDING_MAX:
            oldest, _ = self._pending.popitem(last=False)
            self.computed.drop(*oldest)
        if worker in self.untrusted:
            self.predictions.record(worker, path, now_ms)

    def prompt_computed(self, worker: WorkerKey, request_id: str) -> bool:
        """Count the prompt of a choice as held by a worker, until its stream reports; return whether that is new."""
        pending = self._pending.get((worker, request_id))
        return pending is not None and self.computed.add(worker, request_id, pending.path)

    def predicted(self, worker: WorkerKey, path: Sequence[int], now_ms: float) -> TierOverlap:
        """Return the overlap of an untrusted worker by the router's own choices."""
        self.predictions.expire(now_ms)
        return self.predictions.index.overlap(path, worker)

    # For a state that is resumed elsewhere

    def open_choices(self) -> list[OpenChoice]:
        places = {key: place for place, key in enumerate(self.computed, 1)}
        return [
            (key[0], key[1], pending.path, pending.block_size, pending.blocks, places.get(key, 0))
            for key, pending in self._pending.items()
        ]

    def windows(self) -> list[Window]:
        return [(worker, check.window(), check.is_suspect) for worker, check in self._checks.items()]

    def restore(
        self, open_choices: Iterable[OpenChoice], windows: Iterable[Window], untrusted: Mapping[WorkerKey, str]
    ) -> None:
        """Resume from another state; the health of streams is known already, ``predictions`` are restored alone.

        The order and the words of ``untrusted`` are those of when it was judged, so they are not to be had again.
        """
        self._pending.clear()
        self.computed.clear()
        computed: list[tuple[int, WorkerKey, str]] = []
        for worker, request_id, path, block_size, blocks, place in open_choices:
            self._pending[(worker, request_id)] = _Pending(path, block_size, blocks)
            if place:
                computed.append((place, worker, request_id))
        for _, worker, request_id in sorted(computed):
            self.prompt_computed(worker, request_id)
        self._checks = {worker: OverlapCheck(window, is_suspect) for worker, window, is_suspect in windows}
        self.untrusted = dict(untrusted)

    # Views

    def stream(self, worker: WorkerKey) -> tuple[StreamState, str]:
        return self._states.get(worker, (StreamState.SYNCING, ""))

    @property
    def checks(self) -> Mapping[WorkerKey, OverlapCheck]:
        return self._checks


WINDOW: Final = 64
"""Requests that count: a few seconds of a busy worker, so that the verdict follows a stream that breaks or heals."""

LEAST_REQUESTS: Final = 16
"""Fewer could be chance: a burst of equal prompts, an eviction in progress."""

SUSPECT_ABOVE: Final = 0.5
"""More wrong than right. Evictions between choice and start, the usual disagreement, stay far below."""

TRUSTED_BELOW: Final = 0.25


class OverlapCheck:
    """A live cross-check of one worker's event stream: blocks in the index against tokens really reused.

    Rules
        1. When the worker starts a request, the prompt tokens that it reports as reused are compared with what the
           index found of the prompt between the choice and the start, the nearest of both. A block more or less is no
           disagreement, because engines recompute the last tokens.
        2. The last ``WINDOW`` requests for which either number is above zero count, weighed by tokens.
        3. From ``LEAST_REQUESTS`` of them on, a share of disagreeing tokens above ``SUSPECT_ABOVE`` makes the stream
           suspect; it stays so until the share falls below ``TRUSTED_BELOW``.

    This is how a stream that never fills is found: the engine reuses blocks that the index never had.
    """

    __slots__ = ("_window", "disagreeing_tokens", "is_suspect", "predicted_tokens", "realised_tokens", "weight_tokens")

    def __init__(self, window: Iterable[tuple[int, int, int]] = (), is_suspect: bool = False) -> None:
        self._window: deque[tuple[int, int, int]] = deque()
        self.predicted_tokens = 0
        """Sum over the window."""
        self.realised_tokens = 0
        self.disagreeing_tokens = 0
        self.weight_tokens = 0
        self.is_suspect = is_suspect
        for predicted, realised, disagreeing in window:
            self._enter(predicted, realised, disagreeing)

    def window(self) -> list[tuple[int, int, int]]:
        """Return what counts: predicted, realised and disagreeing tokens of each request, oldest first."""
        return list(self._window)

    def __len__(self) -> int:
        return len(self._window)

    @property
    def disagreement(self) -> float:
        """Return the share of tokens that the index and the worker disagree about, 0 to 1."""
        return self.disagreeing_tokens / self.weight_tokens if self.weight_tokens else 0.0

    def add(self, predicted_tokens: int, realised_tokens: int, block_size: int) -> bool:
        """Count a request; return whether the verdict changed."""
        if predicted_tokens == 0 and realised_tokens == 0:
            return False
        difference = abs(predicted_tokens - realised_tokens)
        self._enter(predicted_tokens, realised_tokens, 0 if difference <= block_size else difference)
        if len(self._window) < LEAST_REQUESTS:
            return False
        before = self.is_suspect
        disagreement = self.disagreement
        if disagreement > SUSPECT_ABOVE:
            self.is_suspect = True
        elif disagreement < TRUSTED_BELOW:
            self.is_suspect = False
        return self.is_suspect is not before

    def _enter(self, predicted: int, realised: int, disagreeing: int) -> None:
        window = self._window
        window.append((predicted, realised, disagreeing))
        self.predicted_tokens += predicted
        self.realised_tokens += realised
        self.disagreeing_tokens += disagreeing
        self.weight_tokens += predicted if predicted > realised else realised
        if len(window) > WINDOW:
            predicted, realised, disagreeing = window.popleft()
            self.predicted_tokens -= predicted
            self.realised_tokens -= realised
            self.disagreeing_tokens -= disagreeing
            self.weight_tokens -= predicted if predicted > realised else realised

    def says(self) -> str:
        return (
            f"over {len(self._window)} requests the index predicted {self.predicted_tokens} cached tokens and the "
            f"worker reused {self.realised_tokens}; they disagree about {self.disagreement:.0%}"
        )


PROMPTS_MAX: Final = 1024
"""Streams are milliseconds behind, in which a busy router sees some ten first tokens. More only come together while a
stream is away; the last second is then all that is known."""

SAME_BEGINNING_MAX: Final = 32
"""Prompts of one system prompt that are compared, a third of a microsecond each."""

TOKENS_MIN: Final = 512
"""A shorter prompt is not worth it: it is recomputed in a few milliseconds, and requests of that size are many."""

_Key = tuple[WorkerKey, str]


class ComputedPrompts:
    """Prompts that workers have computed and not yet reported: a first token reaches a router before the events.

    An answer of a few tokens is over before the consolidator's stream reports what it left in the worker's cache. A
    client that asks again at once, with the answer or with another question about the same text, would be sent to a
    worker that has nothing.

    Rules
        1. A prompt is here from its first token until its worker's stream reports the request, or the worker's cache
           is emptied, or the worker leaves. Then the index alone shows what the worker holds.
        2. A path's sequence hashes name all that is before them, so two paths that agree at a place agree up to there:
           how far they do is found by halving.
        3. At most ``PROMPTS_MAX``, the newest; of those that begin with the same block the newest
           ``SAME_BEGINNING_MAX`` are looked at.
    """

    def __init__(self) -> None:
        self._first_block: dict[_Key, int] = {}
        self._of_first: dict[int, dict[_Key, Sequence[int]]] = {}

    def add(self, worker: WorkerKey, request_id: str, path: Sequence[int]) -> bool:
        """Take note of a prompt whose first token was seen; ``False`` where it is known. A path is never empty."""
        key = (worker, request_id)
        if key in self._first_block:
            return False
        first = path[0]
        self._first_block[key] = first
        self._of_first.setdefault(first, {})[key] = path
        if len(self._first_block) > PROMPTS_MAX:
            self.drop(*next(iter(self._first_block)))
        return True

    def drop(self, worker: WorkerKey, request_id: str) -> None:
        key = (worker, request_id)
        first = self._first_block.pop(key, None)
        if first is not None:
            same = self._of_first[first]
            del same[key]
            if not same:
                del self._of_first[first]

    def drop_all_of(self, worker: WorkerKey) -> None:
        for key in [key for key in self._first_block if key[0] == worker]:
            self.drop(*key)

    def clear(self) -> None:
        self._first_block.clear()
        self._of_first.clear()

    def overlaps(self, path: Sequence[int]) -> list[tuple[WorkerKey, int]]:
        """Return how many leading blocks of a path such prompts have, with their workers, of which some come twice."""
        same = self._of_first.get(path[0]) if path else None
        if same is None:
            return []
        newest = islice(reversed(same.items()), SAME_BEGINNING_MAX)
        return [(key[0], _shared_blocks(path, other)) for key, other in newest]

    def continued(self, path: Sequence[int]) -> list[tuple[WorkerKey, int]]:
        same = self._of_first.get(path[0]) if path else None
        newest = islice(reversed((same or {}).items()), SAME_BEGINNING_MAX)
        return [(key[0], n) for key, other in newest if (n := len(other)) <= len(path) and path[n - 1] == other[-1]]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._first_block)

    def __len__(self) -> int:
        return len(self._first_block)


def _shared_blocks(path: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading blocks two paths share that begin with the same one."""
    low, high = 1, min(len(path), len(other))
    if path[high - 1] == other[high - 1]:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) >> 1
        if path[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
