"""The soak finds what is left behind, and a pool that was loaded and left by its clients is as it was before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.benchmarks.growth import Slope
from lab.benchmarks.services import LATE_ANSWERS_MAX, LateAnswer, Patience, PoolFailed, Reading, get, summed
from lab.benchmarks.soak import Sample, growth_faults, load_faults, request_growth_faults, request_slopes
from lab.benchmarks.soak_clients import Connection, Tally
from lab.benchmarks.soak_pool import leftovers
from lab.benchmarks.soak_requests import ENDINGS, MALFORMED, Leaving, Plan, Planned

QUIET = Reading(rss_mb=100, descriptors=40, sockets=20, threads=9, processes=1, tasks=6, books={"requests": 0.0})


def test_the_same_seed_plans_the_same_and_another_one_does_not() -> None:
    def drawn(seed: int) -> list[bytes]:
        plan = Plan(seed, 7, "tiny", 64)
        return [plan.next().data for _ in range(50)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_every_kind_of_request_and_of_leaving_is_drawn() -> None:
    plan = Plan(0, 0, "tiny", 64)
    drawn = [plan.next() for _ in range(3000)]
    assert {planned.leaving for planned in drawn} == set(ENDINGS)
    kinds = Counter(planned.kind for planned in drawn)
    assert {f"malformed: {name}" for name in MALFORMED} <= set(kinds)
    assert {"completion", "token completion", "chat", "chat with tools", "response", "several choices"} <= set(kinds)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Reading(100, 41, 20, 9, 1, 6, {"requests": 0.0}), "router: 41 descriptors, 40 before the load"),
        (Reading(100, 40, 21, 9, 1, 6, {"requests": 0.0}), "router: 21 sockets, 20 before the load"),
        (Reading(100, 40, 20, 99, 1, 6, {"requests": 0.0}), "router: 99 threads, 9 before the load"),
        (Reading(100, 40, 20, 9, 1, 7, {"requests": 0.0}), "router: 7 tasks, 6 before the load"),
        (Reading(100, 40, 20, 9, 1, 6, {"requests": 1.0}), "router: requests is 1, not 0"),
    ],
)
def test_what_is_left_behind_is_said(now: Reading, said: str) -> None:
    assert leftovers({"router": QUIET}, {"router": now}) == [said]
    assert leftovers({"router": QUIET}, {"router": QUIET}) == []


def test_memory_must_surely_grow_to_be_a_fault() -> None:
    slopes = {"leaks": Slope(3, 2, 4), "noisy": Slope(3, -1, 7), "unknown": None}
    one = dict.fromkeys(slopes, 1)
    (found,) = growth_faults(slopes, one, 300, 1.0)
    assert found.startswith("leaks: memory grows by 3.00 MB/min (2.00 to 4.00)")
    assert growth_faults(slopes, one, 10, 1.0) == []
    assert growth_faults(slopes, {**one, "leaks": 3}, 300, 1.0) == []


def test_memory_for_each_request_is_judged_over_the_second_half() -> None:
    def run(at_mb: Callable[[int], float]) -> dict[str, Slope | None]:
        readings = [{"router": replace(QUIET, rss_mb=at_mb(number))} for number in range(200)]
        return request_slopes([Sample(0, 1, each, 5000 * number) for number, each in enumerate(readings)])

    filled = run(lambda number: min(300.0, 100 + 4 * number))
    assert request_growth_faults(filled, 10**6, 256) == [], "what fills up early is a cache"
    leaks = run(lambda number: 100 + 4.6 * 5 * number)
    (found,) = request_growth_faults(leaks, 10**6, 256)
    assert found.startswith("router: memory grows by 4600 bytes a request")
    assert request_growth_faults(leaks, 100_000, 256) == [], "too few to say"


def test_wrong_answers_and_a_load_that_was_none_are_faults() -> None:
    tally = Tally()
    full = [Sample(at, 100, {}) for at in range(10)]
    assert load_faults(tally, full, 100, 600) == []
    assert load_faults(tally, [Sample(at, 50, {}) for at in range(10)], 100, 600) == [
        "clients: 50 streams were open on average, 100 were wanted"
    ]
    tally.fault(Plan(0, 0, "tiny", 64).next(), "status 500, not 200")
    (found,) = load_faults(tally, full, 100, 600)
    assert "1 wrong answers" in found
    assert "status 500" in found


async def test_a_process_that_answers_late_is_asked_again_and_one_that_hangs_or_is_gone_ends_the_soak() -> None:
    patience = Patience()
    answers: list[Exception | None] = []

    async def ask() -> str:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return "answered"

    late = LateAnswer("late")
    for _ in range(2):
        answers += [late] * (LATE_ANSWERS_MAX - 1) + [None]
        assert await patience.asked(ask) == "answered"
    assert patience.late == 2 * (LATE_ANSWERS_MAX - 1), "only those in a row are too many"
    answers += [late] * LATE_ANSWERS_MAX
    with pytest.raises(LateAnswer):
        await patience.asked(ask)
    answers += [PoolFailed("gone"), None]
    with pytest.raises(PoolFailed, match="gone"):
        await patience.asked(ask)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with httpx.AsyncClient(timeout=0.05, trust_env=False) as client:
            with pytest.raises(LateAnswer, match="ReadTimeout"):
                await get(client, f"http://127.0.0.1:{silent.getsockname()[1]}/metrics")


def test_samples_of_a_metric_add_up() -> None:
    text = '# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nab 9\nc 1\n'
    assert summed(text, ("a", "c", "d")) == {"a": 5.5, "c": 1.0}


@pytest.mark.e2e
def test_nothing_is_left_of_streams_whose_clients_leave(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "lab.benchmarks.soak", "--streams", "40", "--seconds", "2", "--workers", "2"]
    command += ["--speedup", "2", "--osl-max", "64", "--sample-s", "0.5", "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert found["held"]
    assert found["statuses"]["200"] > 40
    assert set(found["left"]) >= {"within request", "before answer", "within answer"}


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"


def planned(leaving: Leaving, **fields: Any) -> Planned:
    values = {"patience": 0.0, "leave_at": 3, "streams": True, "reset": False, "status": 200, "end": b"end", **fields}
    return Planned(kind="test", data=b"POST / HTTP/1.1\r\n\r\n", leaving=leaving, **values)


def exchange(plan: Planned, body: bytes = b"answer end") -> tuple[str, bool, Tally]:
    """Return how an exchange ended whose answer comes in two parts, and whether its connection may be used again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + body[:4])
            if plan.leaving not in ("never", "close"):
                await reader.read()  # up to the client's end
            await writer.drain()
            writer.write(body[4:])
            if len(body) == 10 and plan.leaving == "never":
                await reader.read()
        writer.close()

    async def go() -> tuple[str, bool, Tally]:
        tally = Tally()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(tally), "127.0.0.1", port)
        how = await asyncio.wait_for(connection.exchange(plan), 120)
        is_open = connection.is_open
        connection.close()
        server.close()
        return how, is_open, tally

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("leaving", "how", "is_open"),
    [
        ("never", "answered", True),
        ("close", "answered", False),
        ("half-close", "answered", False),
        ("within answer", "left", False),
        ("before answer", "left", False),
        ("within request", "left", False),
    ],
)
def test_clients_end_as_planned(leaving: Leaving, how: str, is_open: bool) -> None:
    fields = {"leave_at": 0} if leaving in ("within answer", "half-close") else {}
    if leaving == "before answer":
        # No server answers a request that is not complete.
        found = exchange(
            Planned("test", b"POST", 200, b"", leaving, reset=True, patience=0.0, leave_at=0, streams=True)
        )
    else:
        found = exchange(planned(leaving, **fields))
    assert found[:2] == (how, is_open)
    assert found[2].faults == []


@pytest.mark.parametrize(
    ("plan", "body", "said"),
    [
        (planned("never", end=b"other"), b"answer end", "ends without b'other'"),
        (planned("never", status=400), b"answer end", "status 200, not 400"),
        (planned("never"), b'data: {"error"', "an error within the answer"),
    ],
)
def test_wrong_answers_are_faults(plan: Planned, body: bytes, said: str) -> None:
    _, _, tally = exchange(plan, body)
    assert said in " ".join(tally.faults)


def test_an_answer_that_is_cut_is_lost() -> None:
    assert exchange(planned("never"), b"answer")[0] == "lost"
