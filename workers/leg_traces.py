"""What became of legs here whose traces are kept: a record for each, from its acceptance to its last delta.

The engine is told of the leg's own span, so that what it traces itself stands below it.
"""

from __future__ import annotations

import msgspec

from poolgrid.process.tracing.record import SpanRecord, TraceRecord
from poolgrid.process.tracing.tracing import Tracing
from poolgrid.wire.identifiers import STAGE_WORD, Stage
from poolgrid.wire.requests import FinishReason, Generate
from poolgrid.workers.engines.protocol import EngineReport

WORK = "work"
"""Under this name a record has the span of what the engine is at."""


class LegTraces:
    """The records of one worker."""

    def __init__(self, tracing: Tracing, worker_id: str, role: str) -> None:
        self.records: dict[str, TraceRecord] = {}
        """By request id; of most workers, at most times, none."""
        self._tracing = tracing
        self._who = {"poolgrid.worker": worker_id, "poolgrid.role": role}

    def begin(self, request: Generate) -> tuple[Generate, bool]:
        """Begin the record of an accepted leg, if it is kept; return the leg as the engine is told of it, and whether
        there is a record."""
        word = STAGE_WORD[request.stage]
        record = self._tracing.begin_work(f"worker {word}", request.trace)
        if record is None:
            return request, False
        routing = request.routing
        record.root.attributes |= {
            **self._who,
            "poolgrid.stage": word,
            "poolgrid.dispatch_id": request.request_id,
            "poolgrid.dp_rank": routing.dp_rank,
            "poolgrid.overlap_tokens": routing.overlap_tokens,
            "gen_ai.usage.input_tokens": len(request.token_ids) // 4,
        }
        self.records[request.request_id] = record
        record.open[WORK] = record.begin("prefill" if request.stage is not Stage.DECODE else "decode")
        return msgspec.structs.replace(request, trace=record.context(record.root)), True

    def fetching(self, request_id: str) -> None:
        """Take note that a leg's KV or embeddings are fetched before the engine gets it."""
        record = self.records.get(request_id)
        if record is not None:
            work = record.open.pop(WORK)
            work.name = "transfer"
            record.open[WORK] = work

    def follow(self, report: EngineReport) -> None:
        """Take note of what an engine step made visible; only asked while there are records."""
        for arrival in report.arrivals:
            record = self.records.get(arrival.request_id)
            if record is not None:
                transfer = self._next(record, "decode")
                transfer.attributes |= {
                    "poolgrid.kv.moved_bytes": arrival.moved_bytes,
                    "poolgrid.kv.present_blocks": arrival.present_blocks,
                }
        for delta in report.deltas:
            record = self.records.get(delta.request_id)
            if record is None:
                continue
            root = record.root
            if delta.cached_tokens is not None:
                root.attributes["gen_ai.usage.cache_read.input_tokens"] = delta.cached_tokens
            if delta.token_ids:
                tokens = root.attributes.get("gen_ai.usage.output_tokens")
                if tokens is None:
                    root.event("first output", record.now_ms())
                    if record.open[WORK].name != "decode" and delta.finish_reason is None:
                        self._next(record, "decode")
                before = tokens if isinstance(tokens, int) else 0
                root.attributes["gen_ai.usage.output_tokens"] = before + len(delta.token_ids) // 4
            if delta.finish_reason is not None:
                root.attributes["poolgrid.finish_reason"] = delta.finish_reason.value
                error = delta.refusal.value if delta.refusal is not None else "error"
                self.end(delta.request_id, error if delta.finish_reason is FinishReason.ERROR else "")

    def end(self, request_id: str, error: str = "") -> None:
        record = self.records.pop(request_id, None)
        if record is not None:
            self._tracing.end(record, error)

    def _next(self, record: TraceRecord, name: str) -> SpanRecord:
        """End what the engine was at, and begin what it is at now."""
        work = record.open[WORK]
        work.end(record.now_ms())
        record.open[WORK] = record.begin(name)
        return work
