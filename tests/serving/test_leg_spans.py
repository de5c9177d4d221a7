"""The spans of a request's legs: each worker's part, what went wrong with it, and what took its place."""

from __future__ import annotations

import itertools

from poolgrid.kernel.requests.legs import Dispatch, LegEvent
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.trace_record import SpanKind, TraceRecord
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.serving.request_tracker import begin_leg, follow_legs
from tests.serving.test_request_machine import delta, machine


class Traced:
    """A request whose trace is kept, on a clock that goes on by one with each look."""

    def __init__(self) -> None:
        self.now = itertools.count(1)
        ids = itertools.count(100)
        self.trace = TraceRecord(
            "chat", SpanKind.SERVER, 7, 1, None, "vendor=1", 0.0, lambda: next(ids), lambda: float(next(self.now))
        )
        self.machine: RequestMachine = machine()
        self.sent: list[TraceContext | None] = []

    def place(self, stage: Stage, worker: str, expected: int | None = None) -> Dispatch:
        key = WorkerKey(WorkerId(worker))
        context = begin_leg(self.trace, self.machine, key, stage)
        made = self.machine.begin(key, f"tcp://{worker}", stage, 0, expected, context)
        self.sent.append(made.trace)
        assert self.machine.plan.current is not None
        return self.machine.plan.current

    def hear(self, heard: TokenDelta) -> None:
        follow_legs(self.trace, self.machine, self.machine.on_delta(heard))

    def lose(self, dispatch: Dispatch) -> None:
        follow_legs(self.trace, self.machine, self.machine.on_lost(dispatch.id, LegEvent.LOST, "connection lost"))

    def legs(self) -> list[tuple[str, object, bool, str]]:
        """Name, worker, whether it has ended, error."""
        return [
            (span.name, span.attributes["poolgrid.worker"], span.ended_ms is not None, span.error)
            for span in self.trace.spans[1:]
        ]


def test_each_leg_is_a_span_and_its_worker_is_told_of_it() -> None:
    made = Traced()
    prefill = made.place(Stage.PREFILL, "p")
    made.hear(delta(prefill, 100, cached_tokens=4, finish_reason=FinishReason.PREFILLED, disaggregated_params=b"kv"))
    decode = made.place(Stage.DECODE, "d")
    made.hear(delta(decode, 100))
    assert made.legs() == [("leg prefill", "p", True, ""), ("leg decode", "d", False, "")]
    made.hear(delta(decode, 101, finish_reason=FinishReason.STOP))

    assert made.legs() == [("leg prefill", "p", True, ""), ("leg decode", "d", True, "")]
    spans = made.trace.spans[1:]
    assert made.sent == [TraceContext(span.place.traceparent, "vendor=1") for span in spans]
    assert [span.kind for span in spans] == [SpanKind.CLIENT] * 2
    assert [[event.name for event in span.events] for span in spans] == [["first output"]] * 2
    assert spans[0].attributes["poolgrid.cached_tokens"] == 4
    assert [span.attributes["poolgrid.finish_reason"] for span in spans] == ["prefilled", "stop"]
    assert not made.trace.open
    assert not made.trace.root.events


def test_a_lost_worker_is_an_error_of_its_leg_and_the_leg_that_goes_on_is_linked_to_it() -> None:
    made = Traced()
    prefill = made.place(Stage.PREFILL, "p")
    made.hear(delta(prefill, 100, finish_reason=FinishReason.PREFILLED, disaggregated_params=b"kv"))
    decode = made.place(Stage.DECODE, "d")
    made.hear(delta(decode, 100, 101))
    made.lose(decode)
    again = made.place(Stage.PREFILL, "p2")

    assert made.legs() == [
        ("leg prefill", "p", True, ""),
        ("leg decode", "d", True, "worker lost"),
        ("leg prefill", "p2", False, ""),
    ]
    lost, after = made.trace.spans[2:]
    assert after.links == [lost.place]
    assert after.attributes["poolgrid.output_tokens_before"] == 2
    [moved] = made.trace.root.events
    assert (moved.name, moved.attributes) == (
        "moved",
        {"poolgrid.worker": "d", "poolgrid.cause": "worker lost", "poolgrid.output_tokens_before": 2},
    )
    made.hear(delta(again, 102, finish_reason=FinishReason.PREFILLED, disaggregated_params=b"kv"))
    made.place(Stage.DECODE, "d2")
    assert not made.trace.spans[-1].links, "it replaces nothing"


def test_a_refusal_is_an_error_too_and_so_is_a_worker_with_more_to_do_than_was_known() -> None:
    made = Traced()
    first = made.place(Stage.WHOLE, "w1")
    made.hear(delta(first, finish_reason=FinishReason.ERROR, refusal=RefusalKind.BUSY, error="full"))
    second = made.place(Stage.WHOLE, "w2", expected=10)
    crowded = delta(second, finish_reason=FinishReason.ERROR, refusal=RefusalKind.CROWDED, booked_prefill_tokens=900)
    made.hear(crowded)
    made.place(Stage.WHOLE, "w3")

    assert made.legs() == [
        ("leg whole", "w1", True, "refused"),
        ("leg whole", "w2", True, "crowded"),
        ("leg whole", "w3", False, ""),
    ]
    assert [list(span.links) for span in made.trace.spans[2:]] == [[made.trace.spans[1].place], []]


def test_what_a_client_leaves_behind_ends_without_an_error() -> None:
    made = Traced()
    prefill = made.place(Stage.PREFILL, "p")
    made.hear(delta(prefill, 100, finish_reason=FinishReason.PREFILLED, disaggregated_params=b"kv"))
    made.place(Stage.DECODE, "d")
    follow_legs(made.trace, made.machine, made.machine.end(LegEvent.CLIENT_LEFT))
    assert made.legs() == [("leg prefill", "p", True, ""), ("leg decode", "d", True, "")]
