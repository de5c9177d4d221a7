"""A simulated worker that pushes and a KV block manager about the same worker: three processes, one index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.kernel.wire.identifiers import Tier
from tests.consolidator.pub_engine import BLOCK
from tests.consolidator.publisher_process import Publisher
from tests.e2e.expectation import MODEL
from tests.e2e.processes import Process, eventually, metric, ready_workers, worker_rows

pytestmark = pytest.mark.e2e

LEASE_MS = 1000


def prompt(number: int, blocks: int = 8) -> list[int]:
    return [10 + (number * 97 + position * 13) % 1000 for position in range(BLOCK * blocks)]


def complete(url: str, tokens: list[int]) -> None:
    body = {"model": MODEL.name, "prompt": tokens, "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def overlap(url: str, tokens: list[int]) -> dict[str, Any]:
    """Return what the router would find of a prompt on the worker."""
    body = {"model": MODEL.name, "prompt": tokens, "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/route", json=body)
    assert answer.status_code == 200, answer.text
    (route,) = answer.json()["routes"]
    (candidate,) = route["rows"]
    return {tier: candidate[f"{tier}_overlap_blocks"] for tier in ("device", "host")}


def lines_of(url: str) -> set[str]:
    return set(httpx.get(f"{url}/v1/workers/w/blocks").text.split("\n")) - {""}


def pushed(url: str) -> set[str]:
    """Return what the worker itself holds."""
    endpoint = worker_rows(url)["w"]["http_endpoint"]
    return set(httpx.get(f"{endpoint}/blocks").text.split("\n")) - {""}


def sources(url: str) -> dict[str, str]:
    told = worker_rows(url)["w"]["stream"]
    assert isinstance(told, dict)
    assert told["trusted"], told
    return {name: source["state"] for name, source in told["sources"].items()}


def sources_file(tmp_path: Path, publisher: Publisher, **changes: object) -> Path:
    path = tmp_path / "sources.json"
    entry = {
        "worker_id": "w",
        "source": "kvbm",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        **changes,
    }
    path.write_text(json.dumps([entry]))
    return path


@contextlib.contextmanager
def a_worker(router: Process) -> Iterator[Process]:
    options = ("--worker-id", "w", "--served-model-name", MODEL.name, "--vocabulary-size", str(MODEL.vocab_size))
    with Process(
        "worker", *options, "--kv-block-size", str(BLOCK), "--consolidator", router.word("ingest"), "--speedup", "50"
    ) as worker:
        worker.wait_ready()
        eventually("the worker is ready", lambda: ready_workers(router.url) == ["w"])
        yield worker


def test_a_block_manager_beside_a_worker_is_lost_and_comes_back_and_the_index_says_so_each_time(
    tmp_path: Path,
) -> None:
    with Publisher() as publisher:
        listed = ("--pub-sources", str(sources_file(tmp_path, publisher)), "--lease-ms", str(LEASE_MS))
        publisher.store(prompt(1))  # before anybody listens
        with Process("router", "--port", "0", *listed) as router:
            router.wait_ready()
            url = router.url
            assert metric(url, "poolgrid_consolidator_source_state", source="w:kvbm", state="waiting") == 1
            with a_worker(router):
                # Together: the worker computes, the block manager offloads some of that and has more.
                complete(url, prompt(2))
                publisher.store(prompt(2))
                publisher.store(prompt(3))
                eventually("both are one", lambda: lines_of(url) == pushed(url) | publisher.lines)
                assert pushed(url)
                assert publisher.lines - pushed(url)
                assert overlap(url, prompt(2)) == {"device": 8, "host": 0}, "the fastest tier counts"
                assert overlap(url, prompt(3)) == {"device": 0, "host": 8}
                eventually("both are live", lambda: sources(url) == {"worker": "live", "kvbm": "live"})
                assert metric(url, "poolgrid_consolidator_source_blocks", source="w:kvbm") == len(publisher.lines)

                # Lost: exactly what only it said is gone, and the worker is trusted as before.
                publisher.kill()
                eventually("what only it said is gone", lambda: lines_of(url) == pushed(url))
                assert overlap(url, prompt(3)) == {"device": 0, "host": 0}
                assert overlap(url, prompt(2)) == {"device": 8, "host": 0}
                eventually("it is absent", lambda: sources(url) == {"worker": "live", "kvbm": "absent"})
                assert metric(url, "poolgrid_consolidator_source_degraded", source="w:kvbm") == 1
                complete(url, prompt(4))
                eventually("the worker is followed", lambda: lines_of(url) == pushed(url))

                # Back: what it kept on its disk, published before anybody could listen.
                with Publisher(publisher.endpoint, publisher.replay_endpoint) as again:
                    again.store(prompt(3))
                    again.store(prompt(5), Tier.DISK)
                    eventually("both are one again", lambda: lines_of(url) == pushed(url) | again.lines)
                    assert overlap(url, prompt(3)) == {"device": 0, "host": 8}
                    eventually("it is live", lambda: sources(url) == {"worker": "live", "kvbm": "live"})
            assert router.stop()[0] == 0


@pytest.mark.parametrize("outlives_worker", [False, True])
def test_a_worker_that_is_killed_takes_a_block_managers_blocks_along_unless_they_outlive_it(
    tmp_path: Path, outlives_worker: bool
) -> None:
    with Publisher() as publisher:
        path = sources_file(tmp_path, publisher, outlives_worker=outlives_worker)
        with Process("router", "--port", "0", "--pub-sources", str(path), "--lease-ms", str(LEASE_MS)) as router:
            router.wait_ready()
            url = router.url
            with a_worker(router) as worker:
                publisher.store(prompt(3))
                complete(url, prompt(2))
                eventually("both are one", lambda: lines_of(url) == pushed(url) | publisher.lines)
                worker.kill()
                eventually("the worker has left", lambda: worker_rows(url) == {})
            with a_worker(router):
                complete(url, prompt(4))
                if outlives_worker:
                    eventually("its blocks are found", lambda: lines_of(url) == pushed(url) | publisher.lines)
                    assert overlap(url, prompt(3)) == {"device": 0, "host": 8}
                else:
                    eventually("the worker is followed", lambda: lines_of(url) == pushed(url))
                    eventually("it is of a former life", lambda: sources(url) == {"worker": "live", "kvbm": "former"})
                    publisher.tell(clear=True)
                    publisher.store(prompt(5))
                    eventually("it counts again", lambda: lines_of(url) == pushed(url) | publisher.lines)
                eventually("it is live", lambda: sources(url) == {"worker": "live", "kvbm": "live"})
            assert router.stop()[0] == 0
