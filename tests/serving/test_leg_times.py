"""The legs of requests as their router times them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.legs import Dispatch, WorkerReported
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, TokenDelta
from poolgrid.server.serving.metrics import LegTimer, LegTimes

TOKEN = b"\x01\x00\x00\x00"


class Timed:
    """One request, timed by a router whose clock is moved by hand."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.times = LegTimes("legs_seconds", self.registry)
        self.timer = LegTimer(0.0)

    def sent(self, number: int, now_ms: float) -> None:
        self.times.sent(self.timer, number, now_ms / 1000)

    def heard(
        self, number: int, stage: Stage, now_ms: float, finish: FinishReason | None = None, tokens: bytes = TOKEN
    ) -> None:
        dispatch = Dispatch("r", number, WorkerKey(WorkerId("w"), 0), "tcp://w", stage)
        self.times.reported(
            self.timer, WorkerReported(dispatch, TokenDelta("r", 0, tokens, finish), False), now_ms / 1000
        )

    def seen(self) -> dict[str, float]:
        """Milliseconds by leg, of those that were counted."""
        sums = {}
        for family in self.registry.collect():
            for sample in family.samples:
                leg = sample.labels["leg"]
                if sample.name.endswith("_count") and sample.value:
                    total = self.registry.get_sample_value("legs_seconds_sum", {"leg": leg})
                    assert total is not None
                    sums[leg] = round(total * 1000, 6)
        return sums


def test_a_request_on_one_worker_waits_is_prefilled_and_decoded() -> None:
    timed = Timed()
    timed.sent(0, 5)
    timed.heard(0, Stage.WHOLE, 105)
    timed.heard(0, Stage.WHOLE, 150)  # more than tokens, in the middle of the answer
    timed.heard(0, Stage.WHOLE, 400, FinishReason.LENGTH)

    assert timed.seen() == {"queue": 5, "prefill": 100, "decode": 295}


def test_a_request_on_three_workers_has_a_time_for_each_leg() -> None:
    timed = Timed()
    timed.sent(0, 1)
    timed.heard(0, Stage.ENCODE, 2, tokens=b"")  # it says that it has begun
    timed.heard(0, Stage.ENCODE, 11, FinishReason.ENCODED, b"")
    timed.sent(1, 12)
    timed.heard(1, Stage.PREFILL, 112, FinishReason.PREFILLED)
    timed.sent(2, 115)
    timed.heard(2, Stage.DECODE, 135)
    timed.heard(2, Stage.DECODE, 635, FinishReason.STOP)

    assert timed.seen() == {"queue": 1 + 1 + 3, "encode": 10, "prefill": 100, "transfer": 20, "decode": 500}


def test_what_a_lost_worker_did_is_no_leg_and_the_way_to_the_next_is_waiting() -> None:
    timed = Timed()
    timed.sent(0, 0)
    timed.heard(0, Stage.WHOLE, 30)
    timed.times.withdrawn(timed.timer, 1.0)
    timed.heard(0, Stage.WHOLE, 1001, FinishReason.LENGTH)  # of a dispatch that is given up
    timed.sent(1, 1250)
    timed.heard(1, Stage.WHOLE, 1300)

    assert timed.seen() == {"queue": 250, "prefill": 30 + 50}


def test_an_error_of_a_worker_is_the_time_of_no_leg() -> None:
    timed = Timed()
    timed.sent(0, 0)
    timed.heard(0, Stage.WHOLE, 30, FinishReason.ERROR, b"")

    assert timed.seen() == {"queue": 0}
