"""How a request's tokens reach whoever waits for them: as they come, or only when there is more than tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.inference import StreamDelta
from poolgrid.kernel.requests.legs import CancelLeg
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, TokenDelta
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.serving.links import LinkTable, WorkerLink
from poolgrid.server.serving.request_tracker import CANCEL_ANSWER_MS, CANCELLED_MAX, RequestTracker
from tests.clock import HandClock


def _delivery(given_up: list[TokenDelivery] | None = None) -> TokenDelivery:
    told = [] if given_up is None else given_up
    return TokenDelivery("r", told.append)


def test_tokens_alone_wake_a_reader_of_a_stream_and_not_one_who_waits_for_the_end() -> None:
    async def run(until_end: bool) -> tuple[list[StreamDelta], int]:
        delivery = _delivery()
        reading = asyncio.ensure_future(delivery.next(until_end))
        await asyncio.sleep(0)
        delivery.append(pack_tokens([7]))
        delivery.append(pack_tokens([8]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        unread = delivery.unread_tokens
        delivery.finish(StreamDelta(pack_tokens([9]), FinishReason.LENGTH))
        deltas = await reading
        return deltas + (await delivery.next() if not until_end else []), unread

    end = StreamDelta(pack_tokens([9]), FinishReason.LENGTH)
    assert asyncio.run(run(False)) == ([StreamDelta(pack_tokens([7, 8])), end], 0)
    assert asyncio.run(run(True)) == ([StreamDelta(pack_tokens([7, 8])), end], 2)


async def test_a_request_that_is_given_up_tells_how_many_tokens_nobody_read() -> None:
    given_up: list[TokenDelivery] = []
    delivery = _delivery(given_up)
    reading = asyncio.ensure_future(delivery.next(True))
    await asyncio.sleep(0)
    for _ in range(3):
        delivery.append(pack_tokens([7]))
    reading.cancel()
    assert delivery.unread_tokens == 3
    delivery.cancel()
    delivery.cancel()
    assert given_up == [delivery]
    assert await delivery.next() == [
        StreamDelta(pack_tokens([7] * 3)),
        StreamDelta(b"", FinishReason.CANCELLED),
    ]
    assert delivery.unread_tokens == 0


class Machine:
    """A request as far as its output is concerned."""

    def __init__(self, name: str, fails: str = "") -> None:
        self.name = name
        self.fails = fails
        self.taken: list[TokenDelta] = []
        self.lost: list[str] = []
        self.request = self
        self.trace = None
        self.plan = self
        self.current = self
        self.endpoint = "tcp://w"
        self.id = name
        self.worker = WorkerKey(WorkerId("w"))
        self.stage = Stage.WHOLE

    def named(self, **_: str) -> dict[str, object]:
        return {}

    def extend(self, delta: TokenDelta) -> bool:
        if self.fails == "extend":
            raise RuntimeError("injected")
        return False

    def on_delta(self, delta: TokenDelta) -> tuple[Any, ...]:
        if self.fails == "on_delta":
            raise RuntimeError("injected")
        self.taken.append(delta)
        return ()

    def on_lost(self, dispatch_id: str, event: object, why: str) -> tuple[Any, ...]:
        self.lost.append(why)
        return ()


class Tracker(RequestTracker[Any]):
    """One without a load of its own."""

    def reported(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...

    def avoid(self, *_: object) -> None: ...

    def worker_full(self, *_: object) -> None: ...

    def ended(self, *_: object) -> None: ...


@pytest.mark.parametrize("fails", ["extend", "on_delta"])
def test_a_fault_over_one_output_moves_its_request_only(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    links = LinkTable(cast(Any, None))
    tracker = Tracker(links, RouterMetrics(registry), SystemClock(), cast(Any, SimpleNamespace(room_changed=None)))
    machines = [Machine("r1"), Machine("r2", fails), Machine("r3")]
    tracker._on_link["tcp://w"] = {each.name: cast(Any, SimpleNamespace(machine=each)) for each in machines}
    link = cast(WorkerLink, machines[0])  # which has an endpoint

    whole = tracker.on_tokens(link, iter([TokenDelta(each.name, 0, bytes(4), FinishReason.STOP) for each in machines]))

    assert whole
    assert [len(each.taken) for each in machines] == [1, 0, 1]
    assert [len(each.lost) for each in machines] == [0, 1, 0]
    assert registry.get_sample_value("poolgrid_router_stream_faults_total", {"kind": "exception"}) == 1
    assert "injected" in caplog.text


class CancelLink:
    """A link of which only cancellations are looked at."""

    endpoint = "tcp://w"
    is_up = True

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, dispatch_id: str) -> None:
        self.cancelled.append(dispatch_id)


def test_output_on_its_way_while_a_leg_is_cancelled_is_no_fault_and_output_of_any_other_leg_is() -> None:
    registry, clock, link = CollectorRegistry(), HandClock(), CancelLink()
    links = cast(Any, SimpleNamespace(attach=lambda *_: None, get=lambda endpoint: link))
    tracker = Tracker(links, RouterMetrics(registry), clock, cast(Any, SimpleNamespace(room_changed=None)))
    left = cast(Any, SimpleNamespace(machine=SimpleNamespace(request=SimpleNamespace(trace=None, carrier=None))))

    def faults_of(dispatch_id: str, finish: FinishReason | None = None) -> float:
        before = registry.get_sample_value("poolgrid_router_stream_faults_total", {"kind": "unknown_request"}) or 0.0
        tracker.on_tokens(cast(WorkerLink, link), iter([TokenDelta(dispatch_id, 0, bytes(4), finish)] * 3))
        after = registry.get_sample_value("poolgrid_router_stream_faults_total", {"kind": "unknown_request"}) or 0.0
        return after - before

    tracker.carry_out(left, (CancelLeg(cast(Any, SimpleNamespace(id="left", endpoint="tcp://w"))),))
    assert faults_of("left") == 0
    assert faults_of("left", FinishReason.PREFILLED) == 0
    assert link.cancelled == ["left"]

    assert faults_of("never") == 1, "the first one is, and the rest is on its way"
    assert link.cancelled == ["left", "never"]

    clock.now_ms += CANCEL_ANSWER_MS
    assert faults_of("left") == 1, "the cancellation had no effect"
    assert link.cancelled == ["left", "never", "left"]
    assert faults_of("other", FinishReason.CANCELLED) == 0, "an end is none"
    assert faults_of("left", FinishReason.CANCELLED) == 0
    assert list(tracker._cancelled) == ["never"], "what has ended is forgotten"

    for number in range(CANCELLED_MAX):
        tracker.carry_out(left, (CancelLeg(cast(Any, SimpleNamespace(id=f"r{number}", endpoint="tcp://w"))),))
    assert len(tracker._cancelled) == CANCELLED_MAX
    assert "never" not in tracker._cancelled
