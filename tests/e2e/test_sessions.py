"""Sessions over real processes: ids, lineage, and the same table on every router and in the log, whoever is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.kernel.consolidation.session_table import SessionTable
from poolgrid.kernel.journal.stored_records import stored_records
from poolgrid.kernel.wire.events import TurnBegan
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.plugins.simulated.core.next_token import expected_output
from poolgrid.server.consolidator.journal.inspection import next_offset, reaches_back_to, state_at
from poolgrid.server.consolidator.journal.posix_disk import ReadOnlyDirectory
from poolgrid.server.router.http_api import session_row
from tests.e2e.expectation import MODEL, PLAIN
from tests.e2e.processes import Process, eventually, pool_is_quiet, ready_workers

pytestmark = pytest.mark.e2e

WORKERS = 2
MODEL_OPTIONS = ("--served-model-name", MODEL.name, "--vocabulary-size", str(MODEL.vocab_size))
MOVING = ("last_ms_ago", "expected_return_ms")
"""What depends on when one looks."""


class SharedPool:
    """Two routers and two workers on one consolidator with its journal on disk."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.directory = directory
        self._stack = stack
        self.consolidator = stack.enter_context(Process("consolidator", "--data-dir", str(directory))).wait_ready()
        self.routers = [self.router(name) for name in ("r0", "r1")]
        for number in range(WORKERS):
            name = ("--worker-id", f"w{number}", "--consolidator", self.consolidator.word("ingest"))
            stack.enter_context(Process("worker", *MODEL_OPTIONS, "--speedup", "50", *name)).wait_ready()
        for router in self.routers:
            self.until_ready(router)

    def router(self, name: str) -> Process:
        feed = ("--feed-endpoint", self.consolidator.word("feed"), "--query-endpoint", self.consolidator.word("query"))
        return self._stack.enter_context(Process("router", "--port", "0", "--router-id", name, *feed)).wait_ready()

    def until_ready(self, router: Process) -> None:
        eventually("all workers are there", lambda: len(ready_workers(router.url)) == WORKERS)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    with ExitStack() as stack:
        yield SharedPool(stack, tmp_path_factory.mktemp("sessions"))


def ask(url: str, messages: list[dict[str, Any]], **headers: str) -> str:
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sessions(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/v1/sessions", params={"limit": 1000}).raise_for_status().json()
    return rows_without_times(answer["data"])


def rows_without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in MOVING} for row in rows]


def folded(directory: Path) -> list[dict[str, Any]]:
    """Return what all records of the journal fold to."""
    disk = ReadOnlyDirectory(directory)
    table: SessionTable = state_at(disk, next_offset(disk), BLOCKS_PER_WORKER_MAX).sessions
    return rows_without_times([session_row(table, each, 0).to_json() for each in table.latest(1000)])


def knows_all(pool: SharedPool, turns: int) -> bool:
    """Tell whether both routers have a session's answers as the log has them."""
    disk = ReadOnlyDirectory(pool.directory)
    end = next_offset(disk)
    ends = [tail.total for session in state_at(disk, end, BLOCKS_PER_WORKER_MAX).sessions for tail in session.tails]
    offsets = [httpx.get(f"{router.url}/v1/sessions").json()["offset"] for router in pool.routers]
    return len(ends) == turns and all(ends) and min(offsets) >= end


def test_a_session_without_an_id_is_found_by_either_router(pool: SharedPool) -> None:
    words = list(range(100, 230))
    for turn in range(4):
        url = pool.routers[turn % 2].url
        body = {"model": "tiny", "prompt": words, "max_tokens": 24, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        answer = expected_output(pack_tokens(words), Sampling(24, ignore_eos=True), PLAIN)
        words = [*words, *answer, *range(200 + turn, 220)]
        eventually("both routers know the turn", partial(knows_all, pool, turn + 1))

    (row,) = sessions(pool.routers[0].url)
    assert row["turns"] == 4
    assert row["footprint_blocks"] > 0
    assert row["gaps_ms"].keys() == {"length"}


def test_turns_in_a_loop_of_tool_calls_ask_for_their_blocks_until_they_are_back(pool: SharedPool) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [user("Where is the next station?")]
    for turn in range(4):
        ask(pool.routers[0].url, messages, **{"x-session-id": "agent"})
        eventually("the turn is over", lambda turns=turn + 1: known_turns(pool) == turns)  # type: ignore[misc]
        calls = [{"id": f"call_{turn}", **call}]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "two streets from here"},
        ]

    disk = ReadOnlyDirectory(pool.directory)
    begun = [
        event.turn
        for stored in stored_records(disk, reaches_back_to(disk))
        for event in stored.record.events
        if isinstance(event, TurnBegan) and event.turn.session == "agent"
    ]
    assert [turn.after_tool for turn in begun] == [False, True, True, True]
    assert not begun[0].return_ms
    assert begun[2].return_ms > 0
    assert begun[3].return_ms > 0


def known_turns(pool: SharedPool) -> int:
    """Return how many turns of the session are over, as both routers know."""
    rows = [row for router in pool.routers for row in sessions(router.url) if row["session"] == "agent"]
    return min((row["turns"] for row in rows if row["state"] == "idle"), default=0) if len(rows) == 2 else 0


def test_the_sessions_of_every_router_are_the_fold_of_the_log_though_a_router_is_killed(pool: SharedPool) -> None:
    killed, survivor = pool.routers

    def talk(number: int) -> None:
        messages = [user(f"program {number} begins here, with words that no other program has " * 4)]
        for turn in range(8):
            url = (killed, survivor)[(number + turn) % 2].url if turn < 4 else survivor.url
            named = {"x-session-id": f"agent-{number}"} if number % 2 else {}
            try:
                answer = ask(url, messages, **named)
            except httpx.HTTPError:
                continue  # of the killed router; the client asks another one
            messages = [*messages, {"role": "assistant", "content": answer}, user(f"go on, turn {turn}")]

    talkers = [threading.Thread(target=talk, args=(number,)) for number in range(6)]
    for talker in talkers:
        talker.start()
    eventually("some turns are over", lambda: len(sessions(survivor.url)) >= 5)
    killed.kill()
    for talker in talkers:
        talker.join()
    restarted = pool.router("r0")
    pool.until_ready(restarted)
    for router in (survivor, restarted):
        eventually("nothing is on any book", partial(pool_is_quiet, router.url))

    wanted = folded(pool.directory)
    assert sessions(survivor.url) == wanted
    assert sessions(restarted.url) == wanted
    named = {row["session"]: row for row in wanted if row["session"].startswith("agent-")}
    assert set(named) == {"agent-1", "agent-3", "agent-5"}
    for row in named.values():
        assert row["turns"] >= 4
        assert row["footprint_blocks"] > 0
    assert {row["state"] for row in wanted} == {"idle"}
