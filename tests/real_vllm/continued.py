"""Streams over one hop and two, one of two vLLM servers being killed: each is the undisturbed one, or has failed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.fleet import pools
from tests.e2e.processes import Process, eventually
from tests.real_vllm.servers import MODEL, START_TIMEOUT_S, VllmServer
from tests.real_vllm.transparency import GENERATING

STREAMS = 24
OUTPUT_TOKENS = 160
MOMENTS: dict[str, float] = {"at once": 0.0, "early": 0.05, "a quarter": 0.25, "half": 0.5, "late": 0.9}
"""Shares of all events that clients have got when the server is killed."""

IN_ORDER = "half, by SIGTERM"
ANSWER_TIMEOUT_S = 300

POOL = "all"
ONE_POOL: dict[str, Any] = {
    "version": 1,
    "mode": "aggregated",
    "aggregated": {
        "pools": [{"name": POOL, "priority": 0}],
        "isl_min": 0,
        "isl_max": 2000,
        "isl_resolution": 1,
        "ttft_min_ms": 0,
        "ttft_max_ms": 4000,
        "ttft_resolution": 1,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "mapping": [[[POOL]]],
    },
    "defaults": {"ttft_target_ms": 3000, "itl_target_ms": 50},
}
"""The pool-grid document of the global router: what it adds is a second hop."""

TOOL = {
    "name": "look_up",
    "description": "Looks something up",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "maxLength": 60}, "count": {"type": "integer"}},
        "required": ["key", "count"],
    },
}
NO_THINKING = {"include_reasoning": False}
"""Without it the tiny model thinks to its last token."""

CHOSEN = {"type": "function", "function": {"name": TOOL["name"]}}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each stream: text, reasoning and tool calls in each API that has them."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(STREAMS):
        text = f"{number}: " + " ".join(f"word {number * at % 97}" for at in range(40))
        messages = [{"role": "user", "content": text}]
        base = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        chat = {**base, "messages": messages}
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", chat),
            (
                "/v1/chat/completions",
                {**chat, "tools": [{"type": "function", "function": TOOL}], "tool_choice": CHOSEN, **NO_THINKING},
            ),
            ("/v1/chat/completions", {**chat, "logprobs": True, "return_token_ids": True, "stop": ["qqq"]}),
            ("/v1/chat/completions", {**chat, "n": 2, "temperature": 1, "seed": number, "include_reasoning": True}),
            ("/v1/completions", {**base, "prompt": text, "stream_options": {"include_usage": True}}),
            ("/v1/completions", {**base, "prompt": text, "temperature": 1, "stream_options": {"include_usage": True}}),
            ("/v1/messages", {**base, "messages": messages}),
            ("/v1/responses", {"input": text, "max_output_tokens": OUTPUT_TOKENS, **base}),
        ]
        found.append(kinds[number % len(kinds)])
    return found


class Stream:
    """One client's stream."""

    def __init__(self) -> None:
        self.data = b""
        self.is_whole = False

    def read(self, url: str, path: str, body: dict[str, Any], on_events: Callable[[int], None]) -> None:
        try:
            with httpx.stream("POST", url + path, json=body, timeout=ANSWER_TIMEOUT_S) as answer:
                for piece in answer.iter_raw():
                    self.data += piece
                    on_events(piece.count(b"\n\n"))  # a hop more may bring several at once
            self.is_whole = answer.status_code == 200
        except httpx.TransportError:
            pass

    @property
    def error(self) -> str:
        """The code of the error that it ended with."""
        last = self.data.rstrip(b"\n").rpartition(b"\n\n")[2]
        if not last.startswith(b"event: error\ndata: "):
            return ""
        return str(json.loads(last.partition(b"data: ")[2])["error"]["code"])

    def content(self) -> dict[str, Any]:
        """All texts of the answer by their places, and how it ended."""
        found: dict[str, Any] = {}
        for event in self.data.split(b"\n\n"):
            data = event.partition(b"data: ")[2]
            if not data or data == b"[DONE]":
                continue
            value = json.loads(data)
            _gather(value, value.get("type", ""), found)
        return found


LEFT_OUT = frozenset(
    (
        *("id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number", "logprob", "model"),
        *(
            "object",
            "cache_creation_input_tokens",
            "signature",
            "request_id",
            "top_logprobs",
            "cached_tokens",
            "cache_read_input_tokens",
            "input_tokens",
        ),
        *("created_cache_tokens", "input_tokens_details", "prompt_tokens_details", "system_fingerprint"),
    )
)
"""What differs from server to server, or by what its cache holds."""


def _gather(value: Any, path: str, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        index = value.get("index", value.get("output_index", ""))
        for name, each in value.items():
            if name not in LEFT_OUT and name not in ("type", "index", "role"):
                _gather(each, f"{path}/{index}{name}", found)
    elif isinstance(value, list):
        for each in value:
            _gather(each, path, found)
    elif isinstance(value, str):
        found[path] = found.get(path, "") + value
    elif value is not None and "index" not in path:
        found.setdefault(path, []).append(value)


def continued(vllm: Path, model: Path, directory: Path, moments: dict[str, float] | None = None) -> dict[str, Any]:
    """streams whose server is killed are the undisturbed ones, or end with an error; sampled text has its length"""
    servers = [VllmServer(number, vllm, model, directory, GENERATING) for number in (70, 71)]
    results: dict[str, Any] = {}
    try:
        for each in servers:
            each.start()
        for each in servers:
            each.wait()
        document = directory / "pools.json"
        document.write_text(json.dumps(ONE_POOL))
        fronts = {
            "router": [word for each in servers for word in ("--engine-url", each.url)],
            "global router": [
                *("--pools", str(document)),
                *(word for each in servers for word in ("--engine-url", f"{POOL}={each.url}")),
            ],
        }
        for front, words in fronts.items():
            with Process("up", *words, "--port", "0", "--log-level", "error") as pool:
                url = pool.wait_ready(START_TIMEOUT_S).url
                chooser = next(iter(pools(url).values()))["url"] if front == "global router" else url
                undisturbed = _streams(url, lambda _: None)
                total = sum(each.data.count(b"\n\n") for each in undisturbed)
                assert all(each.is_whole and not each.error for each in undisturbed), "undisturbed streams are whole"
                for name, share in (moments or {**MOMENTS, IN_ORDER: 0.5}).items():
                    _both_ready(chooser)
                    found = _killed(url, servers[0], undisturbed, max(1, int(share * total)), name == IN_ORDER)
                    results[f"{front}: {name}"] = found
                    servers[0].start()
                    servers[0].wait()
    finally:
        for each in servers:
            each.kill()
    wrong = {name: each["wrong"] for name, each in results.items() if each["wrong"]}
    assert not wrong, f"{wrong} of {results}"
    return results


def _comparable(number: int, stream: Stream) -> dict[str, Any]:
    """What must be equal of a stream: of a sampled text its counts and its end."""
    content, body = stream.content(), requests()[number][1]
    if body["temperature"] and "seed" not in body:
        content.pop("/choices/0text")
    return content


def _both_ready(url: str) -> None:
    def is_ready() -> bool:
        states = [row["state"] for row in httpx.get(f"{url}/v1/workers").json()["data"]]
        return states == ["ready", "ready"]

    eventually("both servers take requests", is_ready, START_TIMEOUT_S)


def _streams(url: str, on_event: Callable[[int], None]) -> list[Stream]:
    """Read all streams at the same time; ``on_event`` gets the number of events that have come."""
    lock, count = threading.Lock(), [0]

    def counted(events: int) -> None:
        with lock:
            count[0] += events
        on_event(count[0])

    streams = [Stream() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        for stream, (path, body) in zip(streams, requests(), strict=True):
            threads.submit(stream.read, url, path, body, counted)
    return streams


def _killed(url: str, victim: VllmServer, undisturbed: list[Stream], at: int, in_order: bool) -> dict[str, Any]:
    """Kill a server once its clients have got so many events."""
    reached, killed = threading.Event(), threading.Event()

    def strike() -> None:
        if not reached.wait(ANSWER_TIMEOUT_S):
            return
        if in_order:
            victim.terminate()
        victim.kill()
        killed.set()

    striking = threading.Thread(target=strike)
    striking.start()
    streams = _streams(url, lambda count: reached.set() if count >= at else None)
    striking.join()
    assert killed.is_set(), f"{at} events came before the end, at which the server is killed"
    found: dict[str, Any] = {"complete and equal": 0, "ended by the error": 0, "wrong": []}
    for number, (stream, whole) in enumerate(zip(streams, undisturbed, strict=True)):
        if stream.is_whole and _comparable(number, stream) == _comparable(number, whole):
            found["complete and equal"] += 1
        elif stream.error == "server_lost" and not stream.is_whole:
            found["ended by the error"] += 1
        else:
            mine, own = stream.content(), whole.content()
            where = [name for name in {*mine, *own} if mine.get(name) != own.get(name)]
            found["wrong"].append((number, requests()[number][0], stream.is_whole, where[:3], stream.data[-200:]))
    return found
