"""What a request passes: of several traces and of an idle one."""

from __future__ import annotations

from lab.benchmarks.request_path import Call, figures

READ: Call = ("poolgrid.a", "Reader.read")
PART: Call = ("poolgrid.a", "Reader.read.<locals>.<genexpr>")
CHOOSE: Call = ("poolgrid.b", "choose")
TICK: Call = ("poolgrid.c", "tick")
BYTES: Call = ("", "")


def test_a_path_has_what_every_request_passes_and_an_idle_router_does_not() -> None:
    once = [TICK, READ, PART, PART, CHOOSE, BYTES]
    late = [READ, CHOOSE, CHOOSE, BYTES, ("poolgrid.d", "rarely")]

    found = figures([once, late, once], idle=[TICK])

    assert found.functions == ["a Reader.read", "b choose"]
    assert found.modules == ["a", "b"]
    assert found.calls == 4
