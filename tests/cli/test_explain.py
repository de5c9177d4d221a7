"""`poolgrid explain` shows what the routers kept, whoever answers, and says so when nobody does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from rich.console import Console

from poolgrid.cli.explain import explain, tree
from poolgrid.router.core.candidates import RoutingRequest
from poolgrid.router.core.policy import KvAware
from poolgrid.wire.answers import PlacedExplanation, RequestExplanation
from poolgrid.wire.events import WorkerDraining
from tests.cli.json_server import Answer, serving
from tests.router.fleet_builder import Pool, decided, stored


def router_answer() -> dict[str, Any]:
    pool = Pool()
    a, _, c = pool.join("a", "b", "c")
    pool.say(a, stored([1, 2, 3]))
    pool.say(c, WorkerDraining())
    request = RoutingRequest("r-[red]1", "m", 160, 16, 10)
    decision = decided(pool.selector(KvAware()).select(request, [1, 2, 3, 4], 0.0, 0))
    decision.realised_cached_tokens = 48
    return RequestExplanation(request_id="r-[red]1", attempts=[decision.explanation()]).to_json()


GLOBAL = {
    "request_id": "r-[red]1", "model": "m", "isl": 160, "revision": 2, "outcome": "length", "output_tokens": 5,
    "ttft_ms": 12.5, "itl_ms": None, "time_ms": 1, "pools": ["cheap"], "workers": ["a"], "how": "fallback",
    "dispatches": 1, "queued_ms": 0.0, "notes": ["a note"],
    "hints": {"ttft_target_ms": 300, "itl_target_ms": None, "priority": None, "osl": None},
    "expected_output": {"tokens": 64, "source": "learned"},
    "placements": [{
        "stage": "aggregated", "work": "whole", "cause": "first", "how": "fallback", "pool": "cheap", "worker": "a",
        "pool_reason": "cheapest", "overlap_blocks": 3, "block_size": 16, "dispatch_id": "r-1", "select_ms": 0.4,
        "selection": {"cell": [1, 0], "axes": [{"name": "ttft_ms", "value": 300}]},
        "spill": {"pool": "fast", "share": 0.5}, "fallback": {"tried": ["fast"]},
        "refusals": [{"pool": "fast", "state": "down", "message": "no route"}],
    }],
}  # fmt: skip


POOLS = {
    "object": "list", "revision": 2,
    "queue": {
        "requests": 0, "requests_max": 1, "prompt_tokens": 0, "prompt_tokens_max": 1, "retry_after_s": None,
        "refused": {},
    },
    "data": [{
        "name": "cheap", "stage": "aggregated", "state": "available", "reason": "", "select_endpoint": "",
        "in_flight": 0, "breaker": {"state": "closed", "retry_after_ms": 0, "steps": []}, "saturation": None,
        "waiting_requests": None, "models": [], "speed_rank": 0,
    }],
}  # fmt: skip


def at(url: str) -> dict[str, Any]:
    """Return the pools' list with the one pool's router at a URL."""
    return {**POOLS, "data": [{**row, "url": url} for row in POOLS["data"]]}  # type: ignore[attr-defined]


def drawn(answer: Mapping[str, Any], of_pools: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    shown: PlacedExplanation | RequestExplanation
    if "placements" in answer:
        shown = msgspec.convert(answer, PlacedExplanation)
    else:
        shown = msgspec.convert(answer, RequestExplanation)
    pools = msgspec.convert(of_pools or {}, dict[str, RequestExplanation])
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(tree(shown, pools))
        return console.export_text()


def kept(answers: Mapping[str, Any]) -> Answer:
    def answer(path: str) -> tuple[int, bytes]:
        found = answers.get(path)
        body = json.dumps(found if found is not None else {"error": {"message": "none is kept"}}).encode()
        return 200 if found is not None else 404, body

    return answer


def test_a_routers_decision_shows_every_candidate_term_and_filter() -> None:
    text = drawn(router_answer())

    assert "r-[red]1" in text, "what clients chose is never taken for markup"
    assert "ISL 160 = 10 blocks, 3 believed to be there, 48 tokens really reused" in text
    assert "adjusted_prefill" in text
    assert "not c: draining" in text
    assert "the runner-up would have cost 3.00 more" in text


def test_a_global_decision_shows_cell_spill_fallback_refusal_and_the_pools_own_reasons() -> None:
    text = drawn(GLOBAL, {"cheap": router_answer()})

    for words in (
        "whole (first): pool cheap by fallback, worker a",
        "ttft_target_ms 300",
        "cell: 1, 0",
        "name: ttft_ms",
        "share: 0.5",
        "refused by fast: down, no route",
        "reserved in 0.4 ms: cheapest, overlap 3 blocks of 16 tokens",
        "not c: draining",
        "a note",
        "outcome: length, 5 tokens, TTFT 12.50 ms, ITL – ms",
    ):
        assert words in text


def test_the_pools_are_asked_too(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/v1/decisions/r-%5Bred%5D1"
    with (
        serving(kept({path: router_answer()})) as pool,
        serving(kept({path: GLOBAL, "/v1/pools": at(pool)})) as url,
    ):
        assert explain("r-[red]1", url, as_json=True) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["placements"] == GLOBAL["placements"]
    assert found["pools"]["cheap"]["attempts"][0]["worker"] == "a"


def test_what_is_not_kept_or_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(kept({})) as url:
        assert explain("gone", url, as_json=False) == 1
    assert "explaining 'gone': none is kept" in capsys.readouterr().err

    assert explain("gone", url, as_json=False) == 1
    assert "does not answer" in capsys.readouterr().err
