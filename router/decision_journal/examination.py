"""Promised and reported reuse of a recorded journal: the checks of a running router, over a replay."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.router.core.decision import Decision, DecisionLog
from poolgrid.router.core.examiner import Examiner, uncached_of
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.core.selector import PROMPT_STAGES
from poolgrid.router.decision_journal.entries import OverlapRealised
from poolgrid.serving.prompt_paths import ReuseSketch

DECISIONS_KEPT = 10_000
"""As a router keeps them: a request that reports later is of no account."""


class RecordedExamination:
    """The evidence of one router's recorded decisions; a ``ReplayWatcher``."""

    def __init__(self) -> None:
        self._log = DecisionLog(DECISIONS_KEPT)
        self._sketch = ReuseSketch()
        self._paths: dict[str, Sequence[int]] = {}
        self.examiner: Examiner | None = None
        self.uncached_tokens: dict[str, int] = dict.fromkeys(("cold", "routing", "eviction", "mismatch"), 0)

    def begin(self, state: RouterState) -> None:
        self.examiner = Examiner(state.projection, self._log.of_dispatch)

    def decided(self, decision: Decision, path: Sequence[int]) -> None:
        if decision.attempt == 0 and decision.request.stage in PROMPT_STAGES:
            decision.seen_tokens = self._sketch.note(path) * decision.request.block_size
        self._log.add(decision)
        self._paths[decision.request.request_id] = path
        if len(self._paths) > DECISIONS_KEPT:
            del self._paths[next(iter(self._paths))]

    def realised(self, entry: OverlapRealised) -> None:
        for decision in self._log.of_request(entry.request_id):
            if decision.attempt != entry.attempt:
                continue
            if entry.isl is not None and self.examiner is not None:
                path = self._paths.get(entry.request_id, ())
                self.examiner.gateway_reported(decision, path, entry.cached_tokens, entry.isl)
            if entry.attempt == 0 and decision.request.stage in PROMPT_STAGES and decision.request.isl:
                split = uncached_of(decision, entry.cached_tokens)
                for name in self.uncached_tokens:
                    self.uncached_tokens[name] += getattr(split, name)
