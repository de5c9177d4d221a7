"""The engine of ``lab.benchmarks.publisher``: steps of real work, timed where they happen, and events that leave by a
pipe.

As in TensorRT-LLM 1.2.1 the engine is a process of its own. What it tells leaves in a thread beside the steps, as one
JSON text per event, and is parsed by whoever reads it in the process of ``LLM``. A step is a fixed amount of work:
products of matrices (they let go of the interpreter, as waiting for a GPU does) and then plain Python, which stands for
the engine's own. Nothing sleeps: what takes time from the processor shows in the step.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import random
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

BLOCK_SIZE = 32
WINDOW = 131_072
BLOCKS_PER_CHAIN = 8
RESIDENT_BLOCKS = 20_000
SPARE_BLOCKS = 4_000
"""Names that come round again once they were removed: more than the engine stores between two readings."""
MATRIX_SIZE = 160
CALIBRATIONS = 15
CLOSED = (0, 0)
"""Tells the telling thread to end."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What the engine does in a step."""

    events_per_step: int
    step_ms: float
    python_share: float
    """Share of a step that is plain Python."""
    serializes: bool
    """Each event's text is made when it is told, as TensorRT-LLM does, and not before anything is timed."""
    cpu: int | None = None
    """Where the process is pinned."""


@dataclass(frozen=True, slots=True)
class Run:
    """Ask for some steps; answered with ``Steps``."""

    steps: int
    speaks: bool = False
    lasts: bool = False
    """What was told is true from now on. Otherwise the next run tells it again."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The time of each step, and of the processor in it, in seconds."""

    wall_s: list[float]
    cpu_s: list[float]
    told_events: int


class Workload:
    """A full cache that turns over: half of the events store a block of 32 tokens, half remove the oldest."""

    def __init__(self, made_before: bool) -> None:
        randomness = random.Random(7)
        self._count = RESIDENT_BLOCKS + SPARE_BLOCKS
        self._names = [randomness.getrandbits(64) for _ in range(self._count)]
        self._tokens = [[randomness.randrange(128_000) for _ in range(BLOCK_SIZE)] for _ in range(self._count)]
        self._stored = [self._text(self._stored_data(at)) for at in range(self._count)] if made_before else []
        self._removed = [self._text(self._removed_data(at)) for at in range(self._count)] if made_before else []

    def beginning(self) -> list[str]:
        """Return the texts with which the engine begins: the cache is made and filled."""
        created = self._text({"type": "created", "num_blocks_per_cache_level": [RESIDENT_BLOCKS, 0]})
        return [self._numbered(0, created)] + [
            self._numbered(1 + at, self._stored_text(at)) for at in range(RESIDENT_BLOCKS)
        ]

    def step(self, first: int, count: int) -> list[str]:
        """Return the texts of the events from ``first`` on, which come after the beginning."""
        texts = []
        for at in range(first, first + count):
            oldest = at // 2
            text = self._stored_text(oldest + RESIDENT_BLOCKS) if at % 2 else self._removed_text(oldest)
            texts.append(self._numbered(1 + RESIDENT_BLOCKS + at, text))
        return texts

    def _stored_text(self, at: int) -> str:
        at %= self._count
        return self._stored[at] if self._stored else self._text(self._stored_data(at))

    def _removed_text(self, at: int) -> str:
        at %= self._count
        return self._removed[at] if self._removed else self._text(self._removed_data(at))

    def _stored_data(self, at: int) -> dict[str, Any]:
        tokens = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in self._tokens[at]]
        name = self._names[at]
        block = {"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0, "priority": 35}
        parent = self._names[at - 1] if at % BLOCKS_PER_CHAIN else None
        return {"type": "stored", "parent_hash": parent, "blocks": [block]}

    def _removed_data(self, at: int) -> dict[str, Any]:
        return {"type": "removed", "block_hashes": [self._names[at]]}

    @staticmethod
    def _text(data: dict[str, Any]) -> str:
        return f'"data": {json.dumps(data)}, "window_size": {WINDOW}}}'

    @staticmethod
    def _numbered(event_id: int, text: str) -> str:
        return f'{{"event_id": {event_id}, {text}'


def statistics_text(at: int) -> str:
    """Return the statistics of one iteration."""
    return json.dumps(
        {
            "iter": at,
            "iterLatencyMS": 20.0,
            "numActiveRequests": 64,
            "numQueuedRequests": 3,
            "kvCacheStats": {"maxNumBlocks": RESIDENT_BLOCKS, "usedNumBlocks": 9000, "cacheHitRate": 0.4},
            "inflightBatchingStats": {"numScheduledRequests": 64, "numPausedRequests": 0, "numCtxTokens": 512},
        }
    )


class Work:
    """A step's work: as many rounds as took the time wanted when nothing else happened."""

    def __init__(self, step_ms: float, python_share: float) -> None:
        self._matrix = np.full((MATRIX_SIZE, MATRIX_SIZE), 0.001, dtype=np.float32)
        self._product = np.empty_like(self._matrix)
        self._products = self._rounds(self._multiply, step_ms * (1.0 - python_share))
        self._loops = self._rounds(self._count, step_ms * python_share)

    def __call__(self) -> None:
        """Do one step's work."""
        self._multiply(self._products)
        self._count(self._loops)

    def _multiply(self, rounds: int) -> None:
        for _ in range(rounds):
            np.matmul(self._matrix, self._matrix, out=self._product)

    @staticmethod
    def _count(rounds: int) -> None:
        value = 1
        for _ in range(rounds):
            value = (value * 31 + 7) & 0xFFFF

    @staticmethod
    def _rounds(work: Any, wanted_ms: float) -> int:
        """Return how many rounds take the time wanted: the best of some tries, others may disturb them."""
        rounds = 64
        best_s = float("inf")
        for _ in range(CALIBRATIONS):
            while True:
                started = time.thread_time()
                work(rounds)
                took_s = time.thread_time() - started
                if took_s >= 0.002:
                    break
                rounds *= 2
            best_s = min(best_s, took_s / rounds)
        return max(1, round(wanted_ms / 1e3 / best_s))


def run_engine(plan: EnginePlan, commands: Connection, told: Connection, own_process: bool) -> None:
    """Obey ``commands`` until ``None`` comes. The beginning is told before the first answer.

    ``told`` gets ``(texts of events, texts of statistics)`` per step, and ``None`` at the end of each run.
    """
    if own_process and plan.cpu is not None:
        os.sched_setaffinity(0, {plan.cpu})
    workload = Workload(not plan.serializes)
    work = Work(plan.step_ms, plan.python_share)
    if own_process:
        # The collector must not walk over a workload that lies there ready-made.
        gc.collect()
        gc.freeze()
    outgoing: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    all_told = threading.Event()

    def tell() -> None:
        iteration = 0
        while (order := outgoing.get()) != CLOSED:
            if order is None:
                told.send(None)
                all_told.set()
                continue
            iteration += 1
            told.send((workload.step(*order), [statistics_text(iteration)]))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    beginning = workload.beginning()
    for at in range(0, len(beginning), 500):
        told.send((beginning[at : at + 500], []))
    told.send(None)
    cursor = 0
    while (command := commands.recv()) is not None:
        at = cursor
        wall_s = []
        cpu_s = []
        for _ in range(command.steps):
            started = time.perf_counter()
            started_cpu = time.thread_time()
            work()
            if command.speaks:
                outgoing.put((at, plan.events_per_step))
                at += plan.events_per_step
            cpu_s.append(time.thread_time() - started_cpu)
            wall_s.append(time.perf_counter() - started)
        if command.speaks:
            all_told.clear()
            outgoing.put(None)
            all_told.wait()
        commands.send(Steps(wall_s, cpu_s, at - cursor))
        if command.lasts:
            cursor = at
    outgoing.put(CLOSED)
    teller.join()
