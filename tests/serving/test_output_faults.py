"""A fault of the router's own over one request's output moves that request; the rest of the message is handled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.process.clock import SystemClock
from poolgrid.router.metrics import RouterMetrics
from poolgrid.serving.links import LinkTable, WorkerLink
from poolgrid.serving.request_tracker import RequestTracker
from poolgrid.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.wire.requests import FinishReason, TokenDelta


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
