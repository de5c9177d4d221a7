"""What must hold in front of real vLLM servers: each check returns what it measured, and fails by assertion."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from lab.benchmarks.fleet import free_port
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes
from tests.e2e.processes import Process, eventually
from tests.real_vllm.pool import Asked, Pool
from tests.real_vllm.servers import ARGUMENTS, BLOCK_SIZE, START_TIMEOUT_S, environment, held_at

FIRST_TOKEN, LAST_TOKEN = 16, 4000
STREAMS = 32
OWN = "own"
"""The worker that starts its server itself."""
ROUNDS = 3
"""Of the comparison; a round is some minutes on a busy machine."""
LOAD = ("--turns", "4", "--isl", "500", "--osl", "12", "--concurrency", "6", "--requests", "56", "--endpoint", "chat")
"""Conversations of four questions: all of them fit into the two caches once, and not twice."""

Found = dict[str, Any]


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def _names(asked: Asked) -> set[int]:
    own = block_hashes(pack_tokens(asked.prompt), BLOCK_SIZE, hash_seed("", asked.salt))
    return set(sequence_hashes(own))


def reuse(pool: Pool) -> Found:
    """What servers report as reused is what the router predicted, while nothing is evicted."""
    for server in pool.servers:
        server.reset()
    pool.settles()
    source = random.Random(11)
    shared = [_tokens(source, BLOCK_SIZE * 4) for _ in range(4)]
    wanted = []
    for number in range(150):
        turns = shared[number % 4][: BLOCK_SIZE * source.choice((1, 2, 4))] + _tokens(source, source.randrange(8, 70))
        wanted.append((f"reuse-{number}", turns, source.choice((1, 6)), ""))
    answered = pool.ask_all(wanted, 4)
    right = 0
    for each in answered:
        right += pool.attempts(each.request_id)[0]["overlap_blocks"] * BLOCK_SIZE == each.cached_tokens
    settled = pool.settles()
    for server in pool.servers:
        expected = set().union(*(_names(each) for each in answered if each.worker == f"w{server.number}"))
        missing = expected - pool.index(server.number)
        assert not missing, f"{len(missing)} blocks of prompts are not in the index of w{server.number}"
    share = right / len(answered)
    found: Found = {
        "requests": len(answered),
        "predicted = reported": f"{share:.1%}",
        "cached tokens": sum(each.cached_tokens for each in answered),
        "untrusted workers": pool.untrusted(),
        "blocks held, missing, extra": settled,
    }
    assert share >= 0.99, found
    assert found["untrusted workers"] == 0, found
    assert all(missing == extra == 0 for _, missing, extra in settled.values()), found
    return found


def index(pool: Pool) -> Found:
    """The index is what the servers hold: prefixes, turns, salts, evictions, an emptied cache, lost frames."""
    source = random.Random(12)
    shared = [_tokens(source, BLOCK_SIZE * 6) for _ in range(6)]
    states = []
    sent = 0
    for part in range(5):
        wanted = []
        for _ in range(100):
            kind = source.random()
            if kind < 0.2:
                prompt = _tokens(source, source.randrange(40, 900))  # evicts
            else:
                prompt = source.choice(shared)[: source.randrange(20, BLOCK_SIZE * 6)] + _tokens(source, 40)
            salt = f"tenant-{source.randrange(2)}" if kind > 0.7 else ""
            wanted.append((f"index-{sent}", prompt, source.randrange(1, 40), salt))
            sent += 1
        pool.ask_all(wanted, 8)
        if part == 2:
            for server in pool.servers:
                server.reset()
        states.append(pool.settles())
    found: Found = {
        "requests": sent,
        "blocks held, missing, extra, after each 100": states,
        "frames lost": sum(each.lost for each in pool.wires),
        "frames passed": sum(each.passed for each in pool.wires),
        "untrusted workers": pool.untrusted(),
    }
    assert all(missing == extra == 0 for state in states for _, missing, extra in state.values()), found
    assert found["frames lost"] > 0, found
    assert found["untrusted workers"] == 0, found
    return found


def client(pool: Pool) -> Found:
    """OpenAI's own client: chat, tools, structured output by the engine's grammar backend, log probabilities, n."""
    with openai.OpenAI(base_url=f"{pool.router}/v1", api_key="none", timeout=300) as asking:
        chat = asking.chat.completions
        hello: Any = [{"role": "user", "content": "Hello"}]
        plain = chat.create(model="tiny", messages=hello, max_tokens=8, temperature=0)
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 8
        streamed = "".join(
            part.choices[0].delta.content or ""
            for part in chat.create(model="tiny", messages=hello, max_tokens=8, temperature=0, stream=True)
            if part.choices
        )
        assert streamed == plain.choices[0].message.content
        several = chat.create(model="tiny", messages=hello, max_tokens=8, n=3, seed=1, temperature=1.0)
        assert len(several.choices) == 3
        probable = chat.create(model="tiny", messages=hello, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0)
        assert probable.choices[0].logprobs is not None
        rows = probable.choices[0].logprobs.content or []
        assert len(rows) == 5
        assert all(each.top_logprobs[0].logprob == each.logprob and len(each.top_logprobs) == 3 for each in rows)
        schema: Any = {
            "type": "json_schema",
            "json_schema": {
                "name": "place",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "far": {"type": "boolean"}},
                    "required": ["city", "far"],
                    "additionalProperties": False,
                },
            },
        }
        guided = chat.create(model="tiny", messages=hello, max_tokens=60, response_format=schema, temperature=0)
        place = json.loads(guided.choices[0].message.content or "")
        assert place["city"] in ("Rome", "Oslo")
        tool: Any = {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
        chosen: Any = {"type": "function", "function": {"name": "weather"}}
        called = chat.create(
            model="tiny", messages=hello, max_tokens=80, tools=[tool], tool_choice=chosen, temperature=0
        )
        calls = called.choices[0].message.tool_calls or []
        assert len(calls) == 1, called
        arguments = json.loads(getattr(calls[0], "function").arguments)  # noqa: B009 - a union of two kinds of calls
        assert arguments["city"] in ("Rome", "Oslo")
        return {"structured": place, "tool call": arguments, "logprob of the first token": rows[0].logprob}


def kill(pool: Pool) -> Found:
    """Kill -9 of one server under streams: every client gets a whole answer, the undisturbed one."""
    source = random.Random(13)
    wanted = [(f"kill-{number}", _tokens(source, 60), 96, "") for number in range(STREAMS)]
    undisturbed = [each.text for each in pool.ask_all(wanted, STREAMS)]
    victim = pool.servers[0]
    running = threading.Event()

    def strike() -> None:
        def under_way() -> bool:
            row = next(
                each
                for each in httpx.get(f"{pool.router}/v1/workers").json()["data"]
                if each["worker_id"] == f"w{victim.number}"
            )
            return bool(row["running_requests"] >= STREAMS // 4)

        eventually("streams run on the server that is killed", under_way)
        victim.kill()
        running.set()

    striking = threading.Thread(target=strike)
    striking.start()
    again = [(f"again-{name}", prompt, count, salt) for name, prompt, count, salt in wanted]
    disturbed = pool.ask_all(again, STREAMS)
    striking.join()
    assert running.is_set(), "the server was killed amid the streams"
    same = sum(one == other.text for one, other in zip(undisturbed, disturbed, strict=True))
    moved = sum(len(pool.attempts(each.request_id)) > 1 for each in disturbed)
    victim.start()
    victim.wait()
    pool.until_ready(pool.router, len(pool.servers))
    more = [(f"back-{number}", _tokens(source, 100), 8, "") for number in range(40)]
    pool.ask_all(more, 8)
    settled = pool.settles()
    found: Found = {
        "streams": STREAMS,
        "complete": len(disturbed),
        "moved": moved,
        "text as undisturbed": f"{same / STREAMS:.1%}",
        "after the restart: blocks held, missing, extra": settled,
    }
    assert all(missing == extra == 0 for _, missing, extra in settled.values()), found
    return found


def started(pool: Pool) -> Found:
    """A server that a worker starts itself: exact, back after kill -9, and gone with its worker."""
    source = random.Random(14)
    with tempfile.TemporaryDirectory(prefix="poolgrid-started-") as directory:
        words = (
            *("worker", "--engine", "vllm", "--model-path", str(pool.model), "--worker-id", OWN),
            *("--engine-command", f"nice -n 10 {pool.vllm / 'bin' / 'vllm'} serve", "--served-model-name", "tiny"),
            *("--log-dir", directory, "--consolidator", pool.ingest, "--", *ARGUMENTS),
        )
        log = Path(directory, "worker.log")
        with Process(*words, log=log, environment=environment(pool.vllm)) as worker:
            began = time.monotonic()
            worker.wait_ready(START_TIMEOUT_S)
            pool.until_ready(pool.router, len(pool.servers) + 1)
            start_s = time.monotonic() - began
            first = _own_life(pool, worker, source, "started")
            group = worker.descendants()
            (server,) = (each for each in group if each.cmdline()[1:3] == [str(pool.vllm / "bin" / "vllm"), "serve"])
            server.kill()
            eventually("the worker has left the pool", lambda: pool.ready(pool.router) == len(pool.servers))
            pool.until_ready(pool.router, len(pool.servers) + 1)
            second = _own_life(pool, worker, source, "again")
            process = httpx.get(f"{worker.url}/health").json()["engine_server"]["process"]
            group += worker.descendants()
            status, _ = worker.stop()
            left = [each for each in group if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    found: Found = {
        "ready after s": round(start_s),
        "requests, blocks held, missing, extra": first,
        "after kill -9 of the server": second,
        "restarts": process["restarts"],
        "status of the worker, processes left": (status, len(left)),
    }
    assert process["restarts"] == 1, found
    assert (status, left) == (0, []), found
    assert all(missing == extra == 0 for _, _, missing, extra in (first, second)), found
    assert all(requests for requests, *_ in (first, second)), found
    return found


def _own_life(pool: Pool, worker: Process, source: random.Random, name: str) -> tuple[int, int, int, int]:
    """Ask for some; return how many requests the worker's own server had, and how its index compares."""
    wanted = [(f"{name}-{number}", _tokens(source, source.randrange(40, 200)), 8, "") for number in range(60)]
    answered = [each for each in pool.ask_all(wanted, 8) if each.worker == OWN]
    events = httpx.get(f"{worker.url}/health").json()["engine_server"]["events"][0]
    found = (0, 0, 0)

    def equal() -> bool:
        nonlocal found
        truth, index = held_at(events["replay_endpoint"]), pool.believed(OWN)
        found = (len(truth), len(truth - index), len(index - truth))
        return bool(truth) and truth == index

    eventually("the index is what the server holds", equal)
    return len(answered), *found


def load(pool: Pool, peers: str) -> Found:
    """Conversations: what is reused and how long the first token takes, by cache, in turns, and by two peers."""
    found: Found = {}
    skipped: dict[str, str] = {}
    with _peers(pool, peers, skipped) as routers:
        endpoints = {"poolgrid kv": pool.router, "poolgrid round robin": pool.turns, **routers}
        runs: dict[str, list[Found]] = {name: [] for name in endpoints}
        for number in range(ROUNDS):
            for name in sorted(endpoints, reverse=bool(number % 2)):
                for server in pool.servers:
                    server.reset()
                runs[name].append(_bench(endpoints[name], number))
    for name, rounds in runs.items():
        found[name] = {
            "reused": f"{statistics.mean(each['reused'] for each in rounds):.1%}",
            "TTFT mean ms by round": [round(each["ttft_ms"]) for each in rounds],
            "errors": sum(each["errors"] for each in rounds),
        }
    # Of each round with itself: between rounds the machine is not the same.
    found["TTFT against poolgrid kv, median of rounds"] = {
        name: round(
            statistics.median(
                each["ttft_ms"] / base["ttft_ms"] for each, base in zip(rounds, runs["poolgrid kv"], strict=True)
            ),
            2,
        )
        for name, rounds in runs.items()
        if name != "poolgrid kv"
    }
    if skipped:
        found["skipped"] = skipped
    assert not found["poolgrid kv"]["errors"], found
    mine, turns = (
        statistics.mean(each["reused"] for each in runs[name]) for name in ("poolgrid kv", "poolgrid round robin")
    )
    assert mine > turns, found
    return found


def _bench(url: str, seed: int) -> Found:
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "poolgrid",
                "bench",
                "--url",
                url,
                "--model",
                "tiny",
                "--seed",
                str(seed),
                "--json",
            ),
            *("--start-timeout-ms", "0", *LOAD),
        ],
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return _measured(json.loads(done.stdout))


def _measured(report: Any) -> Found:
    return {"reused": report["cached_token_ratio"], "ttft_ms": report["ttft_ms"]["mean"], "errors": report["errors"]}


@contextmanager
def _peers(pool: Pool, python: str, skipped: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start the peers' routers in front of the same servers, as far as they can be."""
    commands = {
        "vllm-router": ("vllm_router.launch_router",),
        "smg": ("smg", "launch"),
    }
    urls = [server.url for server in pool.servers]
    started: dict[str, str] = {}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, module in commands.items():
            if not python:
                skipped[name] = "POOLGRID_PEERS names no Python that has it"
                continue
            port = free_port()
            processes.append(
                subprocess.Popen(
                    [
                        *(python, "-m", *module, "--host", "127.0.0.1", "--port", str(port)),
                        *("--policy", "cache_aware", "--log-level", "error"),
                        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
                        *("--worker-urls", *urls),
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            url = f"http://127.0.0.1:{port}"
            try:
                eventually(f"{name} answers", lambda url=url: _answers(url), 120)  # type: ignore[misc]
            except AssertionError:
                skipped[name] = "it did not answer within 120 s"
            else:
                started[name] = url
        yield started
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
