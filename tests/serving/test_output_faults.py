"""A fault of the router's own over one request's output moves that request; the rest of the message is handled."""

from __future__ import annotations

from typing import Any, cast

import pytest

from poolgrid.serving.in_flight import InFlight
from poolgrid.serving.worker_links import Link
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

    def on_lost(self, dispatch_id: str, happened: object, why: str) -> tuple[Any, ...]:
        self.lost.append(why)
        return ()


@pytest.mark.parametrize("fails", ["extend", "on_delta"])
def test_a_fault_over_one_output_moves_its_request_only(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    faults: list[str] = []
    flight = InFlight(cast(Any, None), lambda *_: None, lambda _: None, faults.append)
    machines = [Machine("r1"), Machine("r2", fails), Machine("r3")]
    flight._on_link["tcp://w"] = {each.name: cast(Any, each) for each in machines}
    link = cast(Link, machines[0])  # which has an endpoint

    whole = flight.on_tokens(link, iter([TokenDelta(each.name, 0, bytes(4), FinishReason.STOP) for each in machines]))

    assert whole
    assert [len(each.taken) for each in machines] == [1, 0, 1]
    assert [len(each.lost) for each in machines] == [0, 1, 0]
    assert faults == ["exception"]
    assert "injected" in caplog.text
