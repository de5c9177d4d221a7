"""`poolgrid explain` shows what the routers kept, whoever answers, and says so when nobody does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from rich.console import Console

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.wire.answers import PlacedExplanation, RequestExplanation
from poolgrid.kernel.wire.events import WorkerDraining
from poolgrid.server.cli.commands.explain import run_explain, tree
from poolgrid.server.serving.router_process import decision_not_found
from tests.cli.json_server import Answer, serving
from tests.router.fleet_builder import Pool, decided, stored


def router_answer() -> dict[str, Any]:
    pool = Pool()
    a, _, c = pool.join("a", "b", "c")
    pool.say(a, stored([1, 2, 3]))
    pool.say(c, WorkerDraining())
    request = RoutingRequest("r-[red]1", "m", 160, 16, 10)
    decision = decided(pool.selector(KvAware()).select(WorkerWanted(request, [1, 2, 3, 4], 0.0, 0)))
    decision.realised_cached_tokens = 48
    return RequestExplanation(request_id="r-[red]1", attempts=[decision.explanation()]).to_json()


GLOBAL: dict[str, Any] = {
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
    answer = router_answer()
    text = drawn(answer)
    (attempt,) = answer["attempts"]

    assert "r-[red]1" in text, "what clients chose is never taken for markup"
    assert "ISL 160 = 10 blocks, 3 expected to be there: 48 tokens promised, 48 tokens reported as reused" in text
    for row in attempt["rows"]:
        shown = r"\s(?:.*\s)?".join(re.escape(f"{each:,.2f}") for each in (*row["terms"].values(), row["cost"]) if each)
        assert row["terms"]
        assert re.search(shown, text)
    assert "not c: draining" in text
    assert attempt["margin"] > 0
    assert f"the runner-up would have cost {attempt['margin']:.2f} more" in text


def test_a_global_decision_shows_cell_spill_fallback_refusal_and_the_pools_own_reasons() -> None:
    text = drawn(GLOBAL, {"r-1": router_answer()})

    for words in (
        "whole (first): pool cheap by fallback, worker a",
        "ttft_target_ms 300",
        "cell: 1, 0",
        "name: ttft_ms",
        "share: 0.5",
        "refused by fast: down, no route",
        "reserved in 0.40 ms: cheapest, overlap 3 blocks of 16 tokens",
        "not c: draining",
        "a note",
        "outcome: length, 5 tokens, TTFT 12.50 ms, ITL – ms",
    ):
        assert words in text


@pytest.mark.parametrize(("reason", "said"), [("lowest_cost", "lowest_cost"), ("", "nothing is known of it")])
def test_a_request_that_was_forwarded_shows_what_the_pools_router_chose(reason: str, said: str) -> None:
    (placement,) = GLOBAL["placements"]
    forwarded = {**placement, "block_size": 0, "overlap_blocks": 0, "pool_reason": reason}

    text = drawn({**GLOBAL, "placements": [forwarded]}, {"r-1": router_answer()})

    assert f"forwarded, and its router chose: {said}" in text
    assert "reserved in" not in text
    assert "not c: draining" in text


def test_the_pools_are_asked_too(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/v1/decisions/r-%5Bred%5D1"
    with (
        serving(kept({"/v1/decisions/r-1": router_answer()})) as pool,
        serving(kept({path: GLOBAL, "/v1/pools": at(pool)})) as url,
    ):
        assert run_explain("r-[red]1", url, as_json=True) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["placements"] == GLOBAL["placements"]
    assert found["pools"]["cheap"]["attempts"][0]["worker"] == "a"


def test_what_is_not_kept_or_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(kept({})) as url:
        assert run_explain("gone", url, as_json=False) == 1
    assert "explaining 'gone': none is kept" in capsys.readouterr().err

    assert run_explain("gone", url, as_json=False) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("oldest_ms", "recorded", "words"),
    [
        (None, False, "none is yet"),
        (1_700_000_000_000, False, "the last 1,024 are, since 2023-11-14 22:13:20 UTC"),
        (0, True, "UTC; older ones are in the recording (poolgrid explain --journal DATA_DIR)"),
    ],
)
def test_what_is_kept_instead_is_said_and_where_older_ones_are(
    oldest_ms: int | None, recorded: bool, words: str
) -> None:
    error = decision_not_found("gone", 1024, oldest_ms, is_recorded=recorded)

    assert error.message.startswith("no decision about request 'gone' is kept: ")
    assert error.message.endswith(words)


PODS = tuple(f"trtllm-decode-6f9c7d5b44-{letter * 5}" for letter in "abc")


def explanation_of_pods(request_id: str) -> RequestExplanation:
    pool = Pool()
    first, _, third = pool.join(*PODS)
    pool.say(first, stored([1, 2, 3]))
    pool.say(third, WorkerDraining())
    request = RoutingRequest(request_id, "m", 160, 16, 10)
    decision = decided(pool.selector(KvAware()).select(WorkerWanted(request, [1, 2, 3, 4], 0.0, 0)))
    return RequestExplanation(request_id=request_id, attempts=[decision.explanation()])


@pytest.mark.parametrize("columns", ["80", "60", ""])
def test_at_any_width_names_are_whole_and_every_term_is_there(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    request_id = "conversation-17-turn-3~r0123456789ab1f"
    answer = explanation_of_pods(request_id)
    with serving(kept({f"/v1/decisions/{request_id}": answer.to_json()})) as url:
        assert run_explain(request_id, url, as_json=False) == 0

    text = capsys.readouterr().out
    assert request_id in text
    for pod in PODS:
        assert pod in text
    rows = answer.attempts[0].rows
    for row in rows:
        for term in row.terms:
            assert term in text or len({other.terms[term] for other in rows}) == 1
        assert f"{row.cost:,.2f}" in text
    assert "…" not in text
    assert not columns or max(map(len, text.splitlines())) <= int(columns)


def test_the_sequences_of_a_request_have_a_branch_each() -> None:
    both = [explanation_of_pods(f"two-{index}~r1").attempts[0] for index in range(2)]

    text = drawn(RequestExplanation(request_id="two", attempts=both).to_json())

    assert text.index("sequence two-0~r1") < text.index("sequence two-1~r1")
    assert text.count("attempt 0, ") == 2


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (range(10), "2 media: 10 of 10 whole blocks compared with what workers hold"),
        (
            range(3),
            "2 media: 3 of 10 whole blocks compared with what workers hold; the rest is output, or behind a medium",
        ),
    ],
)
def test_how_far_a_prompt_with_media_was_compared_is_told(path: range, words: str) -> None:
    pool = Pool()
    pool.join("a")
    request = RoutingRequest("r", "m", 160, 16, 10, media=(1, 2))
    decision = decided(pool.selector(KvAware()).select(WorkerWanted(request, list(path), 0.0, 0)))
    lines = drawn(RequestExplanation(request_id="r", attempts=[decision.explanation()]).to_json()).splitlines()

    (line,) = [line for line in lines if "media:" in line]
    assert words in line
    assert ("the rest" in line) is (len(path) < 10)
