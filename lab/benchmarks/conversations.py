"""Conversations of a trace as real chat text: what a turn costs the front end's CPU, ours and Dynamo's.

    python -m lab.benchmarks.conversations conversation_trace.jsonl [--requests 300] [--peers ours,dynamo,dynamo-fast]
                                       [--peer-python PYTHON] [--json OUT]

Whole conversations are drawn from the trace and made into chats (``lab/benchmarks/chat_trace.py``): later turns send
the messages of earlier ones again, as clients do. Requests with prompts outside ``--isl-min`` and ``--isl-max`` are
left out. With ``--profile`` only ours runs, twice, the second time sampled by py-spy
(``lab/benchmarks/cpu_profile.py``).

Every front end gets the same bodies in the same order from one client, streamed, and has one core to itself;
the CPU between two requests is the first one's. Warm-up requests are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer

from lab.benchmarks.chat_text import ChatText
from lab.benchmarks.chat_trace import ChatRequest, chat_requests, shared_tokens
from lab.benchmarks.conversation_load import Answered
from lab.benchmarks.cpu_profile import Recording, find_py_spy, profile_table
from lab.benchmarks.fleet import Fleet
from lab.benchmarks.http_load import quantiles, rss_mb
from lab.benchmarks.http_model import ensure_model
from lab.benchmarks.peers import MODEL, NAMES, Peers
from poolgrid.plugins.bench.trace import TraceError, read_trace

WARM_UP_REQUESTS = 20
"""Code paths, connections and allocators, with prompts that share nothing with the conversations."""

SOURCES = re.compile(r'^poolgrid_frontend_tokenized_tokens_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)
FAULTS_SHOWN = 3


class Replay:
    """The same bodies for every front end."""

    def __init__(self, requests: Sequence[ChatRequest], osl_max: int, peers: Peers, logs: Path) -> None:
        """Send these requests, with answers of at most ``osl_max`` tokens; what processes say goes to ``logs``."""
        self.requests = requests
        self._peers = peers
        self._logs = logs
        warm_up = [
            body_of((("user", f"Number {number}. " + "This is to warm up. " * 20),), 4)
            for number in range(WARM_UP_REQUESTS)
        ]
        bodies = [body_of(request.messages, max(1, min(request.osl, osl_max))) for request in requests]
        self._file = logs / "bodies.msgpack"
        self._file.write_bytes(msgspec.msgpack.encode(warm_up + bodies))
        self.body_mb = sum(map(len, bodies)) / 1e6

    def run(self, peer: str, progress: Progress, py_spy: str = "") -> dict[str, Any]:
        """Return what one front end's answers cost; with ``py_spy`` also what its CPU is spent for (``shares``)."""
        with ExitStack() as ended:
            fleet = Fleet(self._logs)
            ended.callback(fleet.close)
            port, pid = self._peers.start(peer, fleet)
            fresh_mb = rss_mb(pid)
            command = [sys.executable, "-m", "lab.benchmarks.conversation_load", str(port), str(pid), str(self._file)]
            answers: list[Answered] = []
            before = tokenized(port) if peer == "ours" else {}
            bar = progress.add_task(peer, total=len(self.requests))
            recording = Recording(py_spy, pid, self._logs / "conversations.stacks") if py_spy else None
            if recording is not None:
                ended.callback(recording.close)
            with (self._logs / "load.log").open("wb") as log:
                load = subprocess.Popen(fleet.pinned(command), stdout=subprocess.PIPE, stderr=log)
                assert load.stdout is not None
                for line in load.stdout:
                    answers.append(msgspec.json.decode(line, type=Answered))
                    progress.update(bar, completed=max(0, len(answers) - WARM_UP_REQUESTS))
            if load.wait():
                raise RuntimeError((self._logs / "load.log").read_text()[-2000:])
            figures = self._figures(answers[WARM_UP_REQUESTS:])
            if recording is not None:
                figures["shares"] = recording.shares()
            figures["rss_mb"] = {"fresh": fresh_mb, "after": rss_mb(pid)}
            if peer == "ours":
                # The few tokens of the warm-up are in it too.
                after = tokenized(port)
                figures["tokenized"] = {source: count - before.get(source, 0) for source, count in after.items()}
            return figures

    def _figures(self, answers: Sequence[Answered]) -> dict[str, Any]:
        faults = [answered for answered in answers if answered.status != 200]
        good = [
            (request, answered)
            for request, answered in zip(self.requests, answers, strict=True)
            if answered.status == 200
        ]
        kinds = {
            "all": good,
            "first": [pair for pair in good if not pair[0].is_later_turn],
            "later": [pair for pair in good if pair[0].is_later_turn],
        }
        return {
            "failures": len(faults),
            "faults": sorted({answered.fault for answered in faults})[:FAULTS_SHOWN],
            **{kind: _summary(pairs) for kind, pairs in kinds.items()},
        }


def _summary(pairs: Sequence[tuple[ChatRequest, Answered]]) -> dict[str, Any]:
    answers = [answered for _, answered in pairs]
    count = max(1, len(answers))
    prompt = sum(answered.prompt_tokens for answered in answers)
    return {
        "requests": len(answers),
        "cpu_ms": sum(answered.cpu_ms for answered in answers) / count,
        "prompt_tokens": prompt / count,
        "isl": sum(request.isl for request, _ in pairs) / count,
        "cached_tokens": sum(answered.cached_tokens for answered in answers) / count,
        "completion_tokens": sum(answered.completion_tokens for answered in answers) / count,
        "ttft_ms": quantiles([answered.ttft_ms / 1e3 for answered in answers]),
    }


def body_of(messages: Sequence[tuple[str, str]], max_tokens: int) -> bytes:
    """Return the body of a streamed chat request with a usage report."""
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def tokenized(port: int) -> dict[str, float]:
    """Return how many prompt tokens our router took from where, by its own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {source: float(count) for source, count in SOURCES.findall(answer.read().decode())}


def show(figures: dict[str, dict[str, Any]], console: Console) -> None:
    """Print what requests cost, of all turns and of first and later ones apart."""
    kinds = {"all": "all requests", "first": "first turns", "later": "later turns (extend an earlier request)"}
    for kind, title in kinds.items():
        columns = [
            "front end",
            "requests",
            "tokens/request",
            "cached",
            "CPU ms/request",
            "to ours",
            "TTFT p50 ms",
            "p99",
        ]
        table = Table(*columns, title=title)
        ours = figures.get("ours", {}).get(kind, {}).get("cpu_ms")
        for peer, found in figures.items():
            row = found[kind]
            table.add_row(
                peer,
                str(row["requests"]),
                f"{row['prompt_tokens']:,.0f}",
                f"{row['cached_tokens']:,.0f}",
                f"{row['cpu_ms']:.2f}",
                f"{row['cpu_ms'] / ours:.2f}" if ours else "",
                f"{row['ttft_ms'].get('p50', 0):.1f}",
                f"{row['ttft_ms'].get('p99', 0):.1f}",
            )
        console.print(table)
    if len({found["all"]["prompt_tokens"] for found in figures.values()}) > 1:
        console.print("The front ends count different prompt tokens for the same bodies: figures cannot be compared.")
    for peer, found in figures.items():
        rss = found["rss_mb"]
        console.print(
            f"{peer}: {found['failures']} failures, RSS {rss['fresh']:.0f} MB fresh, {rss['after']:.0f} after"
        )
        for fault in found["faults"]:
            console.print(f"  {fault}", markup=False)
    sources = figures.get("ours", {}).get("tokenized", {})
    total = sum(sources.values())
    if total:
        avoided = 1 - sources.get("computed", 0) / total
        parts = ", ".join(f"{source} {count:,.0f}" for source, count in sources.items())
        console.print(f"ours: {avoided:.1%} of {total:,.0f} prompt tokens were not tokenized again ({parts})")


def main() -> int:
    """Run it and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="Mooncake-format trace")
    parser.add_argument("--requests", type=int, default=300, help="about how many; conversations are taken whole")
    parser.add_argument("--isl-min", type=int, default=8_000)
    parser.add_argument("--isl-max", type=int, default=60_000)
    parser.add_argument(
        "--osl-max", type=int, default=8, help="answers are cut to this; the prompt is what counts here"
    )
    parser.add_argument("--seed", type=int, default=0, help="which conversations")
    parser.add_argument("--peers", default="ours,dynamo,dynamo-fast", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has the peers' wheels")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "poolgrid-bench-model")
    parser.add_argument("--profile", action="store_true", help="print where the CPU of our router goes instead")
    parser.add_argument("--logs", type=Path, help="keep the processes' output here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    console, errors = Console(width=140), Console(stderr=True)
    model = ensure_model(options.model_dir)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    writer = ChatText(
        json.loads((model / "words.json").read_text()),
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
    )
    try:
        rows = read_trace(options.trace)
    except TraceError as error:
        errors.print(str(error), markup=False)
        return 2
    with errors.status("making chats of the trace"):
        requests = chat_requests(
            rows,
            writer,
            requests=options.requests,
            isl_min=options.isl_min,
            isl_max=options.isl_max,
            seed=options.seed,
        )
    if not requests:
        errors.print(f"{options.trace}: no request has {options.isl_min} to {options.isl_max} tokens; nothing was sent")
        return 2
    peers = Peers(options.peer_python, model)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="poolgrid-conversations-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        replay = Replay(requests, options.osl_max, peers, logs)
        left_out = sum(not options.isl_min <= row.input_length <= options.isl_max for row in rows)
        console.print(
            f"{len(requests)} requests of {len({request.conversation for request in requests})} conversations of "
            f"{options.trace.name}, {sum(request.is_later_turn for request in requests)} of them later turns; "
            f"{replay.body_mb:.1f} MB. Left out: the {left_out:,} of {len(rows):,} rows with less than "
            f"{options.isl_min:,} or more than {options.isl_max:,} prompt tokens. "
            f"{shared_tokens(requests) / sum(request.isl for request in requests):.1%} of the prompt tokens are in "
            "blocks of 512 that an earlier request had. One client."
        )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=errors, transient=True) as progress:
            for peer in () if options.profile else options.peers.split(","):
                absent_because = peers.absent_because(peer)
                if absent_because:
                    console.print(f"{peer}: skipped, {options.peer_python} cannot start it: {absent_because}")
                    continue
                figures[peer] = replay.run(peer, progress)
            if options.profile:
                # The shares are of a replay that is sampled, the CPU they divide of one that is not.
                figures["ours"] = replay.run("ours", progress)
                found = replay.run("ours", progress, find_py_spy(options.peer_python))["shares"]
                us = figures["ours"]["all"]["cpu_ms"] * 1e3
                figures["ours"]["profile"] = {group: share * us for group, share in found.items()}
    show(figures, console)
    if options.profile:
        console.print(profile_table({"conversations": figures["ours"]["profile"]}))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
