"""Real vLLM servers of a tiny model: made, started, killed, and asked directly what their caches hold."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from lab.benchmarks.fleet import free_port
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes
from poolgrid.server.frontend.models import TINY_MODEL_PATH

START_TIMEOUT_S = 600.0
"""A minute on an idle machine; imports alone take five on a busy one."""

BLOCK_SIZE = 32
BLOCKS = 600
MODEL = "tiny"

MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(7)
config = LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=[2, 0])
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


ARGUMENTS = (
    *("--max-model-len", "4096", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "32"),
    *("--num-gpu-blocks-override", str(BLOCKS), "--dtype", "float32", "--enforce-eager"),
    # A model of random weights would fill its answer with the blanks that JSON allows.
    *("--structured-outputs-config", '{"disable_any_whitespace":true,"backend":"xgrammar"}'),
)
"""Of every server, whoever starts it."""


def environment(vllm: Path) -> dict[str, str]:
    """What every server has in its environment."""
    return {**ENVIRONMENT, "PATH": f"{vllm / 'bin'}:{os.environ['PATH']}"}


def make_model(vllm: Path, directory: Path, source: str = MAKE_MODEL) -> Path:
    """Make a tiny model: random weights in float32 beside the tokenizer of the built-in model."""
    for path in TINY_MODEL_PATH.iterdir():
        shutil.copy(path, directory)
    subprocess.run(
        [str(vllm / "bin" / "python"), "-c", source, str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return directory


class VllmServer:
    """One server; its ports stay its own over restarts."""

    def __init__(
        self,
        number: int,
        vllm: Path,
        model: Path,
        logs: Path,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``arguments`` and ``variables`` are of this server besides."""
        self.number = number
        self._arguments = arguments
        self._variables = variables or {}
        self._vllm = vllm
        self._model = model
        self._log = logs / f"vllm-{number}.log"
        self.port, self.pub, self.replay = free_port(), free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.pub}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.replay}"

    def start(self) -> None:
        """Begin to start; ``wait`` waits until it serves."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.pub}",
            "replay_endpoint": f"tcp://*:{self.replay}",
            "buffer_steps": 100_000,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("nice", "-n", "10", str(self._vllm / "bin" / "vllm"), "serve", str(self._model)),
                    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
                    *("--kv-events-config", json.dumps(events)),
                    *ARGUMENTS,
                    *self._arguments,
                ],
                env={**os.environ, **environment(self._vllm), **self._variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it serves."""
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process is not None, "it was started"
            assert self._process.poll() is None, f"vLLM ended: see {self._log}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, f"vLLM does not answer after {START_TIMEOUT_S:.0f} s: see {self._log}"
            select.select([], [], [], 0.5)

    def terminate(self) -> None:
        """Have it end in order, as a rolling update does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(START_TIMEOUT_S)

    def kill(self) -> None:
        """Kill -9, with everything that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def reset(self) -> None:
        """Have it forget its cache, which it does as soon as nothing runs."""
        until = time.monotonic() + 60
        while not httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).json()["success"]:
            assert time.monotonic() < until, "vLLM does not reset its cache"
            select.select([], [], [], 0.2)

    def nudge(self, number: int) -> None:
        """Have it publish a frame: one that was lost at the end is missed only then."""
        prompt = [16 + (number * 37 + at) % 3000 for at in range(BLOCK_SIZE + 1)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        assert httpx.post(f"{self.url}/v1/completions", json=body, timeout=120).status_code == 200

    def holds(self) -> set[int]:
        """What its cache holds."""
        return held_at(self.replay_endpoint)


def held_at(replay_endpoint: str) -> set[int]:
    """What a server holds, read from all frames that it keeps, by another reader than the one that is tested."""
    return fold(frames_of(replay_endpoint))


def frames_of(replay_endpoint: str) -> list[bytes]:
    """All event frames of a server's life."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(replay_endpoint)
        socket.send_multipart([b"", struct.pack(">Q", 0)])
        return _frames(socket)
    finally:
        context.destroy(linger=0)


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    frames: list[bytes] = []
    while True:
        assert socket.poll(60_000), "no answer from the replay socket"
        *_, seq, payload = socket.recv_multipart()
        if seq == b"\xff" * 8:
            return frames
        assert struct.unpack(">Q", seq)[0] == len(frames), "the server keeps all frames of its life"
        frames.append(payload)


def fold(frames: list[bytes]) -> set[int]:
    """Return the sequence hashes of what is held after all frames."""
    names: dict[int, int] = {}
    seeds: dict[int, int] = {}
    copies: dict[int, int] = {}
    for payload in frames:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                copies.clear()
            elif event["type"] == "BlockRemoved":
                for each in event["block_hashes"]:
                    copies[each] -= 1
                    if not copies[each]:
                        del copies[each]
            else:
                parent = event["parent_block_hash"]
                if parent is None:
                    salts = [each[0] for each in (event["extra_keys"] or [])[:1] if each]
                    seed = hash_seed("", salts[0] if salts else "")
                else:
                    seed = seeds[parent]
                own = block_hashes(pack_tokens(event["token_ids"]), event["block_size"], seed)
                chain = sequence_hashes(own, None if parent is None else names[parent])
                for each, name in zip(event["block_hashes"], chain, strict=True):
                    names[each], seeds[each] = name, seed
                    copies[each] = copies.get(each, 0) + 1
    return {names[each] for each in copies}


class LossyWire:
    """A wire between a publisher and who follows it, on which a share of the frames is lost."""

    def __init__(self, endpoint: str, share: float, seed: int) -> None:
        self.share = share
        self.passed = self.lost = 0
        self._random = random.Random(seed)
        self._context = zmq.Context()
        self._pub: zmq.Socket[Any] = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._sub: zmq.Socket[Any] = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(endpoint)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                frames = self._sub.recv_multipart()
                if self._random.random() < self.share:
                    self.lost += 1
                else:
                    self.passed += 1
                    self._pub.send_multipart(frames)
        except zmq.ContextTerminated:
            self._pub.close(linger=0)
            self._sub.close(linger=0)

    def close(self) -> None:
        self._context.term()
        self._thread.join()
