"""The scenario behind the pictures of the documentation: a pool at 70 % load that loses workers, a fleet that spills.

The same processes, conversations (seeded) and steps each time; only the clock differs. ``docs/images/fleet_page*``.
"""

from __future__ import annotations

import io
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tests.e2e.processes import Process
from tests.ui.browser import Browser

WORKERS, BATCH = 6, 8
TALKERS = 50
"""35 of the 48 places are taken on average; without two of the six workers there are 32, and requests queue."""

SPEEDUP = 0.35
"""Slow engines: 25 ms between tokens, so that two cores can stream to all."""

LEASE_MS = 120_000
"""A killed worker stays on the page as unreachable so long."""

DRAINED, KILLED = "worker-2", "worker-5"

RECORDED_WIDTH = 1200
RECORDED_BEFORE_S, RECORDED_S = 3.0, 5.0
FRAME_S = 0.4
CAPTION_HEIGHT = 40

FLEET_TALKERS = 30


@dataclass
class BusyPool:
    """A router and its workers, each a process."""

    url: str
    workers: dict[str, Process]
    talkers: subprocess.Popen[str]

    def drain(self, name: str) -> None:
        """Take a worker out of use; it finishes what it has."""
        command = [sys.executable, "-m", "poolgrid", "drain", name, "--url", self.url, "--wait-s", "0"]
        subprocess.run(command, check=True, capture_output=True)

    def kill(self, name: str) -> None:
        """Kill a worker at once, as ``kill -9`` does."""
        self.workers[name].signal(signal.SIGKILL)

    def broken(self) -> list[str]:
        """End the conversations, and return the streams that broke."""
        self.talkers.kill()
        assert self.talkers.stdout is not None
        return [line for line in self.talkers.stdout.read().splitlines() if line.startswith("broken")]


def start_talkers(url: str, count: int, manner: str) -> subprocess.Popen[str]:
    """Start conversations in a process of their own."""
    command = [sys.executable, "-m", "tests.ui.talkers", url, str(count), manner]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextmanager
def busy_pool() -> Iterator[BusyPool]:
    """Run the pool and its conversations."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-busy-"))
        router = ("router", "--port", "0", "--worker-queue-factor", "1", "--lease-ms", str(LEASE_MS))
        front = stack.enter_context(Process(*router, "--data-dir", directory, "--log-level", "error"))
        front.wait_ready()
        simulated = (
            "--served-model-name",
            "tiny",
            "--max-batch-size",
            str(BATCH),
            "--total-kv-blocks",
            "9000",
            "--speedup",
            str(SPEEDUP),
        )
        engine = (*simulated, "--timing", "h100-qwen3-8b", "--vocabulary-size", "4096", "--log-level", "error")
        named = {f"worker-{number}": number for number in range(1, WORKERS + 1)}
        workers = {
            name: stack.enter_context(
                Process("worker", "--worker-id", name, "--consolidator", front.word("ingest"), *engine)
            )
            for name in named
        }
        for worker in workers.values():
            worker.wait_ready()
        talkers = start_talkers(front.url, TALKERS, "busy")
        stack.callback(talkers.wait)
        stack.callback(talkers.kill)
        yield BusyPool(front.url, workers, talkers)


def spilling_document(path: Path, document: Path) -> Path:
    """Write a pool-grid document whose pool ``steady`` is too slow for its targets, so that a share of it spills."""
    grid = json.loads(document.read_text(encoding="utf-8"))
    for pool in grid["aggregated"]["pools"]:
        pool["simulate"] |= {"max_batch_size": 12, "speedup": {"steady": 0.12}.get(pool["name"], 0.6)}
    grid |= {"adapt": True, "closed_loop": {"spill_after_ms": 5000, "window_ms": 20_000, "step_share": 0.2}}
    path.write_text(json.dumps(grid), encoding="utf-8")
    return path


class Recording:
    """Frames of the page with a caption below, as an animated WebP."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._frames: list[tuple[float, bytes, str]] = []

    def run(self, seconds: float, caption: str) -> None:
        """Take frames for so long."""
        self._browser.run("document.activeElement.blur(); scrollTo(0, 0)")
        until_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < until_s:
            self._frames.append((now_s, self._browser.screenshot(fast=True), caption))
            left_ms = 1000 * max(0.0, now_s + FRAME_S - time.monotonic())
            self._browser.run("return new Promise((done) => setTimeout(done, arguments[0]))", left_ms)

    def write(self, path: Path) -> None:
        """Write the frames at the pace at which they were taken, without long pauses; the last one stays longer."""
        times_s = [at_s for at_s, _, _ in self._frames]
        pairs = itertools.pairwise(times_s)
        durations_ms = [*(min(1000, round(1000 * (after - before))) for before, after in pairs), 3000]
        first, *rest = (captioned(page, caption) for _, page, caption in self._frames)
        first.save(path, save_all=True, append_images=rest, duration=durations_ms, loop=0, quality=70, method=4)


def captioned(page: bytes, words: str) -> Image.Image:
    """Return a smaller picture of the page with a line of words below it."""
    with Image.open(io.BytesIO(page)) as whole:
        height = round(whole.height * RECORDED_WIDTH / whole.width)
        frame = whole.convert("RGB").resize((RECORDED_WIDTH, height), Image.Resampling.LANCZOS)
    found = Image.new("RGB", (RECORDED_WIDTH, height + CAPTION_HEIGHT), "#14181f")
    found.paste(frame, (0, 0))
    ImageDraw.Draw(found).text((18, height + 8), words, fill="#ffffff", font=ImageFont.load_default(19))
    return found
