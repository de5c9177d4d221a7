"""An engine server that follows vLLM's published protocol: HTTP, a cache of blocks, a publisher, a replay socket.

What it stores it really reuses, and it tells of that alone; ``habits`` make it tell in another way, or not at all.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

from poolgrid.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes

BLOCK = 8
BLOCKS = 4096
END = struct.pack(">q", -1)


@dataclass(frozen=True)
class Habits:
    publishes: bool = True
    connects: bool = False
    """To an endpoint without a ``*``, as vLLM does."""
    replays: bool = True
    says_block_size: int = BLOCK
    says_cached_tokens: bool = True
    lists_sources: bool = True
    transfers: str = ""
    """Lines of its metrics about KV that moved."""
    swapped: bool = False
    """The endpoint that it names is its replay socket's."""


@dataclass
class EngineServer:
    """One server; ``url`` once it runs."""

    habits: Habits
    endpoint: str = ""
    replay_endpoint: str = ""
    url: str = ""
    held: set[int] = field(default_factory=set)
    published: list[bytes] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    publisher: Any = None

    def answer(self, body: dict[str, Any]) -> tuple[list[int], int]:
        """Compute a request: return the output and how many tokens were cached."""
        prompt, wanted = body["prompt"], body.get("max_tokens", 1)
        salt = body.get("cache_salt", "")
        output = [1000 + (sum(prompt) + at) % 1000 for at in range(wanted)]
        tokens = [*prompt, *output[:-1]]
        names = sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK, hash_seed("", salt)))
        with self.lock:
            reusable = names[: (len(prompt) - 1) // BLOCK]
            cached = next((at for at, name in enumerate(reusable) if name not in self.held), len(reusable))
            new = next((at for at, name in enumerate(names) if name not in self.held), len(names))
            if new < len(names):
                self.held.update(names[new:])
                self._publish(names, new, tokens, salt)
        return output, cached * BLOCK

    def _publish(self, names: list[int], new: int, tokens: list[int], salt: str) -> None:
        keys = [[salt] if salt and not at else None for at in range(new, len(names))]
        event = {
            "type": "BlockStored",
            "block_hashes": names[new:],
            "parent_block_hash": names[new - 1] if new else None,
            "token_ids": tokens[new * BLOCK : len(names) * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        payload = msgspec.msgpack.encode([1.5, [event], 0])
        self.published.append(payload)
        if self.publisher is not None:
            self.publisher.send_multipart([b"", struct.pack(">Q", len(self.published) - 1), payload])

    def sources(self) -> list[dict[str, Any]]:
        endpoint = self.replay_endpoint if self.habits.swapped else self.endpoint
        replay = self.replay_endpoint if self.habits.replays else None
        return [{"data_parallel_rank": 0, "endpoint": endpoint, "replay_endpoint": replay, "topic": ""}]


def free_port(context: zmq.Context[Any]) -> int:
    with context.socket(zmq.PUB) as socket:
        port: int = socket.bind_to_random_port("tcp://127.0.0.1")
        return port


@contextmanager
def engine_server(habits: Habits) -> Iterator[EngineServer]:
    """Run a server until the end of the block."""
    server = EngineServer(habits)
    context: zmq.Context[Any] = zmq.Context()
    context.linger = 0
    with context, context.socket(zmq.PUB) as publisher, context.socket(zmq.ROUTER) as router:
        if habits.publishes and habits.connects:
            server.endpoint = f"tcp://127.0.0.1:{free_port(context)}"
            publisher.connect(server.endpoint)
        else:
            server.endpoint = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
        server.replay_endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        server.publisher = publisher if habits.publishes else None
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(server))
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        ended = threading.Event()
        threads = [
            threading.Thread(target=http.serve_forever, args=(0.05,)),
            threading.Thread(target=answer_replays, args=(server, router, ended)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield server
        finally:
            ended.set()
            http.shutdown()
            http.server_close()
            for thread in threads:
                thread.join()


def answer_replays(server: EngineServer, router: zmq.Socket[bytes], ended: threading.Event) -> None:
    while not ended.is_set():
        if not router.poll(50):
            continue
        peer, _, start = router.recv_multipart()
        first = struct.unpack(">Q", start)[0]
        with server.lock:
            kept = list(enumerate(server.published))
        for sequence, payload in kept[first:]:
            router.send_multipart([peer, b"", struct.pack(">Q", sequence), payload])
        router.send_multipart([peer, b"", END, b""])


def handler_of(server: EngineServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._say({"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]})
            elif self.path == "/version":
                self._say({"version": "9.9"})
            elif self.path == "/kv_event_sources" and server.habits.lists_sources:
                self._say(server.sources() if server.habits.publishes else [])
            elif self.path == "/metrics":
                labels = f'block_size="{server.habits.says_block_size}",num_gpu_blocks="{BLOCKS}"'
                self._send(
                    200, f"vllm:cache_config_info{{{labels}}} 1.0\n{server.habits.transfers}".encode(), "text/plain"
                )
            else:
                self._say({"detail": "Not Found"}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            output, cached = server.answer(body)
            details = {"cached_tokens": cached} if server.habits.says_cached_tokens else None
            usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(output)}
            if not body.get("stream"):
                choice = {"index": 0, "text": "", "token_ids": output, "finish_reason": "length"}
                self._say({"choices": [choice], "usage": {**usage, "prompt_tokens_details": details}})
                return
            chunks: list[dict[str, Any]] = [
                {"choices": [{"index": 0, "text": "x"}], "usage": {**usage, "completion_tokens": at + 1}}
                for at in range(len(output))
            ]
            lines = [*(f"data: {json.dumps(each)}\n\n" for each in chunks), "data: [DONE]\n\n"]
            self._send(200, "".join(lines).encode(), "text/event-stream")

        def _say(self, what: Any, status: int = 200) -> None:
            self._send(status, json.dumps(what).encode(), "application/json")

        def _send(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass  # pytest shows what matters

    return Handler
