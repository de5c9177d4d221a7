"""How long prompts and transfers of KV take in a disaggregated pool, learned from first tokens.

Rules
    1. An engine computes prompts in order. A prompt's time is from the first token before it on that worker, or from
       its own choice if that was later, until its first token. A worker's rate is the ratio of two sums, milliseconds
       and tokens, in which old observations count less (``KEPT``) and so do all when time passes (``MEMORY_MS``).
    2. What is missing in a worker's sums is filled up with the pool's rate, so a worker without requests for
       long is tried again.
    3. A transfer takes from the choice of the decode worker until its first token: a straight line over the tokens
       that move, through what was observed and ``TRANSFER_PRIOR``. Where one is late beyond doubt, the next takes as
       much longer. After ``FORGOTTEN_MS`` without any the prior holds again: else a pool whose transfers were slow for
       a while would never have another.
    4. It is a fold like the projection that it belongs to: choices, events and their times decide, nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.observers import IsOpen, Observer
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey

KEPT: Final = 0.95
"""What an observation counts after the next one; after 14 it counts half."""

MEMORY_MS: Final = 60_000.0
"""Time after which what was observed of a worker counts half."""

PRIOR_TOKENS: Final = 8192.0
"""How many tokens the pool's rate counts for at a worker of which nothing is known: one full engine step."""

PRIOR_MS_PER_TOKEN: Final = 0.027
"""Measured: 8,900 tokens of Qwen3-8B in 240 ms on an H200. What the first prompts of a pool are judged by."""

TRANSFER_PRIOR: Final = ((0.0, 20.0), (8900.0, 162.0))
"""Tokens and milliseconds. The second was measured (vLLM 0.25 over NIXL, blocks of 16); 20 ms are two steps of a
decode batch and two messages."""

PRIOR_WEIGHT: Final = 0.2
"""What each point of the prior counts: 20 observations outweigh both by 50 to 1. Without it transfers of one length
would make no line."""

LATE_MS: Final = 250.0
"""How much later than expected a first token may come before its worker counts as late: a full step may have begun."""

FORGOTTEN_MS: Final = 300_000.0
"""After this time without a transfer those before it count no more. Then some requests try it: those that come until
the first is late."""

AWAITED_PER_WORKER_MAX: Final = 1024
"""More than an engine runs. Beyond, the oldest is no longer awaited."""


class AwaitedToken(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A choice whose first token is awaited."""

    chosen_ms: float
    tokens: int
    """To be computed, or to be moved."""


class PromptTimes(msgspec.Struct, array_like=True):
    """What is known of one worker, or of the pool."""

    ms: float
    tokens: float
    seen_ms: float = 0.0
    served_ms: float = 0.0
    """When its last prompt had its first token."""
    prompts: dict[str, AwaitedToken] = {}
    """By dispatch, in order of choice."""
    transfers: dict[str, AwaitedToken] = {}

    def add(self, ms: float, tokens: int, prior: float, now_ms: float) -> None:
        kept = _remembered(now_ms - self.seen_ms)
        filled = PRIOR_TOKENS * (1.0 - kept)
        self.ms = (self.ms * kept + filled * prior) * KEPT + ms
        self.tokens = (self.tokens * kept + filled) * KEPT + tokens
        self.seen_ms = now_ms

    def rate(self, prior: float, now_ms: float) -> float:
        """Return milliseconds per token."""
        kept = _remembered(now_ms - self.seen_ms)
        filled = PRIOR_TOKENS * (1.0 - kept)
        return (self.ms * kept + filled * prior) / (self.tokens * kept + filled)


class TransferLine(msgspec.Struct, array_like=True):
    """Least squares over tokens and milliseconds of transfers, old ones counting less."""

    count: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    tokens_squared: float = 0.0
    tokens_ms: float = 0.0
    seen_ms: float = 0.0
    """When the last one came to its end."""

    def add(self, tokens: float, ms: float, kept: float = KEPT, weight: float = 1.0) -> None:
        self.count = self.count * kept + weight
        self.tokens = self.tokens * kept + weight * tokens
        self.ms = self.ms * kept + weight * ms
        self.tokens_squared = self.tokens_squared * kept + weight * tokens * tokens
        self.tokens_ms = self.tokens_ms * kept + weight * tokens * ms

    def at(self, tokens: float, now_ms: float) -> float:
        """Return the milliseconds of a transfer of so many tokens: never falling, never below 0."""
        line = TransferLine() if now_ms - self.seen_ms > FORGOTTEN_MS else msgspec.structs.replace(self)
        for prior_tokens, prior_ms in TRANSFER_PRIOR:
            line.add(prior_tokens, prior_ms, 1.0, PRIOR_WEIGHT)
        spread = line.tokens_squared - line.tokens * line.tokens / line.count
        slope = max(0.0, (line.tokens_ms - line.tokens * line.ms / line.count) / spread)
        return max(0.0, (line.ms - slope * line.tokens) / line.count + slope * tokens)


class TimesOfWorker(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One worker's times in a checkpoint; the pool's has an empty name."""

    worker_id: str
    dp_rank: int
    times: PromptTimes


class LegTimesState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a router had learned of legs, for a checkpoint."""

    transfer: TransferLine
    workers: list[TimesOfWorker]


def _remembered(age_ms: float) -> float:
    """Return how much of what was seen counts after a time; a quotient, because powers differ between machines."""
    return MEMORY_MS / (MEMORY_MS + max(0.0, age_ms))


class LearnedLegTimes(Observer):
    """Times of a pool that has had a prefill worker."""

    name = "legs"

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, PromptTimes] = {}
        self._pool = PromptTimes(PRIOR_TOKENS * PRIOR_MS_PER_TOKEN, PRIOR_TOKENS)
        self._transfer = TransferLine()

    # -- what is expected ------------------------------------------------------------------------------------------

    def prompt_ms(self, worker: WorkerKey, queued_tokens: float, tokens: float, now_ms: float) -> tuple[float, float]:
        """Return how long a prompt would wait for those before it on a worker, and how long it takes by itself."""
        known = self._workers.get(worker)
        prior = self._pool.rate(PRIOR_MS_PER_TOKEN, now_ms)
        if known is None:
            return queued_tokens * prior, tokens * prior
        rate = known.rate(prior, now_ms)
        queue_ms = queued_tokens * rate
        for oldest in known.prompts.values():
            # It is at work on the oldest; one that is late beyond doubt may well take as long again.
            at_work_ms = now_ms - max(oldest.chosen_ms, known.served_ms)
            own_ms = oldest.tokens * rate
            queue_ms += at_work_ms if at_work_ms > own_ms + LATE_MS else -min(own_ms, at_work_ms)
            break
        return max(0.0, queue_ms), tokens * rate

    def transfer_ms(self, tokens: float, now_ms: float) -> float:
        """Return how long the KV of so many tokens takes to the first token of a decode worker."""
        late_ms = 0.0
        for known in self._workers.values():
            for oldest in known.transfers.values():
                waited_ms = now_ms - oldest.chosen_ms
                if waited_ms > self._transfer.at(oldest.tokens, now_ms) + LATE_MS:
                    late_ms = max(late_ms, waited_ms)
                break
        return late_ms + self._transfer.at(tokens, now_ms)

    # -- choices and facts -----------------------------------------------------------------------------------------

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        request = decision.request
        if request.stage is Stage.ENCODE:
            return
        known = self._workers.get(decision.worker)
        if known is None:
            rate = self._pool.rate(PRIOR_MS_PER_TOKEN, now_ms)
            known = self._workers[decision.worker] = PromptTimes(PRIOR_TOKENS * rate, PRIOR_TOKENS, now_ms, now_ms)
        awaited = known.transfers if request.stage is Stage.DECODE else known.prompts
        if len(awaited) >= AWAITED_PER_WORKER_MAX:
            del awaited[next(iter(awaited))]
        awaited[dispatch_id] = AwaitedToken(now_ms, max(1, request.isl - decision.overlap_blocks * request.block_size))

    def on_first_token(self, worker: WorkerKey, request_id: str, now_ms: float) -> None:
        known = self._workers.get(worker)
        if known is None:
            return
        moved = known.transfers.pop(request_id, None)
        if moved is not None:
            self._transfer.add(moved.tokens, max(0.0, now_ms - moved.chosen_ms))
            self._transfer.seen_ms = now_ms
            return
        computed = known.prompts.pop(request_id, None)
        if computed is not None:
            ms = max(0.0, now_ms - max(computed.chosen_ms, known.served_ms))
            prior = self._pool.rate(PRIOR_MS_PER_TOKEN, now_ms)
            known.add(ms, computed.tokens, prior, now_ms)
            self._pool.add(ms, computed.tokens, PRIOR_MS_PER_TOKEN, now_ms)
        known.served_ms = now_ms

    def on_untimed_token(self, worker: WorkerKey, request_id: str) -> None:
        self._forget(worker, request_id)

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        """Await a request no longer that ended without a first token.

        Not when the router releases it: a prefill leg is often released before the event of its first token is here.
        """
        self._forget(worker, request_id)

    def _forget(self, worker: WorkerKey, request_id: str) -> None:
        known = self._workers.get(worker)
        if known is not None:
            known.prompts.pop(request_id, None)
            known.transfers.pop(request_id, None)

    def on_expired(self, is_open: IsOpen) -> None:
        for worker, known in self._workers.items():
            for awaited in (known.prompts, known.transfers):
                for dispatch_id in [each for each in awaited if not is_open(worker, each)]:
                    del awaited[dispatch_id]

    def on_left(self, worker: WorkerKey) -> None:
        self._workers.pop(worker, None)

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        """Keep the rates of workers that are there; of first tokens a snapshot reports nothing."""
        for worker in [each for each in self._workers if each not in workers]:
            del self._workers[worker]
        for known in self._workers.values():
            known.prompts.clear()
            known.transfers.clear()

    # -- for a state that continues elsewhere -----------------------------------------------------------------------

    def checkpoint(self) -> LegTimesState:
        return LegTimesState(
            msgspec.structs.replace(self._transfer),
            [
                TimesOfWorker(
                    worker.worker_id,
                    worker.dp_rank,
                    msgspec.structs.replace(known, prompts=dict(known.prompts), transfers=dict(known.transfers)),
                )
                for worker, known in [(_POOL, self._pool), *self._workers.items()]
            ],
        )

    def restore(self, state: Any) -> None:
        known = msgspec.convert(state, LegTimesState)
        workers = {WorkerKey(WorkerId(each.worker_id), each.dp_rank): each.times for each in known.workers}
        self._pool = workers.pop(_POOL, self._pool)
        self._workers = workers
        self._transfer = known.transfer


_POOL: Final = WorkerKey(WorkerId(""), 0)
"""Whose times are the pool's; no worker has an empty name."""
