"""What is promised of hybrid models, against what a real vLLM reuses: sliding windows, and states at checkpoints."""

from __future__ import annotations

import random
import select
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.kv_events.pub import decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.wire.events import JournalRecord, WorkerJoined
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from tests.real_vllm.servers import BLOCK_SIZE, MODEL, VllmServer, make_model
from tests.router.fleet_builder import make_card

REQUESTS = 1000
QUIET_MS = 60
"""Without a frame for so long, all that a server did is known: it publishes after each step."""

WORKER = WorkerKey(WorkerId("hybrid"))

GEMMA3 = """
import sys, torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
torch.manual_seed(7)
config = Gemma3TextConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, sliding_window=96,
    query_pre_attn_scalar=64, bos_token_id=None, eos_token_id=[2, 0], pad_token_id=0,
    layer_types=["sliding_attention"] * 3 + ["full_attention"])
Gemma3ForCausalLM(config).save_pretrained(sys.argv[1])
"""
"""Three layers with a window of 96 tokens, one of full attention."""

LFM2 = """
import sys, torch
from transformers import Lfm2Config, Lfm2ForCausalLM
torch.manual_seed(7)
config = Lfm2Config(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=[2, 0],
    pad_token_id=0, conv_dim=256, block_dim=256, layer_types=["conv", "full_attention", "conv", "full_attention"])
Lfm2ForCausalLM(config).save_pretrained(sys.argv[1])
"""
"""Two layers with a state (a short convolution), two of full attention."""

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "window": (GEMMA3, ("--num-gpu-blocks-override", "360")),
    "state": (LFM2, ("--num-gpu-blocks-override", "360", "--mamba-cache-mode", "align")),
}
"""How each model is made, and the arguments of its server: as few blocks as make it evict."""

Found = dict[str, Any]


class FrameReader:
    """The frames of one publisher, as a consolidator and a router take them, without processes between."""

    def __init__(self, block_size: int = BLOCK_SIZE, drafts: bool = False) -> None:
        self._block_size = block_size
        self._translator = EngineTranslator(block_size, 100_000, drafts=drafts)
        self._projection = Projection(PrefixIndex(), LoadLedger())
        self.frames: list[bytes] = []
        self._apply([WorkerJoined(make_card())])

    def _apply(self, events: list[Any]) -> None:
        record = JournalRecord(self._projection.next_offset, *WORKER, 1, 0, 0, 0, events)
        self._projection.apply(record, 0.0)

    def take(self, payload: bytes) -> None:
        self.frames.append(payload)
        self._apply(self._translator.translate(decode_pub(payload).events))

    def promised(self, prompt: list[int]) -> tuple[int, int]:
        """The tokens that are promised of a prompt, and those that full attention alone would promise."""
        size = self._block_size
        path = sequence_hashes(block_hashes(pack_tokens(prompt), size))
        index, deepest = self._projection.index, (len(prompt) - 1) // size
        groups = index.groups.reported
        count = index.groups.following_tokens
        found = index.find(path, deepest, FollowingTokens.of(pack_tokens(prompt), size, count) if count else None)
        index.groups.reported = {}
        alone = index.find(path)
        index.groups.reported = groups
        return tuple(size * min(deepest, depths[0][0] if depths else 0) for depths in (found, alone))  # type: ignore[return-value]

    @property
    def groups(self) -> Any:
        return [msgspec.to_builtins(each) for each in self._projection.index.groups.reported]


class Follower(FrameReader):
    """A publisher that is followed while it serves."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(BLOCK_SIZE)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def settle(self) -> None:
        """Take in all that was published."""
        while self._socket.poll(QUIET_MS):
            _, number, payload = self._socket.recv_multipart()
            assert struct.unpack(">Q", number)[0] == len(self.frames), "no frame is lost"
            self.take(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def serving(kind: str, vllm: Path, directory: Path, number: int) -> Iterator[VllmServer]:
    """Start a server of a kind of model, and end it."""
    source, arguments = KINDS[kind]
    model = directory / f"model-{kind}"
    model.mkdir(exist_ok=True)
    make_model(vllm, model, source)
    server = VllmServer(number, vllm, model, directory, arguments)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def conversations(source: random.Random, requests: int) -> Iterator[tuple[list[int], int, list[int]]]:
    """Yield prompts, the tokens to answer with, and the place for the answer: turns of conversations that share their
    first blocks, branch, and come back after others have taken their place."""

    def tokens(count: int) -> list[int]:
        return [source.randrange(16, 4000) for _ in range(count)]

    shared = [tokens(BLOCK_SIZE * 8) for _ in range(3)]
    open_ones: list[list[int]] = []
    for _ in range(requests):
        if len(open_ones) < 4 or source.random() < 0.25:
            begun = source.choice(shared)[: source.randrange(0, BLOCK_SIZE * 8)]
            open_ones.append(begun + tokens(source.randrange(20, 300)))
        else:
            # The latest mostly; an answer may be edited, and a prompt may be sent again.
            at = max(source.randrange(len(open_ones)), source.randrange(len(open_ones)))
            chosen = open_ones.pop(at)
            kind = source.random()
            if kind < 0.15:
                chosen = chosen[: source.randrange(1, len(chosen) + 1)] + tokens(30)
            elif kind < 0.9:
                chosen = chosen + tokens(source.randrange(1, 120))
            open_ones.append(chosen)
        if len(open_ones[-1]) > 1500:
            open_ones.pop()
            open_ones.append(source.choice(shared) + tokens(10))
        if len(open_ones) > 24:
            open_ones.pop(0)
        prompt = list(open_ones[-1])
        yield prompt, source.randrange(1, 40), open_ones[-1]


def measure(server: VllmServer, requests: int = REQUESTS, record: Path | None = None) -> Found:
    """Send requests one after the other; return how often what was promised is what was reused, within a block."""
    follower = Follower(server.endpoint)
    select.select([], [], [], 1.0)
    asked: list[tuple[list[int], int, int]] = []
    right = alone_right = over = alone_over = reused = 0
    began = time.monotonic()
    worst: list[tuple[int, int, int]] = []
    try:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            for prompt, count, conversation in conversations(random.Random(16), requests):
                follower.settle()
                frames, (promised, alone) = len(follower.frames), follower.promised(prompt)
                body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
                usage = answer["usage"]["prompt_tokens_details"]
                cached = (usage or {}).get("cached_tokens") or 0
                conversation.extend(answer["choices"][0]["token_ids"])
                asked.append((prompt, cached, frames))
                reused += cached
                right += abs(promised - cached) <= BLOCK_SIZE
                alone_right += abs(alone - cached) <= BLOCK_SIZE
                over += max(0, promised - cached)
                alone_over += max(0, alone - cached)
                if abs(promised - cached) > BLOCK_SIZE:
                    worst.append((len(asked), promised, cached))
        follower.settle()
    finally:
        follower.close()
    removed = sum(frame.count(b"BlockRemoved") for frame in follower.frames)
    if record is not None:
        record.write_bytes(msgspec.msgpack.encode([follower.frames, asked]))
    prompts = sum(len(prompt) for prompt, *_ in asked)
    return {
        "requests": requests,
        "prompt tokens": prompts,
        "reused tokens": reused,
        "groups": follower.groups,
        "blocks removed": removed,
        "promised = reported within a block": f"{right / requests:.2%}",
        "by full attention alone": f"{alone_right / requests:.2%}",
        "tokens promised too many": over,
        "by full attention alone, too many": alone_over,
        "first that differ": worst[:5],
        "seconds": round(time.monotonic() - began),
    }


def hybrid(vllm: Path, directory: Path) -> Found:
    """Models with a sliding window and with a state: what is promised is what the server reuses."""
    found: Found = {}
    for number, kind in enumerate(KINDS, 6):
        with serving(kind, vllm, directory, number) as server:
            found[kind] = measure(server)
        assert float(found[kind]["promised = reported within a block"].rstrip("%")) >= 99, found
        assert found[kind]["blocks removed"] > 0, found
    return found
