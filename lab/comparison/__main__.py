"""The same engines, the same traffic, each router in front, one after the other.

    python -m lab.comparison --rehearse                                       stand-ins for engines, no GPU, minutes
    python -m lab.comparison --serve "vllm serve" --model DIR --gpus 4 \\
        --routers ours,smg,vllm-router --peer-python PYTHON --seeds 1,2       a machine with GPUs

Each run: empty caches, a fresh router with its defaults, the sessions of the seed, then the engines' own counters. The
level of ``--disturb`` is played once more for each router and each of ``--disturbances``: ``restart`` kills its process
after a third of the time and starts it again, ``kill`` does so with the first engine, and for ``attach`` the engines
have served other sessions before the router starts. Tables, figures and plots go to
``--output``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from lab.benchmarks.chat_text import ChatText
from lab.benchmarks.http_model import ensure_model
from lab.comparison.engines import MODEL, Engines, difference
from lab.comparison.load import LoadSpec, Record
from lab.comparison.report import CAUTION, COLUMNS, Run, cells, figures, markdown, plot
from lab.comparison.routers import NAMES, SESSION_HEADER, Python, Router
from lab.comparison.traffic import LEVELS, Session, Traffic

REHEARSAL_SCALE = 0.1
KV_BYTES = 36_000_000_000
"""244,000 tokens of a model like Qwen3-8B: several working sets of a server at ``peak``, a third of one at
``eviction``."""

RESTART, KILL, ATTACH = "router restarted", "engine killed", "engines with history"
DISTURBANCES = {"restart": RESTART, "kill": KILL, "attach": ATTACH}


class Plan(NamedTuple):
    """One run to make."""

    level: str
    seed: int
    router: str
    disturbance: str


def plans(options: argparse.Namespace, routers: Sequence[str]) -> list[Plan]:
    """Return the runs in order: engines restart as seldom as possible, and no router always comes first."""
    found = []
    for level in sorted(options.levels, key=lambda name: -LEVELS[name].kv_share):
        for at, seed in enumerate(options.seeds):
            turn = at % len(routers)
            found += [Plan(level, seed, router, "") for router in [*routers[turn:], *routers[:turn]]]
        if level == options.disturb:
            found += [
                Plan(level, options.seeds[0], router, each) for each in options.disturbances for router in routers
            ]
    return found


class Comparison:
    """Makes runs on one set of engines."""

    def __init__(self, options: argparse.Namespace, model: Path, python: Python) -> None:
        self._options = options
        self._model = model
        self._python = python
        self._output: Path = options.output
        command = [] if options.rehearse else options.serve.split()
        arguments = options.engine_arguments.split()
        self.engines = Engines(
            command, model, options.gpus, options.kv_bytes, options.block_size, arguments, self._output
        )
        self.engines.share_gpu = options.share_gpu
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words_file = model / "words.json"
        words = msgspec.json.decode(words_file.read_bytes(), type=list[str]) if words_file.is_file() else []
        text = ChatText(words, lambda piece: len(tokenizer.encode(piece, add_special_tokens=False).ids))
        self._traffic = Traffic(text, REHEARSAL_SCALE if options.rehearse else 1.0)
        self._sessions: dict[tuple[str, int], list[Session]] = {}

    def run(self, plan: Plan) -> Run:
        """Make one run; raises ``RuntimeError`` when its router does not start."""
        self.engines.start(LEVELS[plan.level].kv_share)
        self.engines.warm_up()
        if plan.disturbance == ATTACH:
            self.engines.empty()
            self._make_history(plan.level)
        logs, size = self._output / _name(plan), self._options.block_size
        router = Router(plan.router, self.engines.addresses, self._model, size, self._python, logs)
        try:
            if plan.disturbance != ATTACH:
                self.engines.empty()
            before, spent_s = self.engines.counters(), router.cpu_s()
            began_s = time.monotonic()
            records = self._play(plan, router)
            wall_s = time.monotonic() - began_s
            return Run(
                *plan,
                wall_s=wall_s,
                cpu_s=router.cpu_s() - spent_s,
                rss_mb=router.rss_mb(),
                records=records,
                engines=difference(before, self.engines.counters()),
            )
        finally:
            router.stop()

    def _play(self, plan: Plan, router: Router) -> list[Record]:
        seconds = self._options.seconds
        sessions = self._sessions.get((plan.level, plan.seed))
        if sessions is None:
            sessions = self._traffic.sessions(plan.level, plan.seed, seconds, self._options.gpus)
            self._sessions = {(plan.level, plan.seed): sessions}
        records = self._output / _name(plan) / "records.json"
        header = SESSION_HEADER if LEVELS[plan.level].sends_ids else ""
        sends = LEVELS[plan.level].sends
        spec = LoadSpec(router.url, MODEL, sessions, seconds, seconds / 2, str(records), header, sends)
        file = records.with_name("load.json")
        file.write_bytes(msgspec.json.encode(spec))
        load = subprocess.Popen([sys.executable, "-m", "lab.comparison.load", str(file)])
        try:
            if plan.disturbance in (RESTART, KILL):
                time.sleep(seconds / 3)  # noqa: TID251 - the load runs in another process
                self._disturb(plan.disturbance, router)
            if load.wait(seconds * 2 + 60):
                raise RuntimeError(f"the load of {_name(plan)} failed")
        finally:
            load.kill()
            load.wait()
        return msgspec.json.decode(records.read_bytes(), type=list[Record])

    def _make_history(self, level: str) -> None:
        """Play sessions of another seed straight to the engines, so that their caches are full of them."""
        addresses, seconds = self.engines.addresses, self._options.seconds
        sessions = self._traffic.sessions(level, max(self._options.seeds) + 1, seconds, len(addresses))
        loads = []
        for number, address in enumerate(addresses):
            file = self._output / f"history-{number}.json"
            spec = LoadSpec(address.url, MODEL, sessions[number :: len(addresses)], seconds, seconds / 2, f"{file}.out")
            file.write_bytes(msgspec.json.encode(spec))
            loads.append(subprocess.Popen([sys.executable, "-m", "lab.comparison.load", str(file)]))
        for load in loads:
            load.wait(seconds * 2 + 60)

    def _disturb(self, disturbance: str, router: Router) -> None:
        if disturbance == RESTART:
            router.restart()
        else:
            self.engines.kill(0)
            self.engines.restart(0)


def _name(plan: Plan) -> str:
    return "-".join(str(each).replace(" ", "-") for each in plan if each != "")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends with status 2 on a bad one."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.comparison", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="stand-ins for engines, and texts at a tenth")
    parser.add_argument("--serve", default="", help="the command that serves a model as `vllm serve` does")
    parser.add_argument("--model", type=Path, help="directory of the model")
    parser.add_argument("--gpus", type=int, default=2, help="engine servers, one on each GPU")
    parser.add_argument("--share-gpu", action="store_true", help="all servers on the first GPU")
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help="KV cache of each server")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block of KV cache")
    parser.add_argument("--engine-arguments", default="", help="further arguments of each server")
    parser.add_argument("--routers", default="ours,smg,vllm-router", help=f"of {', '.join(NAMES)} and ours-POLICY")
    parser.add_argument("--peer-python", default="", help="a Python with the peers' wheels")
    parser.add_argument("--before-python", default="", help="a Python with another version of poolgrid")
    parser.add_argument("--levels", default="light,heavy,peak", help=f"of {', '.join(LEVELS)}")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long sessions and turns begin in a run")
    parser.add_argument("--disturb", default="", help="a level that is played with a restart and with a kill besides")
    parser.add_argument("--disturbances", default="restart,kill", help=f"of {', '.join(DISTURBANCES)}: which of them")
    parser.add_argument("--output", type=Path, required=True, help="directory for tables, figures, plots and logs")
    options = parser.parse_args(arguments)
    options.levels = options.levels.split(",")
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    options.output = options.output.absolute()
    if not options.rehearse and not (options.serve and options.model):
        parser.error("give --rehearse, or --serve and --model")
    for level in [*options.levels, *([options.disturb] if options.disturb else [])]:
        if level not in LEVELS:
            parser.error(f"there is no level {level!r}, allowed are {', '.join(LEVELS)}")
    unknown = set(options.disturbances.split(",")) - set(DISTURBANCES)
    if unknown:
        parser.error(f"there is no disturbance {min(unknown)!r}, allowed are {', '.join(DISTURBANCES)}")
    options.disturbances = [DISTURBANCES[each] for each in options.disturbances.split(",")]
    for router in options.routers.split(","):
        if router not in NAMES and not router.startswith("ours-"):
            parser.error(f"there is no router {router!r}, allowed are {', '.join(NAMES)} and ours-POLICY")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Make all runs; return the exit status: 1 when one could not be made."""
    options = parsed(arguments)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    python = Python(options.peer_python, options.before_python)
    routers = []
    for router in options.routers.split(","):
        reason = python.absent_because(router)
        if reason:
            console.print(f"left out: {router}: {reason}")
        else:
            routers.append(router)
    model = options.model or ensure_model(output / "model")
    comparison = Comparison(options, model, python)
    rows, failed = [], 0
    named = ", ".join(f"{router} {python.version(router)}" for router in routers)
    kind = "stand-in engines" if options.rehearse else f"engines: {options.serve}"
    heading = f"{named}; {options.gpus} {kind}; {time.strftime('%Y-%m-%d')}"
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            todo = plans(options, routers)
            task = progress.add_task("runs", total=len(todo))
            for plan in todo:
                progress.update(task, description=_name(plan))
                try:
                    row = figures(comparison.run(plan))
                except RuntimeError as error:
                    failed += 1
                    console.print(f"{_name(plan)}: {error}")
                else:
                    rows.append(row)
                    with (output / "figures.jsonl").open("ab") as file:
                        file.write(msgspec.json.encode(row) + b"\n")
                    console.print(" ".join(cells(row)))
                progress.advance(task)
    finally:
        comparison.engines.stop()
    table = Table(*COLUMNS, box=None)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=max(180, Console().width)).print(table)
    sys.stdout.write(CAUTION)
    (output / "tables.md").write_text(markdown(rows, heading))
    if rows and not plot(rows, heading, output / "plots.png"):
        console.print("no plots: matplotlib is not installed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
