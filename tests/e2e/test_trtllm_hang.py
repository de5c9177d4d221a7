"""A worker whose TensorRT-LLM stands still: nobody's client sees it, and it comes back when its engine does.

The engine's process is the contract fake's: while a file is there it is stopped, as by a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

import httpx
import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from tests.e2e.expectation import PLAIN, expected_text
from tests.e2e.processes import Process, eventually, worker_rows
from tests.fakes import FAKES_PATH

pytestmark = pytest.mark.e2e

COMMON = ("worker", "--engine", "trtllm", "--model-path", "tiny", "--kv-block-size", "16", "--max-batch-size", "64")
TOKENS = 400
PROMPT = [5 + at for at in range(64)]


def states(url: str) -> dict[str, object]:
    return {name: row["state"] for name, row in worker_rows(url).items()}


def believed_and_held(router: Process, name: str, worker: Process) -> bool:
    believed = httpx.get(f"{router.url}/v1/workers/{name}/blocks").text
    return bool(believed) and believed == httpx.get(f"{worker.url}/blocks").text


class Watch:
    """Asks a worker for its health until told to stop; notes what it says, and the longest answer."""

    def __init__(self, url: str) -> None:
        self.statuses: list[int] = []
        self.longest_s = 0.0
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client() as client:
            while not self._over.wait(0.01):
                answer = client.get(f"{self._url}/health")
                self.statuses.append(answer.status_code)
                self.longest_s = max(self.longest_s, answer.elapsed.total_seconds())

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def test_a_stopped_engine_costs_no_client_anything_and_its_worker_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")]))
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(Process("router", "--port", "0")).wait_ready()
        workers = {}
        for name in ("a", "b"):
            behaviour = {"vocabulary_size": 4096, "speedup": 1.0, "stop_file": str(tmp_path / name)}
            monkeypatch.setenv("TRTLLM_FAKE", json.dumps(behaviour))
            ingest = ("--consolidator", router.word("ingest"))
            workers[name] = stack.enter_context(Process(*COMMON, *ingest, "--worker-id", name))
        for worker in workers.values():
            worker.wait_ready()
        eventually("both are there", lambda: states(router.url) == dict.fromkeys("ab", "ready"))
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            name = answer.headers["x-poolgrid-worker"].partition("/")[0]
            other = "b" if name == "a" else "a"
            watch = Watch(workers[name].url)
            eventually("it is asked", lambda: bool(watch.statuses))
            (tmp_path / name).touch()
            chunks = [chunk for chunk in [first, *lines] if chunk.startswith("data: {")]
        assert "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks) == expected_text(
            pack_tokens(PROMPT), TOKENS, vocabulary=PLAIN
        )
        eventually("it has left", lambda: states(router.url) == {other: "ready"})
        (tmp_path / name).unlink()
        eventually("it is back", lambda: states(router.url) == dict.fromkeys("ab", "ready"))
        watch.stop()
        assert set(watch.statuses) == {200, 503}, "it answers all the while"
        eventually("its index is its blocks", lambda: believed_and_held(router, name, workers[name]))
