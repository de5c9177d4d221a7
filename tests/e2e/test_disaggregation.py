"""Prefill and decode on different workers: the same answers as on one, whatever dies or leaves in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import httpx
import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.plugins.bench.command import measure_one
from poolgrid.plugins.bench.settings import BenchSettings
from tests.e2e.expectation import PLAIN, Verifier, expected_text
from tests.e2e.processes import (
    PATIENT_ROUTER,
    Process,
    assert_decisions_replay,
    eventually,
    index_equals_workers,
    metric,
    pool_is_quiet,
    ready_workers,
    worker_rows,
)

pytestmark = pytest.mark.e2e

MAKER = ("--served-model-name", "tiny", "--vocabulary-size", "4096", "--speedup", "50")


LEGS = ("queue", "prefill", "transfer", "decode")


def start_worker(ingest: str, name: str, role: str) -> Process:
    return Process("worker", "--worker-id", name, "--role", role, "--consolidator", ingest, *MAKER)


class DisaggregatedPool:
    """A router with two prefill and two decode workers, each its own process."""

    def __init__(self, router: Process, workers: dict[str, Process]) -> None:
        self.router = router
        self.url = router.url
        self.workers = workers

    def restart(self, name: str) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        self.workers[name].__exit__(None, None, None)
        self.workers[name] = start_worker(self.router.word("ingest"), name, role).wait_ready()

    def end(self) -> None:
        for worker in self.workers.values():
            worker.__exit__(None, None, None)

    def kept_transfers(self) -> float:
        """Return how many transfers the prefill workers keep blocks for."""
        prefill = [worker for name, worker in self.workers.items() if name.startswith("p")]
        return sum(metric(worker.url, "poolgrid_worker_kept_transfers") for worker in prefill)

    def is_whole(self) -> bool:
        return len(ready_workers(self.url)) == len(self.workers)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisaggregatedPool]:
    directory = tmp_path_factory.mktemp("disaggregated")
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(
            Process("router", "--port", "0", "--legs", "two", "--data-dir", str(directory), *PATIENT_ROUTER)
        ).wait_ready()
        names = ("p0", "p1", "d0", "d1")
        workers = {
            name: start_worker(router.word("ingest"), name, "prefill" if name[0] == "p" else "decode") for name in names
        }
        made = DisaggregatedPool(router, workers)
        stack.callback(made.end)
        for worker in workers.values():
            worker.wait_ready()
        eventually("every worker is reachable", made.is_whole)
        yield made
        decided = metric(router.url, "poolgrid_router_decisions_total")
        assert router.stop()[0] == 0
    # The others were made while the router was behind, or had just begun.
    assert assert_decisions_replay(directory) > decided / 2


def blocks_are_free(url: str) -> bool:
    return pool_is_quiet(url) and all(row["active_blocks"] == 0 for row in worker_rows(url).values())


def legs(url: str, stage: str) -> float:
    return metric(url, "poolgrid_router_legs_total", stage=stage)


def test_with_two_legs_every_prompt_is_prefilled_elsewhere(pool: DisaggregatedPool) -> None:
    before = {stage: legs(pool.url, stage) for stage in ("prefill", "decode", "whole")}
    long_prompt = [100 + number % 3000 for number in range(2000)]

    for prompt in (long_prompt, long_prompt[:100]):
        answer = httpx.post(f"{pool.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 40})
        assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(prompt), 40, vocabulary=PLAIN)
        assert answer.headers["x-poolgrid-worker"].startswith("d")

    after = {stage: legs(pool.url, stage) - before[stage] for stage in before}
    assert after == {"prefill": 2, "decode": 2, "whole": 0}


def test_a_prefill_that_finishes_the_request_needs_no_decode(pool: DisaggregatedPool) -> None:
    before = legs(pool.url, "decode")
    prompt = [7 + number % 4000 for number in range(1500)]

    answer = httpx.post(f"{pool.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})

    assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(prompt), 1, vocabulary=PLAIN)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert legs(pool.url, "decode") == before
    eventually("every block is free", lambda: blocks_are_free(pool.url))


def test_both_legs_are_explained(pool: DisaggregatedPool) -> None:
    prompt = [9 + number % 4000 for number in range(1500)]
    answer = httpx.post(f"{pool.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 5})

    attempts = httpx.get(f"{pool.url}/v1/decisions/{answer.headers['x-request-id']}").json()["attempts"]

    assert [attempt["stage"] for attempt in attempts] == ["prefill", "decode"]
    assert [attempt["worker"][0] for attempt in attempts] == ["p", "d"]


def test_each_leg_is_timed_and_what_could_be_reused_is_counted(pool: DisaggregatedPool) -> None:
    def counts() -> dict[str, float]:
        legs = {leg: metric(pool.url, "poolgrid_router_leg_seconds_count", leg=leg) for leg in LEGS}
        tokens = ("prompt_tokens_total", "achievable_tokens_total", "overlap_realised_tokens_total")
        moved = sum(metric(worker.url, "poolgrid_worker_kv_transfer_bytes_count") for worker in pool.workers.values())
        return {**legs, **{name: metric(pool.url, f"poolgrid_router_{name}") for name in tokens}, "moved": moved}

    prompt = [11 + number % 4000 for number in range(1504)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 5}
    before = counts()

    assert httpx.post(f"{pool.url}/v1/completions", json=body).status_code == 200
    eventually("the index knows the blocks", lambda: index_equals_workers(pool.url))
    assert httpx.post(f"{pool.url}/v1/completions", json={**body, "max_tokens": 1}).status_code == 200

    after = {name: value - before[name] for name, value in counts().items()}
    # The second one is decoded where it is prefilled: all of it is there.
    assert after["prefill"] == 2
    assert after["transfer"] == after["moved"] == 1
    assert after["queue"] == 3
    assert after["prompt_tokens_total"] == 2 * 1504
    assert after["achievable_tokens_total"] == 1504
    assert 1504 - 32 <= after["overlap_realised_tokens_total"] < 1504
    for worker in pool.workers.values():
        assert metric(worker.url, "poolgrid_worker_engine_healthy") == 1


def test_mixed_load_with_cancels_and_kills_is_right_to_the_last_token_and_leaves_nothing(
    pool: DisaggregatedPool,
) -> None:
    settings = BenchSettings(url=pool.url, concurrency=(24,), isl=700, osl=60, requests=300)
    verify = Verifier(PLAIN)
    tokens = metric(pool.url, "poolgrid_frontend_output_tokens_total")
    done = threading.Event()

    def disturb() -> None:
        for number, name in enumerate(("p0", "d1")):
            goal = tokens + 4000 * (number + 1)
            eventually(
                "the load goes on",
                lambda goal=goal: metric(pool.url, "poolgrid_frontend_output_tokens_total") > goal,  # type: ignore[misc]
            )
            for _ in range(5):
                leave_early(pool.url)
            pool.workers[name].kill()
            pool.restart(name)
        done.set()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    report = measure_one(settings, verify=verify)
    disturber.join()

    assert done.is_set()
    assert report.errors == 0, report.errors_by_kind
    assert report.wrong_texts == 0
    assert verify.checked == 300
    eventually("every worker is back", pool.is_whole)
    eventually("every ledger and every block is free", lambda: blocks_are_free(pool.url))
    eventually("the index is true", lambda: index_equals_workers(pool.url))


def leave_early(url: str) -> None:
    body = {"model": "tiny", "prompt": list(range(50, 1250)), "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_raw())


def test_a_client_that_leaves_between_the_legs_frees_both(pool: DisaggregatedPool) -> None:
    for _ in range(5):
        leave_early(pool.url)

    eventually("every block is free", lambda: blocks_are_free(pool.url))
    eventually("no transfer is kept", lambda: pool.kept_transfers() == 0)


def test_without_prefill_workers_the_decode_workers_do_it_all(pool: DisaggregatedPool) -> None:
    for name in ("p0", "p1"):
        pool.workers[name].kill()
    eventually("both are gone", lambda: sorted(ready_workers(pool.url)) == ["d0", "d1"])
    prompt = [13 + number % 4000 for number in range(1500)]

    answer = httpx.post(f"{pool.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 30})

    assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(prompt), 30, vocabulary=PLAIN)
    for name in ("p0", "p1"):
        pool.restart(name)
    eventually("every worker is back", pool.is_whole)
