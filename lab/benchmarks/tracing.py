"""What traces cost a router: CPU per short request with traces off, at a share of the requests, and of all of them.

    python -m lab.benchmarks.tracing [--rounds 20] [--seconds 1.5] [--ratios 0.01,1] [--test short] [--json OUT]

A router without traces, a second one like it and one for each ratio stand before the same workers, each pinned to the
last core. They are put to work in turn, in an order that rotates, for a moment each, so that what else the machine does
befalls all alike. Figures are CPU times from the scheduler's counts, the thread that sends spans included. Each round
is compared with itself; printed are the median of the ratios, the quartiles, and the range in which the median lies
with 95 % confidence. Spans go by gRPC to a receiver in this process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.benchmarks.fleet import Fleet
from lab.benchmarks.http import TESTS
from lab.benchmarks.http_load import LoadSpec
from lab.benchmarks.http_model import ensure_model
from lab.benchmarks.peers import BLOCK_SIZE, ENGINES, MODEL
from tests.otlp_receiver import OtlpReceiver

OFF = "off"
OFF_AGAIN = "off, a second router"
"""What it differs by from the first is what cannot be measured."""
WARM_UP_S = 0.3
RESAMPLINGS = 2000


class Routers:
    """A router without traces, and one for each ratio, over one pool."""

    def __init__(self, fleet: Fleet, model: Path, receiver: str, ratios: Sequence[float]) -> None:
        ours = [sys.executable, "-m", "poolgrid"]
        level = ["--log-level", "warning"]
        words = fleet.ready_words(fleet.start("consolidator", [*ours, "consolidator", *level]))
        for number in range(ENGINES):
            command = [sys.executable, "-m", "lab.benchmarks.http_worker", words["ingest"], f"worker-{number}"]
            fleet.start(f"worker{number}", [*command, str(BLOCK_SIZE)])
        command = [*ours, "router", "--port", "0", "--model-path", str(model), "--served-model-name", MODEL, *level]
        command += ["--feed-endpoint", words["feed"], "--query-endpoint", words["query"]]
        self.places: dict[str, tuple[int, int]] = {}
        """Port and process id, by what is traced."""
        traced = {f"{ratio:g}": ["--trace-endpoint", receiver, "--trace-sample-ratio", f"{ratio}"] for ratio in ratios}
        for name, options in {OFF: [], OFF_AGAIN: [], **traced}.items():
            own = ["--router-id", f"r{len(self.places)}", *options]
            router = fleet.start(f"router{len(self.places)}", [*command, *own], tested=True)
            url = fleet.ready_words(router)["http"]
            self.places[name] = (int(url.rpartition(":")[2]), router.pid)


def us_per_request(fleet: Fleet, model: Path, test: str, place: tuple[int, int], seconds: float) -> float:
    """Return the CPU of a router for each request of a short load."""
    port, pid = place
    shape = TESTS[test]
    spec = LoadSpec(
        port=port,
        path="/v1/chat/completions" if shape.get("chat") else "/v1/completions",
        words=json.loads((model / "words.json").read_text()),
        model=MODEL,
        duration_s=seconds,
        warmup_s=WARM_UP_S,
        pids={"router": pid},
        **shape,
    )
    measured = fleet.load(spec)
    if measured["failures"]:
        raise RuntimeError(f"{measured['failures']} requests failed: {measured['failure']}")
    cpu_s: float = measured["cpu_s"]["router"]
    return cpu_s / max(1, int(measured["requests"])) * 1e6


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Return between which bounds the median lies with 95 % confidence, by drawing the rounds anew."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLINGS))
    return medians[int(0.025 * RESAMPLINGS)], medians[int(0.975 * RESAMPLINGS)]


def show(rounds: Sequence[dict[str, float]], console: Console) -> dict[str, dict[str, float]]:
    """Print the rounds' figures, and return them."""
    table = Table("traced", "CPU µs/request", "to off", "quartiles", "95 % confidence")
    figures: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        ratios = [each[name] / each[OFF] for each in rounds]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios * 3)
        least, most = confidence(ratios)
        cpu_us, middle = statistics.median(each[name] for each in rounds), statistics.median(ratios)
        figures[name] = {"us_per_request": cpu_us, "to_off": middle, "at_least": least, "at_most": most}
        words = [f"{middle:.4f}", f"{low:.3f}-{high:.3f}", f"{least:.4f}-{most:.4f}"] if name != OFF else ["", "", ""]
        table.add_row(name, f"{cpu_us:.1f}", *words)
    console.print(table)
    return figures


def main() -> int:
    """Run it and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each router in each round")
    parser.add_argument("--ratios", default="0.01,1", help="shares of requests whose traces are kept")
    parser.add_argument("--test", default="short", choices=("short", "stream", "chunks"))
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "poolgrid-bench-model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    model = ensure_model(options.model_dir)
    ratios = [float(each) for each in options.ratios.split(",")]
    console = Console(width=120)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="poolgrid-tracing-") as logs, OtlpReceiver() as receiver:
        fleet = Fleet(Path(logs))
        try:
            places = Routers(fleet, model, receiver.grpc_url, ratios).places
            names = list(places)
            for place in places.values():  # caches are filled, and what is made once is made
                us_per_request(fleet, model, options.test, place, options.seconds)
            for number in range(options.rounds):
                at = number % len(names)
                order = [*names[at:], *names[:at]]
                found = {
                    name: us_per_request(fleet, model, options.test, places[name], options.seconds) for name in order
                }
                rounds.append({name: found[name] for name in names})
        finally:
            fleet.close()
    console.print(f"{options.test}, {len(rounds)} rounds of {options.seconds:g} s each")
    figures = show(rounds, console)
    if options.json is not None:
        options.json.write_text(json.dumps({"figures": figures, "rounds": rounds}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
