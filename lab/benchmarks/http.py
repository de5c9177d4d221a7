"""CPU of the HTTP surface: ours and its peers, each pinned to one core, in front of mock engines, in one run.

    python -m lab.benchmarks.http --profile [--tests short,chunks,turns] [--seconds 10] [--peer-python PYTHON]
    python -m lab.benchmarks.http [--peers ours,ours-before,ours-front,ours-front-before,smg,...]
                              [--tests short,stream,turns] [--seconds 4] [--rounds 5]
                              [--peer-python PYTHON] [--before-python PYTHON] [--json OUT]

The process under test has one core to itself (the last); engines, consolidator and load generator share the first.
Figures are CPU time from the scheduler's counts, so other load on the machine changes them little. Tests:

``short``    completions, 64 tokens in, 1 out, 16 clients: CPU µs per request
``stream``   chat streams, 1,024 tokens in, 128 out, 16 clients, engines as fast as they can: CPU µs per token
``chunks``   chat streams, 16 tokens in, 512 out: the same with less of the request in it
``paced``    the same from engines that take 10 ms for a step, 64 clients: each token comes by itself, as from a GPU
``front``    conversations from 1,500 tokens on, as streams from engines that take 10 ms for a step: CPU µs per token
``turns``    conversations of real growth, 16 at a time: 8k tokens in the first turn, then 10 further: CPU µs per turn
``turns4``   the same, four at a time: whoever has its worker on planes waits for events meanwhile, and wakes up more
``long``     short requests, 100 or so a second: TTFT alone, and while some 8 prompts of 60k tokens arrive a second
``flood``    the same, with one such prompt after the other, which takes all of the core

Peers (``lab/benchmarks/peers.py``) run from the Python named by ``--peer-python`` and are skipped, with the reason,
where they cannot be imported. Every test is also run with one client alone, through each peer and straight to a mock
OpenAI server: the difference is the TTFT that a peer adds. How much of it is there without our router is what a client
of a mock worker's request plane sees: that worker has a cache, and tells of it (not measured for conversations).

With ``--profile`` nothing is compared: it prints where the CPU of our router goes for a request of each test, by
samples of py-spy (beside ``--peer-python`` or on the path; ``lab/benchmarks/cpu_profile.py``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.benchmarks.cpu_profile import Recording, find_py_spy, profile_table
from lab.benchmarks.fleet import Fleet
from lab.benchmarks.http_load import LoadSpec, rss_mb
from lab.benchmarks.http_model import ensure_model
from lab.benchmarks.peers import BEFORE, FRONT, FRONT_BEFORE, MODEL, NAMES, OURS, Peers
from lab.benchmarks.worker_load import WorkerLoadSpec

UNLOADED_SECONDS_MAX = 2.0
"""Of the load of one client that TTFT added is taken from: some hundreds of the slowest requests."""

WARM_UP_S = 1.0
STRAIGHT = "straight"
"""Stands for no peer at all."""

TESTS: dict[str, dict[str, Any]] = {
    "short": {"concurrency": 16, "isl": 64, "osl": 1},
    "stream": {"chat": True, "stream": True, "concurrency": 16, "isl": 1024, "osl": 128},
    "chunks": {"chat": True, "stream": True, "concurrency": 16, "isl": 16, "osl": 512},
    "paced": {"chat": True, "stream": True, "concurrency": 64, "isl": 16, "osl": 128, "step_ms": 10.0},
    "front": {"chat": True, "stream": True, "concurrency": 16, "isl": 1500, "osl": 128, "turns": 5, "step_ms": 10.0},
    "turns": {"chat": True, "concurrency": 16, "isl": 8000, "osl": 32, "turns": 11, "turn_words": 200},
    "turns4": {"chat": True, "concurrency": 4, "isl": 8000, "osl": 32, "turns": 11, "turn_words": 200},
    "long": {"concurrency": 4, "isl": 64, "osl": 1, "pause_s": 0.04, "long_isl": 60_000, "long_pause_s": 0.1},
    "flood": {"concurrency": 4, "isl": 64, "osl": 1, "pause_s": 0.04, "long_isl": 60_000},
}


class Bench:
    """One run over several peers."""

    def __init__(self, peers: Peers, model: Path, seconds: float, logs: Path) -> None:
        """Measure each test for some seconds; what processes say goes to ``logs``."""
        self._peers = peers
        self._seconds = seconds
        self._logs = logs
        self._words = json.loads((model / "words.json").read_text())

    def run(self, peer: str, test: str) -> dict[str, Any]:
        """Return the figures of one test for one peer."""
        shape = TESTS[test]
        with self.fleet() as fleet:
            port, pid = self._peers.start(peer, fleet, shape.get("step_ms", 0.0))
            fresh_mb = rss_mb(pid)
            unloaded = None if "step_ms" in shape else self._unloaded(fleet, shape, port, pid)
            alone = self.load(fleet, {**shape, "long_isl": 0}, port, pid) if shape.get("long_isl") else None
            figures = self.load(fleet, shape, port, pid)
        apart = "turns" not in shape and "step_ms" not in shape
        worker = self.straight_to_worker(peer, test) if peer in (OURS, BEFORE) and apart else None
        return {**figures, "unloaded": unloaded, "alone": alone, "worker": worker, "fresh_rss_mb": fresh_mb}

    def straight(self, test: str) -> dict[str, Any]:
        """Return the figures of one client that talks to a mock OpenAI server with nothing between."""
        with self.fleet() as fleet:
            port, pid = self._peers.start_engine(fleet)
            return self._unloaded(fleet, TESTS[test], port, pid)

    def straight_to_worker(self, peer: str, test: str) -> dict[str, Any]:
        """Return the times to the first token of one client on the request plane of a worker of a form of ours."""
        shape = TESTS[test]
        spec = {name: shape[name] for name in ("isl", "osl", "stream") if name in shape}
        with self.fleet() as fleet:
            endpoint = self._peers.start_worker(peer, fleet)
            duration_s = min(self._seconds, UNLOADED_SECONDS_MAX)
            measured = fleet.load_worker(WorkerLoadSpec(endpoint=endpoint, duration_s=duration_s, **spec))
        if measured["failure"] or not measured["requests"]:
            raise RuntimeError(f"{test} straight to a worker of {peer}: {measured['failure'] or 'no request ended'}")
        return measured

    def profile(self, test: str, py_spy: str) -> dict[str, float]:
        """Return CPU µs of our router per request of a test, by what they are spent for.

        The shares are those of a load that is sampled, the CPU they divide is that of the same load without sampling.
        """
        shape = {**TESTS[test], "long_isl": 0}
        with self.fleet() as fleet:
            port, pid = self._peers.start("ours", fleet, shape.get("step_ms", 0.0))
            us_per_request = self.load(fleet, shape, port, pid)["us_per_request"]
            recording = Recording(py_spy, pid, self._logs / f"{test}.stacks")
            try:
                self.load(fleet, shape, port, pid)
                found = recording.shares()
            finally:
                recording.close()
        return {group: share * us_per_request for group, share in found.items()}

    @contextmanager
    def fleet(self) -> Iterator[Fleet]:
        """Make a fleet whose processes end with the block."""
        fleet = Fleet(self._logs)
        try:
            yield fleet
        finally:
            fleet.close()

    def _unloaded(self, fleet: Fleet, shape: dict[str, Any], port: int, pid: int) -> dict[str, Any]:
        """Measure one client alone: no queue anywhere, so what is seen is the way of a request."""
        one = {**shape, "concurrency": 1, "long_isl": 0, "pause_s": 0.0, "warmup_s": 0.5}
        return self.load(fleet, one, port, pid, min(self._seconds, UNLOADED_SECONDS_MAX))

    def load(
        self, fleet: Fleet, shape: dict[str, Any], port: int, pid: int, seconds: float | None = None
    ) -> dict[str, Any]:
        """Put the load of a shape on a port for some seconds, and return the figures of the process there."""
        path = "/v1/chat/completions" if shape.get("chat") else "/v1/completions"
        spec = LoadSpec(
            port=port,
            path=path,
            words=self._words,
            model=MODEL,
            duration_s=self._seconds if seconds is None else seconds,
            pids={"peer": pid},
            **{"warmup_s": WARM_UP_S, **_load_of(shape)},
        )
        measured = fleet.load(spec)
        cpu = measured["cpu_s"]["peer"]
        measured["us_per_request"] = cpu / max(1, measured["requests"]) * 1e6
        measured["us_per_token"] = cpu / max(1, measured["tokens"]) * 1e6
        measured["us_per_event"] = cpu / max(1, measured["events"]) * 1e6
        measured["busy"] = cpu / measured["window_s"]
        return measured


def _load_of(shape: dict[str, Any]) -> dict[str, Any]:
    """Return what of a test is the load's; the rest is its engines'."""
    return {name: value for name, value in shape.items() if name != "step_ms"}


PROFILED = ("short", "chunks", "turns")

CAPTION = """\
busy: share of its core. p50, p99, TTFT: ms, with all clients at work. MB: resident memory of the peer when it is ready,
and after the test. added: TTFT of one client alone through the peer, minus that of one client straight to a mock OpenAI
server with the same requests (p50 of one minus p50 of the other; p99 likewise). An answer that is no stream counts as a
whole. No mock engine is told to delay anything, but for paced. Behind ours and Dynamo are workers on planes of their
own: what these take is in their figures. worker's: how much of it there is without our router, for a client of the
worker's plane."""


def show(figures: dict[str, dict[str, Any]], console: Console) -> None:
    """Print a table per test, with the ratio of each peer's CPU to ours."""
    straight = figures.get(STRAIGHT, {})
    for test, shape in TESTS.items():
        rows = {peer: found[test] for peer, found in figures.items() if test in found and peer != STRAIGHT}
        if not rows:
            continue
        columns = ["peer", "CPU µs/request", "/token", "/event", "to ours", "busy", "requests/s", "p50 ms", "p99 ms"]
        columns += ["TTFT p50", "p99", "added p50", "p99", "worker's", "fresh MB", "after MB", "failures"]
        table = Table(*columns, title=test)
        for peer, row in rows.items():
            table.add_row(
                peer,
                # Two kinds of requests share the CPU of a test with long prompts: there is no figure per request.
                "" if shape.get("long_isl") else f"{row['us_per_request']:.0f}",
                f"{row['us_per_token']:.1f}" if shape.get("stream") else "",
                f"{row['us_per_event']:.1f}" if shape.get("stream") else "",
                _ratio(row["to_ours"]) if row.get("to_ours") and not shape.get("long_isl") else "",
                f"{row['busy']:.0%}",
                f"{row['requests_per_s']:.0f}",
                *(_quantile(row, "latency_ms", quantile) for quantile in ("p50", "p99")),
                *(_quantile(row, "ttft_ms", quantile) for quantile in ("p50", "p99")),
                *(_added(row.get("unloaded"), straight.get(test), quantile) for quantile in ("p50", "p99")),
                _added(row["worker"], straight.get(test), "p50") if row.get("worker") else "",
                f"{row['fresh_rss_mb']:.0f}",
                f"{row['rss_mb']['peer']:.0f}",
                f"{row['failures']} {row['failure'][:60]}",
            )
        console.print(table)
        if shape.get("long_isl"):
            show_long(rows, shape["long_isl"], console)
    console.print(CAPTION)


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of several rounds' figures, number by number; failures add up."""
    first = rounds[0]
    found: dict[str, Any] = {}
    for name, value in first.items():
        values = [each[name] for each in rounds if name in each]
        if isinstance(value, dict):
            found[name] = medians(values)
        elif isinstance(value, str) or value is None:
            found[name] = next((each for each in values if each), value)
        else:
            found[name] = sum(values) if name == "failures" else statistics.median(values)
    return found


def with_ratios(measured: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Return the medians of every peer and test, with the ratios of its CPU to ours round by round (``to_ours``)."""
    figures: dict[str, dict[str, Any]] = {}
    for peer, tests in measured.items():
        for test, rounds in tests.items():
            unit = "us_per_token" if TESTS[test].get("stream") else "us_per_request"
            ours = measured.get(OURS, measured.get(FRONT, {})).get(test, [])
            ratios = [theirs[unit] / own[unit] for theirs, own in zip(rounds, ours, strict=False) if own[unit]]
            figures.setdefault(peer, {})[test] = {**medians(rounds), "to_ours": ratios}
    return figures


def _ratio(ratios: Sequence[float]) -> str:
    """Return the median of some ratios and, of several, the lowest and the highest."""
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f}-{max(ratios):.2f})"


def _quantile(row: dict[str, Any], what: str, quantile: str) -> str:
    return f"{row[what][quantile]:.2f}" if quantile in row[what] else "none"


def _added(row: dict[str, Any] | None, straight: dict[str, Any] | None, quantile: str) -> str:
    """Return what a peer adds to the TTFT of a client alone."""
    if row is None or straight is None or quantile not in row["ttft_ms"] or quantile not in straight["ttft_ms"]:
        return "none"
    return f"{row['ttft_ms'][quantile] - straight['ttft_ms'][quantile]:.2f}"


def show_long(rows: dict[str, dict[str, Any]], long_isl: int, console: Console) -> None:
    """Print what long prompts do to the TTFT of short ones."""
    columns = ["peer", "TTFT p50 ms alone", "among long", "ratio", "p99 ms alone", "among long", "ratio"]
    table = Table(*columns, "long prompts/s", title=f"short requests while prompts of {long_isl:,} tokens arrive")
    for peer, row in rows.items():
        cells = []
        for quantile in ("p50", "p99"):
            alone, among = row["alone"]["ttft_ms"].get(quantile, 0), row["ttft_ms"].get(quantile, 0)
            cells += [f"{alone:.2f}", f"{among:.2f}", f"{among / alone:.2f}" if alone else ""]
        table.add_row(peer, *cells, f"{row['long_requests'] / row['window_s']:.1f}")
    console.print(table)


def main() -> int:
    """Run it and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(NAMES))
    parser.add_argument("--tests", help=f"default: {','.join(TESTS)}; with --profile {','.join(PROFILED)}")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per test")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often each test is run for each peer in turn; medians are printed"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has the peers' wheels")
    parser.add_argument("--before-python", default="", help="Python that has another version of poolgrid")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "poolgrid-bench-model")
    parser.add_argument("--profile", action="store_true", help="print where the CPU of our router goes instead")
    parser.add_argument("--http-workers", type=int, default=1, help="processes of ours that share the port")
    parser.add_argument("--logs", type=Path, help="keep the processes' output here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    console = Console(width=200)
    model = ensure_model(options.model_dir)
    peers = Peers(options.peer_python, model, options.http_workers, options.before_python)
    tests = (options.tests or ",".join(PROFILED if options.profile else TESTS)).split(",")
    with tempfile.TemporaryDirectory(prefix="poolgrid-http-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        bench = Bench(peers, model, options.seconds, logs)
        if options.profile:
            py_spy = find_py_spy(options.peer_python)
            profiles = {test: bench.profile(test, py_spy) for test in tests}
            console.print(profile_table(profiles))
            if options.json is not None:
                options.json.write_text(json.dumps(profiles, indent=1) + "\n")
            return 0
        present = []
        for peer in options.peers.split(","):
            absent_because = peers.absent_because(peer)
            if absent_because:
                python = options.before_python if peer in (BEFORE, FRONT_BEFORE) else options.peer_python
                console.print(f"{peer}: skipped, {python or 'nothing'} cannot start it: {absent_because}")
            else:
                present.append(peer)
        measured: dict[str, dict[str, list[dict[str, Any]]]] = {}
        steps = [
            (test, peer)
            for test in tests
            for _ in range(max(1, options.rounds))
            for peer in ((STRAIGHT, *present) if "step_ms" not in TESTS[test] else present)
        ]
        broken: set[tuple[str, str]] = set()
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("straight to the engine", total=len(steps))
            for test, peer in steps:
                progress.update(bar, description=f"{peer}: {test}")
                try:
                    if (test, peer) not in broken:
                        found = bench.straight(test) if peer == STRAIGHT else bench.run(peer, test)
                        measured.setdefault(peer, {}).setdefault(test, []).append(found)
                except RuntimeError as error:
                    # The others' figures are worth having all the same.
                    console.print(f"{peer}: {test} could not be run: {error}", markup=False)
                    broken.add((test, peer))
                progress.advance(bar)
    figures = with_ratios(measured)
    show(figures, console)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
