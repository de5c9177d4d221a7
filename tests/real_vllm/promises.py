"""What routers promise of a prompt, against vLLM's own cache managers: 69,000 generated requests, no model.

    python -m tests.real_vllm.promises                      every model of ``cache_recorder``
    python -m tests.real_vllm.promises full-drops window    some of them

``POOLGRID_VLLM`` names the environment that has vLLM; without it nothing is run, and the status is 0.
``POOLGRID_VLLM_SOURCE`` names a folder with the Python files of another version, whose cache managers are taken then:
they need no compiled part. The exit status is 0 when every model's promises are as exact as ``LEAST`` says, none is
beyond a block too much where that is 99 % or more, and its blocks were evicted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from tests.real_vllm import servers
from tests.real_vllm.hybrid import FrameReader

STREAMS = 8
"""Of each model."""

REQUESTS = 260
"""Of each stream."""

RECORD_TIMEOUT_S = 900

DRAFTING = ("drops", "drafts", "ahead")
"""Words in the names of models whose servers draft, which their metrics say. A version of vLLM without hashes that look
ahead serves the latter as it does a server that drafts by n-grams: nothing is computed again."""

LEAST = {
    "full": 1.0,
    "full-window": 1.0,
    "full-windows": 1.0,
    "full-state": 1.0,
    "full-states-all": 1.0,
    "full-state64": 1.0,
    "window": 1.0,
    "mla-window": 1.0,
    "full-window-retained": 1.0,
    "full-state-retained": 1.0,
    "full-window-latest": 1.0,
    "full-state-latest": 1.0,
    "full-chunked": 0.95,
    "full32-window16": 0.95,
    "full32-window32": 1.0,
    "full32-window16-index16": 0.95,
    "full-drops": 0.99,
    "full-window-drops": 1.0,
    "full-window-drafts-in-full": 0.99,
    "full-window-drafts-in-window": 0.99,
    "full-state-drops": 1.0,
    "full-window-latest-drops": 1.0,
    "full-state-latest-drops": 1.0,
    "full32-state32-drops": 1.0,
    "full-ahead": 0.99,
    "full-ahead-3": 0.99,
    "full-window-ahead": 0.99,
    "full-state-ahead": 0.99,
    "full-state-ahead-3": 0.99,
    "full-reports": 1.0,
    "full-window-reports": 1.0,
    "full-state-reports": 1.0,
    "full-ahead-reports": 0.99,
}
"""Share of prompts of which exactly as much is promised as is reused, by model. Whether the last block is computed
again is learnt from the first requests."""

BLOCK_SIZES = {"full32-window16": 32, "full32-window32": 32}
"""Tokens in a block of the index, where these are not the recorder's 16."""

Asked = tuple[int, list[int], int]
"""Frames that came before, the prompt, and the tokens that were reused of it."""


@dataclass
class Promises:
    """What was promised of prompts, and reused."""

    requests: int = 0
    exact: int = 0
    too_many: int = 0
    """Prompts of which more was promised than reused."""
    beyond: int = 0
    """Those of which a block more was promised, and further ones."""
    too_few: int = 0
    reused_tokens: int = 0
    removals: int = 0
    """Frames in which blocks left the cache."""

    @property
    def share(self) -> float:
        return self.exact / self.requests

    def note(self, promised: int, reused: int, block_size: int) -> None:
        self.requests += 1
        self.exact += promised == reused
        self.too_many += promised > reused
        self.beyond += promised > reused + block_size
        self.too_few += promised < reused
        self.reused_tokens += reused


def judged(streams: Iterable[tuple[Sequence[bytes], Sequence[Asked]]], model: str) -> Promises:
    """Take recorded frames in, and compare what is promised of each prompt with what was reused."""
    found, block_size = Promises(), BLOCK_SIZES.get(model, 16)
    for frames, asked in streams:
        reader = FrameReader(block_size, any(word in model for word in DRAFTING))
        for published, prompt, reused in asked:
            for payload in frames[len(reader.frames) : published]:
                reader.take(payload)
            promised = reader.promised(prompt)[0]
            found.note(promised, reused, block_size)
        found.removals += sum(b"BlockRemoved" in frame for frame in frames)
    return found


def record(vllm: Path, models: Sequence[str], directory: Path) -> None:
    """Have vLLM's cache manager serve generated requests."""
    program = Path(__file__).with_name("cache_recorder.py")
    subprocess.run(
        [str(vllm / "bin" / "python"), str(program), str(directory), str(STREAMS), str(REQUESTS), *models],
        env={**os.environ, **servers.ENVIRONMENT, "PYTHONPATH": os.environ.get("POOLGRID_VLLM_SOURCE", "")},
        check=True,
        timeout=RECORD_TIMEOUT_S,
    )


def main(arguments: Sequence[str]) -> int:
    """Record and judge; return the exit status."""
    console = Console(soft_wrap=True)
    vllm = os.environ.get("POOLGRID_VLLM", "")
    if not vllm:
        console.print("skipped: POOLGRID_VLLM names no environment with vLLM; CONTRIBUTING.md says how to make one")
        return 0
    if unknown := set(arguments) - set(LEAST):
        console.print(f"{', '.join(sorted(unknown))} is no model; there are {', '.join(LEAST)}")
        return 2
    models = list(arguments or LEAST)
    is_good = True
    with tempfile.TemporaryDirectory(prefix="poolgrid-promises-") as temporary:
        directory = Path(temporary)
        record(Path(vllm), models, directory)
        for model in models:
            file = directory / f"{model}.msgpack"
            if not file.exists():
                console.print(f"{model}: this version of vLLM does not have it")
                continue
            streams = msgspec.msgpack.decode(file.read_bytes(), type=list[tuple[list[bytes], list[Asked]]])
            found = judged(streams, model)
            is_exact = found.share >= LEAST[model]
            if LEAST[model] >= 0.99:
                is_exact = is_exact and not found.beyond
            is_good = is_good and is_exact and found.removals > 0
            console.print(
                f"{model:30} {found.requests:6} requests, {found.share:7.2%} exact (least {LEAST[model]:.0%}), "
                f"{found.too_many} too many, {found.beyond} beyond a block, {found.too_few} too few, "
                f"{found.reused_tokens} tokens reused, {found.removals} frames evict"
            )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
