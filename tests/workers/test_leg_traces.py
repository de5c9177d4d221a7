"""What a worker records of legs whose traces are kept: what the engine was at, and how the leg ended."""

from __future__ import annotations

import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, TokenDelta
from poolgrid.kernel.wire.requests import Sampling as Wanted
from poolgrid.kernel.wire.trace_context import TraceContext, TracePlace, read_traceparent
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.kv_fetches import KvArrival
from poolgrid.server.process.tracing.settings import TraceSampling
from poolgrid.server.process.tracing.tracing import Tracing
from poolgrid.server.workers.service import LegTraces
from tests.process.test_tracing import Sink

CALLER = TracePlace(7, 9, 1)


class Clock:
    now_ms = 0.0

    def monotonic_ms(self) -> float:
        self.now_ms += 1
        return self.now_ms

    def wall_ms(self) -> int:
        return 0


class Worker:
    """The records of one worker, and what it has handed over."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.legs = LegTraces(Tracing(TraceSampling(0.0), self.sink, Clock(), seed=1), "w1", "aggregated")

    def begin(self, stage: Stage = Stage.WHOLE, flags: int = 1) -> Generate:
        context = TraceContext(CALLER._replace(flags=flags).traceparent, "vendor=1")
        asked = Generate("r~1", pack_tokens(range(8)), Wanted(5), stage=stage, trace=context)
        told, is_kept = self.legs.begin(asked)
        assert is_kept == bool(flags)
        return told

    def step(self, *tokens: int, arrival: KvArrival | None = None, **more: object) -> None:
        delta = TokenDelta("r~1", 0, pack_tokens(tokens), **more)  # type: ignore[arg-type]
        deltas = [delta] if tokens or more else []
        self.legs.follow(EngineReport(deltas, {}, arrivals=[] if arrival is None else [arrival]))

    def told(self) -> tuple[list[str], dict[str, object], str]:
        """Names of the spans, attributes and error of the whole, of the only record that is over."""
        [(record, _)] = self.sink.taken
        assert not self.legs.records
        assert all(span.ended_ms is not None for span in record.spans)
        return [span.name for span in record.spans], dict(record.root.attributes), record.root.error


def test_a_leg_is_told_from_its_acceptance_to_its_last_token_and_the_engine_stands_below_it() -> None:
    worker = Worker()
    told = worker.begin()
    worker.step(1, cached_tokens=4)
    worker.step(2, 3)
    worker.step(4, finish_reason=FinishReason.STOP)

    names, attributes, error = worker.told()
    assert (names, error) == (["worker whole", "prefill", "decode"], "")
    assert attributes["gen_ai.usage.input_tokens"] == 8
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert (attributes["poolgrid.worker"], attributes["poolgrid.finish_reason"]) == ("w1", "stop")
    [(record, _)] = worker.sink.taken
    assert record.root.parent == CALLER
    assert told.trace is not None
    assert (read_traceparent(told.trace.traceparent), told.trace.tracestate) == (record.root.place, "vendor=1")


def test_kv_that_is_fetched_is_a_transfer_before_decoding() -> None:
    worker = Worker()
    worker.begin(Stage.DECODE)
    worker.legs.fetching("r~1")
    worker.step(arrival=KvArrival("r~1", 5, 2, 1024, 3.0))
    worker.step(1)
    worker.step(2, finish_reason=FinishReason.LENGTH)

    names, _, error = worker.told()
    assert (names, error) == (["worker decode", "transfer", "decode"], "")
    transfer = worker.sink.taken[0][0].spans[1]
    assert transfer.attributes == {"poolgrid.kv.moved_bytes": 1024, "poolgrid.kv.present_blocks": 2}


def test_a_prefill_leg_ends_when_its_result_is_kept() -> None:
    worker = Worker()
    worker.begin(Stage.PREFILL)
    worker.step(1, finish_reason=FinishReason.PREFILLED)
    names, attributes, error = worker.told()
    assert (names, attributes["poolgrid.finish_reason"], error) == (["worker prefill", "prefill"], "prefilled", "")


@pytest.mark.parametrize(("refusal", "error"), [(RefusalKind.BUSY, "busy"), (None, "error")])
def test_an_error_is_the_leg_s_error(refusal: RefusalKind | None, error: str) -> None:
    worker = Worker()
    worker.begin()
    worker.step(finish_reason=FinishReason.ERROR, refusal=refusal, error="no")
    assert worker.told()[2] == error


def test_what_is_forgotten_without_a_last_word_was_cancelled_and_later_words_change_nothing() -> None:
    worker = Worker()
    worker.begin()
    worker.legs.end("r~1", "cancelled")
    worker.step(1, finish_reason=FinishReason.STOP)
    worker.legs.end("r~1", "cancelled")
    assert worker.told()[2] == "cancelled"


def test_a_leg_whose_trace_is_not_kept_goes_to_the_engine_as_it_came_and_leaves_nothing() -> None:
    worker = Worker()
    told = worker.begin(flags=0)
    assert told.trace == TraceContext(CALLER._replace(flags=0).traceparent, "vendor=1")
    worker.legs.fetching("r~1")
    worker.step(1, finish_reason=FinishReason.STOP)
    assert not worker.sink.taken
    assert not worker.legs.records
