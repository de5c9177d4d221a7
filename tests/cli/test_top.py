"""``poolgrid top``: what a frame says, and that it outlives its router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal

import httpx
import msgspec
import pytest
from rich.console import Console

from poolgrid.kernel.wire.answers import (
    AdmissionRow,
    DecisionList,
    QueueRow,
    SessionList,
    SourceRow,
    StreamRow,
    WorkerList,
    WorkerRow,
)
from poolgrid.server.cli.commands.top import (
    WORKERS_SHOWN_MAX,
    Frame,
    fetch,
    fetch_fleet,
    stream_cell,
    usage_bar,
    view,
    watch,
)
from tests.cli.json_server import Answer, serving

QUEUE = {
    "requests": 3, "requests_max": 1024, "prompt_tokens": 96, "prompt_tokens_max": 4_194_304, "retry_after_s": 7.0,
    "refused": {"no_worker": 2, "busy": 1234}, "a_later_field": 1,
}  # fmt: skip
SAID_TOO = {
    "unreachable_because": None, "engine": "simulated", "block_size": 16, "active_requests": 7, "http_endpoint": "",
    "stream": {
        "state": "live", "reason": "", "trusted": True, "untrusted_because": None,
        "sources": {"worker": {"state": "live", "reason": ""}},
        "checked_requests": 0, "predicted_tokens": 0, "realised_tokens": 0, "disagreement": 0.0,
    },
}  # fmt: skip
WORKERS = {
    "object": "list",
    "offset": 1234,
    "data": [
        {
            "worker_id": "w1", "dp_rank": 3, "model": "tiny", "role": "aggregated", "state": "ready", "epoch": 7,
            "running_requests": 5, "waiting_requests": 2, "prefill_tokens": 4096, "active_blocks": 300,
            "cached_blocks": 900, "indexed_blocks": 899, "total_blocks": 1000, "requests_total": 12345,
            "event_lag_ms": 3.4, "last_event_ms_ago": 2500.0, "a_later_field": [1], **SAID_TOO,
        },
        {
            "worker_id": "w0", "dp_rank": 0, "model": "tiny", "role": "aggregated", "state": "stale", "epoch": 7,
            "running_requests": 0, "waiting_requests": 0, "prefill_tokens": 0, "active_blocks": 0,
            "cached_blocks": 0, "indexed_blocks": 0, "total_blocks": 0, "requests_total": 0,
            "event_lag_ms": None, "last_event_ms_ago": None, **SAID_TOO,
        },
    ],
    "queue": QUEUE,
}  # fmt: skip
DECISIONS = {
    "object": "list",
    "data": [
        {
            "request_id": "r-77", "time_ms": 1, "stage": "whole",
            "policy": "kv", "reason": "lowest cost", "worker": "w1/3", "isl": 160,
            "isl_blocks": 10, "overlap_blocks": 8, "cost": 11.25, "candidates": 2, "realised_cached_tokens": 128,
        },
        {
            "request_id": "[bold]r-78", "time_ms": 2, "stage": "whole",
            "policy": "random", "reason": "", "worker": "w0", "isl": 16,
            "isl_blocks": 1, "overlap_blocks": 0, "cost": None, "candidates": 2, "realised_cached_tokens": None,
        },
    ],
}  # fmt: skip
POOLS = {
    "object": "list",
    "revision": 5,
    "queue": QUEUE,
    "data": [
        {
            "name": "fast", "stage": "prefill", "url": "http://x", "state": "saturated", "reason": "", "in_flight": 12,
            "breaker": {"state": "closed", "retry_after_ms": 0.0, "steps": []}, "saturation": 1.0,
            "waiting_requests": 4, "select_endpoint": "tcp://x:1", "speed_rank": 0,
            "models": [{"model": "tiny", "block_size": 16, "hash_spec": "h", "max_sequence_length": 9, "loras": [],
                        "roles": {"prefill": {
                "ready": 2, "draining": 0, "unreachable": 0, "requests": 12, "capacity": 12,
            }}}],
        },
        {
            "name": "[b]slow", "stage": "decode", "url": "http://y", "state": "down", "reason": "connection refused",
            "select_endpoint": "", "speed_rank": 1,
            "in_flight": 0, "breaker": {"state": "open", "retry_after_ms": 9.0, "steps": []}, "saturation": None,
            "waiting_requests": None, "models": [],
        },
    ],
}  # fmt: skip
PLACEMENTS = {
    "object": "list",
    "data": [
        {
            "request_id": "r-9", "model": "tiny", "isl": 160, "pools": ["fast", "slow"], "how": "fallback",
            "workers": ["w1", "w2"], "outcome": "length", "output_tokens": 24, "queued_ms": 1500.0, "ttft_ms": 1600.4,
            "itl_ms": 9.6, "time_ms": 1, "revision": 5, "dispatches": 2,
        },
        {
            "request_id": "r-10", "model": "tiny", "isl": 160, "pools": [], "workers": [], "how": None,
            "outcome": "refused: busy", "output_tokens": 0, "queued_ms": 0.0, "ttft_ms": None, "itl_ms": None,
            "time_ms": 1, "revision": 5, "dispatches": 0,
        },
    ],
}  # fmt: skip


def good_global(path: str) -> tuple[int, bytes]:
    if path == "/v1/workers":
        return 404, b"{}"
    if path == "/v1/pools":
        return 200, json.dumps(POOLS).encode()
    assert path == "/v1/decisions?limit=20"
    return 200, json.dumps(PLACEMENTS).encode()


def good(path: str) -> tuple[int, bytes]:
    if path == "/v1/workers":
        return 200, json.dumps(WORKERS).encode()
    assert path == "/v1/decisions?limit=20"
    return 200, json.dumps(DECISIONS).encode()


def workers(*rows: WorkerRow) -> WorkerList:
    return WorkerList(offset=0, queue=msgspec.convert(QUEUE, QueueRow), data=list(rows))


def drawn(frame: Frame, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(view(frame))
        return console.export_text()


def look(url: str, before: Frame | None = None) -> Frame:
    async def main() -> Frame:
        async with httpx.AsyncClient(base_url=url) as client:
            return await fetch(client, before or Frame(url))

    return asyncio.run(main())


class TestView:
    @pytest.mark.parametrize(
        ("states", "cell"),
        [
            ({"worker": "live"}, "live"),
            ({"worker": "live", "kvbm": "live"}, "live"),
            ({"worker": "live", "kvbm": "absent", "engine": "former"}, "live, kvbm absent, engine former"),
        ],
    )
    def test_further_sources_that_are_not_live_are_named(self, states: dict[str, str], cell: str) -> None:
        row = msgspec.convert(SAID_TOO["stream"], StreamRow)
        sources = {name: SourceRow(state=state, reason="") for name, state in states.items()}
        stream = msgspec.structs.replace(row, sources=sources)

        assert stream_cell(stream).plain == cell

    def test_a_worker_that_had_nothing_to_say_yet_is_not_behind(self) -> None:
        row = msgspec.convert(SAID_TOO["stream"], StreamRow)

        assert stream_cell(msgspec.structs.replace(row, state="syncing")).plain == "no events yet"
        doubted = msgspec.structs.replace(row, state="syncing", trusted=False, disagreement=0.5)
        assert stream_cell(doubted).plain == "suspect 50%"

    @pytest.mark.parametrize("width", [80, 60])
    def test_long_names_are_whole_and_cost_lines_instead(self, width: int) -> None:
        pod, request = "trtllm-decode-6f9c7d5b44-x2x9q", f"{'conversation-' * 4}17~r0123456789ab1f"
        with serving(good) as url:
            known = look(url)
        assert known.workers is not None
        assert known.decisions is not None
        row = msgspec.structs.replace(known.workers.data[0], worker_id=pod)
        decided = msgspec.structs.replace(known.decisions.data[0], request_id=request, worker=pod)

        text = drawn(Frame("http://h", workers(row), DecisionList(data=[decided])), width)

        assert f"{pod}/3" in text
        assert text.count(pod) == 2
        assert request in text.replace("\n", "")
        assert "30%" in text
        assert "…" not in text

    def test_a_frame_says_who_is_there_and_how_the_last_decisions_went(self) -> None:
        with serving(good) as url:
            text = drawn(look(url))

        lines = text.splitlines()
        headline, worker = lines[0], next(line for line in lines if "w1/3" in line)
        assert "1 ready, 1 stale" in headline
        assert "5 running, 2 waiting" in headline
        assert "offset 1,234" in headline
        assert re.split(r"\s{2,}", worker.strip()) == [
            "w1/3", "aggregated", "tiny", "ready", "live", "5", "2", "███░░░░░░░", "30%",
            "90.0%", "899", "4,096", "3 ms", "2.5 s", "12,345",
        ]  # fmt: skip
        assert text.index("w0") < text.index("w1/3"), "sorted by name"
        decision = next(line for line in lines if "r-77" in line)
        for cell in ("w1/3", "kv", "lowest cost", "8/10", "160", "128", "11.25"):
            assert cell in decision
        assert "[bold]r-78" in text, "names are never markup"

    def test_a_narrow_terminal_keeps_what_matters_most(self) -> None:
        with serving(good) as url:
            text = drawn(look(url), width=80)

        worker = next(line for line in text.splitlines() if "w1/3" in line)
        assert re.split(r"\s{2,}", worker.strip()) == [
            "w1/3", "aggregated", "ready", "live", "5", "2", "███░░░░░░░", "30%", "90.0%", "12,345",
        ]  # fmt: skip
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text

    def test_many_workers_are_counted_instead_of_drawn(self) -> None:
        with serving(good) as url:
            known = look(url)
        assert known.workers is not None
        row = known.workers.data[0]
        rows = [msgspec.structs.replace(row, worker_id=f"w{number:04}") for number in range(WORKERS_SHOWN_MAX + 5)]

        text = drawn(Frame("http://h", workers(*rows), known.decisions))

        assert f"w{WORKERS_SHOWN_MAX - 1:04}/3" in text
        assert f"w{WORKERS_SHOWN_MAX:04}" not in text
        assert "not shown: 5 more workers" in text

    @pytest.mark.parametrize(
        ("used", "total", "text"),
        [
            (0, 10, "░░░░░░░░░░   0%"),
            (5, 10, "█████░░░░░  50%"),
            (10, 10, "██████████ 100%"),
            (20, 10, "██████████ 100%"),
            (-1, 10, "░░░░░░░░░░   0%"),
            (5, 0, "–"),
        ],
    )
    def test_bars(self, used: int, total: int, text: str) -> None:
        assert usage_bar(used, total).plain == text


class TestGlobalRouter:
    def test_a_frame_says_how_the_pools_are_who_waits_and_how_the_last_requests_went(self) -> None:
        with serving(good_global) as url:
            frame = look(url)
            text = drawn(frame)

        lines = text.splitlines()
        assert "pools: 1 saturated, 1 down" in lines[0]
        assert "in flight: 12" in lines[0]
        assert "revision 5" in lines[0]
        assert "queue: 3 of 1,024 requests, 96 of 4,194,304 prompt tokens" in lines[1]
        assert "refused: 1,234 busy, 2 no_worker   come back after 7 s" in lines[1]
        pool = next(line for line in lines if line.strip().startswith("fast"))
        assert re.split(r"\s{2,}", pool.strip()) == [
            "fast", "prefill", "saturated", "closed", "12", "4", "██████████ 100%", "2", "tiny",
        ]  # fmt: skip
        down = next(line for line in lines if "[b]slow" in line)
        assert "connection refused" in down
        placed = next(line for line in lines if "r-9" in line)
        for cell in ("fast, slow", "w1, w2", "fallback", "length", "160", "24", "1.5 s", "1.6 s", "10 ms"):
            assert cell in placed
        assert "refused: busy" in next(line for line in lines if "r-10" in line)

    def test_a_narrow_terminal_keeps_what_matters_most(self) -> None:
        with serving(good_global) as url:
            text = drawn(look(url), width=80)

        pool = next(line for line in text.splitlines() if line.strip().startswith("fast"))
        assert re.split(r"\s{2,}", pool.strip()) == [
            "fast", "prefill", "saturated", "12", "4", "██████████ 100%", "2",
        ]  # fmt: skip

    def test_it_is_asked_for_its_pools_first_the_next_time_and_may_be_replaced_by_a_router(self) -> None:
        asked: list[str] = []

        def noted(path: str) -> tuple[int, bytes]:
            asked.append(path)
            return good_global(path)

        with serving(noted) as url:
            frame = look(url, look(url))
        assert asked == ["/v1/workers", "/v1/pools", "/v1/decisions?limit=20", "/v1/pools", "/v1/decisions?limit=20"]
        away = look(url, frame)
        assert "below is what was known last" in drawn(away)
        assert "saturated" in drawn(away)

        with serving(lambda path: (404, b"") if path == "/v1/pools" else good(path)) as url:
            replaced = look(url, Frame(url, pools=frame.pools, placements=frame.placements))
        assert replaced.pools is None
        assert "w1/3" in drawn(replaced)

    def test_what_has_neither_workers_nor_pools_is_no_router(self) -> None:
        with serving(lambda _path: (404, b"")) as url:
            assert look(url).fault == "GET /v1/pools: status 404"

    def test_the_queue_of_a_router_is_drawn_too(self) -> None:
        def answer(path: str) -> tuple[int, bytes]:
            if path == "/v1/workers":
                return 200, json.dumps({**WORKERS, "queue": {**QUEUE, "refused": {}, "retry_after_s": None}}).encode()
            return good(path)

        with serving(answer) as url:
            text = drawn(look(url))

        line = next(line for line in text.splitlines() if "queue:" in line)
        assert line.rstrip().endswith("prompt tokens   refused: none")


class TestFetch:
    def test_a_router_that_goes_away_leaves_the_last_known_state_and_a_fault(self) -> None:
        with serving(good) as url:
            before = look(url)

        after = look(url, before)

        assert before.fault is None
        assert after.fault is not None
        assert after.workers == before.workers
        assert "w1/3" in drawn(after)
        assert "below is what was known last" in drawn(after)

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (lambda _path: (503, b"{}"), "GET /v1/workers: status 503"),
            (lambda _path: (200, b"<html>"), "not a router's"),
            (
                lambda _path: (200, json.dumps({**WORKERS, "data": [{}]}).encode()),
                "worker_id",
            ),
            (lambda _path: (200, b'{"data": []}'), "missing required field `offset`"),
            (lambda _path: (200, b'{"data": 1}'), "not a router's"),
            (lambda path: (404, b"") if "decisions" in path else good(path), "decisions?limit=20: status 404"),
        ],
    )
    def test_what_is_no_answer_of_a_router_is_a_fault(self, answer: Answer, words: str) -> None:
        with serving(answer) as url:
            frame = look(url)

        assert frame.fault is not None
        assert words in frame.fault


class TestTop:
    def test_once_prints_the_answers_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(good) as url:
            code = watch(url, 1.0, once=True, as_json=True)

        found = json.loads(capsys.readouterr().out)
        assert code == 0
        assert [row["worker_id"] for row in found["workers"]["data"]] == ["w1", "w0"]
        assert found["decisions"]["data"][0]["request_id"] == "r-77"
        assert (found["fault"], found["pools"]) == (None, None)

    @pytest.mark.parametrize(
        ("status", "key", "words"),
        [
            (401, "", "put an operator's key into POOLGRID_API_KEY (it is not set)"),
            (401, "pg-x", "put an operator's key into POOLGRID_API_KEY (the key in it is not one of the router's)"),
            (403, "pg-x", "the key in POOLGRID_API_KEY is no operator's"),
        ],
    )
    def test_a_router_with_keys_is_told_how_to_be_watched(
        self,
        status: int,
        key: str,
        words: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("POOLGRID_API_KEY", key)
        with serving(lambda _path: (status, b"{}")) as url:
            assert watch(url, 1.0, once=True) == 1

        assert words in " ".join(capsys.readouterr().out.split())

    def test_once_fails_without_a_router(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(good) as url:
            pass

        assert watch(url, 1.0, once=True) == 1
        assert "does not answer" in " ".join(capsys.readouterr().out.split())

    def test_an_interval_of_nothing_is_a_clear_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert watch("http://h", 0.0, once=True) == 2
        assert "interval is 0.0 s" in " ".join(capsys.readouterr().err.split())

    def test_it_keeps_asking_through_faults_until_ctrl_c(self, capsys: pytest.CaptureFixture[str]) -> None:
        asked: list[str] = []

        def answer(path: str) -> tuple[int, bytes]:
            asked.append(path)
            if len(asked) <= 3:
                return 500, b""
            if len(asked) == 9:
                os.kill(os.getpid(), signal.SIGINT)
            return good(path)

        with serving(answer) as url:
            code = watch(url, 0.05, once=False)

        assert code == 0
        assert len(asked) >= 9
        assert "journal offset 1,234" in " ".join(capsys.readouterr().out.split())

    def test_while_its_name_cannot_be_looked_up_the_router_that_is_known_is_asked_on(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked: list[str] = []

        def answer(path: str) -> tuple[int, bytes]:
            asked.append(path)
            if len(asked) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return 500, b""

        async def other(silent: str) -> str:
            raise OSError(f"nobody knows who is there in place of {silent}")

        with serving(answer) as url:
            code = watch(url, 0.05, once=False, other=other)

        assert code == 0
        assert len(asked) >= 3
        said = " ".join(capsys.readouterr().out.split())
        assert "status 500; nobody knows who is there in place of" in said


FLEET = {
    "object": "list",
    "names": "directory",
    "where": "/run/names",
    "refused": {"blue.router.x": "the entry 'blue.router.x' is no registration: \x1b[31m"},
    "data": [
        {
            "namespace": "blue", "component": "router", "instance": "r1", "started_ms": 1_763_800_000_000,
            "endpoints": {"http": "http://a:1", "select": "tcp://a:2"}, "lease_ms": 10_000, "a_later_field": 1,
        },
    ],
}  # fmt: skip


def test_the_fleet_is_shown_by_name_with_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda path: (200, json.dumps(FLEET).encode()) if path == "/v1/fleet" else (404, b"")) as url:
        assert watch(url, 1, once=True, look=fetch_fleet) == 0

    shown = capsys.readouterr().out
    assert "1 namespace: 1 router" in shown
    assert re.search(r"blue +router +r1", shown)
    assert "refused: the entry 'blue.router.x'" in shown.replace("\n", " ")
    assert "\x1b[31m" not in shown


def test_a_router_without_names_says_so_in_the_place_of_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda path: (404, b"")) as url:
        assert watch(url, 1, once=True, look=fetch_fleet) == 1

    assert "--names" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["works", "rests"])
def test_whether_turns_wait_for_places_is_shown_with_its_reason(state: str) -> None:
    sessions = SessionList(offset=0, total=0, data=[], admission=AdmissionRow(state=state, reason="100 turns replayed"))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(view(Frame("http://router", sessions=sessions)))

    assert f"session admission {state}: 100 turns replayed" in shown.get()
