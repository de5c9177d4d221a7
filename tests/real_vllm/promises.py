"""What routers promise of a prompt, against vLLM's own cache managers: 10,000 generated requests and more, no model.

    python -m tests.real_vllm.promises                      every model of ``cache_recorder``
    python -m tests.real_vllm.promises full-drops window    some of them

``POOLGRID_VLLM`` names the environment that has vLLM; without it nothing is run, and the status is 0.
``POOLGRID_VLLM_SOURCE`` names a folder with the Python files of another version, whose cache managers are taken then:
they need no compiled part. The exit status is 0 when every model's promises are as exact as ``LEAST`` says.
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
from rich.table import Table

from tests.real_vllm import servers
from tests.real_vllm.hybrid import FrameReader

STREAMS = 2
REQUESTS = 260
"""Of each stream."""

RECORD_TIMEOUT_S = 600

LEAST = {
    "full": 1.0,
    "full-window": 1.0,
    "full-windows": 1.0,
    "full-state": 1.0,
    "window": 1.0,
    "full-chunked": 0.95,
    "full32-window16": 0.99,
    "full32-window32": 1.0,
    "full-drops": 0.98,
    "full-window-drops": 0.98,
    "full-window-drafts-in-full": 0.95,
    "full-window-drafts-in-window": 0.97,
    "full-state-drops": 0.97,
    "full-ahead": 0.96,
    "full-ahead-3": 0.85,
    "full-window-ahead": 0.95,
    "full-state-ahead": 0.95,
    "full-reports": 1.0,
    "full-window-reports": 1.0,
    "full-state-reports": 1.0,
    "full-ahead-reports": 0.96,
}
"""Share of prompts of which exactly as much is promised as is reused, by model. Where the last block is computed again
that is learnt from the first requests. Where hashes look ahead, a prompt that parts from another within the tokens
behind a block is promised that block."""

LARGE_BLOCKS = {"full32-window16": 32, "full32-window32": 32}
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


def judged(streams: Iterable[tuple[Sequence[bytes], Sequence[Asked]]], block_size: int) -> Promises:
    """Take recorded frames in, and compare what is promised of each prompt with what was reused."""
    found = Promises()
    for frames, asked in streams:
        reader = FrameReader(block_size)
        for published, prompt, reused in asked:
            for payload in frames[len(reader.frames) : published]:
                reader.take(payload)
            found.note(reader.promised(prompt)[0], reused, block_size)
    return found


def recorded(vllm: Path, model: str, directory: Path) -> list[tuple[list[bytes], list[Asked]]]:
    """Have vLLM's cache manager serve generated requests."""
    output = directory / f"{model}.msgpack"
    program = Path(__file__).with_name("cache_recorder.py")
    subprocess.run(
        [str(vllm / "bin" / "python"), str(program), model, "0", str(STREAMS), str(REQUESTS), str(output)],
        env={**os.environ, **servers.ENVIRONMENT, "PYTHONPATH": os.environ.get("POOLGRID_VLLM_SOURCE", "")},
        check=True,
        timeout=RECORD_TIMEOUT_S,
    )
    return msgspec.msgpack.decode(output.read_bytes(), type=list[tuple[list[bytes], list[Asked]]])


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
    table = Table("model", "requests", "exact", "least", "too many", "beyond a block", "too few", "tokens reused")
    is_good = True
    with tempfile.TemporaryDirectory(prefix="poolgrid-promises-") as temporary:
        for model in arguments or LEAST:
            streams = recorded(Path(vllm), model, Path(temporary))
            found = judged(streams, LARGE_BLOCKS.get(model, 16))
            is_good = is_good and found.share >= LEAST[model]
            numbers = (found.too_many, found.beyond, found.too_few, found.reused_tokens)
            share = f"{found.share:.2%}"
            table.add_row(model, str(found.requests), share, f"{LEAST[model]:.0%}", *map(str, numbers))
    console.print(table)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
