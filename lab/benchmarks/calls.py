"""Count the calls that a request takes in our router, of this version and of another one.

    python -m lab.benchmarks.calls [--forms ours,ours-front] [--tests short,turns] [--clients 16] [--seconds 4]
                                   [--most 20] [--before-python PYTHON]

The router's main thread counts each call of a function of Python's or C's while one of the loads of
``lab.benchmarks.http`` is on (``benchmarks/counting``).
Nothing is timed, and counting makes the router some three times slower: a busy machine finds the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.benchmarks.call_counter import CallCounter, environment
from lab.benchmarks.http import TESTS, Bench
from lab.benchmarks.http_model import ensure_model
from lab.benchmarks.peers import BEFORE, FRONT, FRONT_BEFORE, OURS, Peers

FORMS = {OURS: BEFORE, FRONT: FRONT_BEFORE}
"""With own workers and in front of engine servers; each with its other version."""

KINDS = ("python", "c")
WARM_UP_S = 2.0


def counted(bench: Bench, peers: Peers, form: str, shape: dict[str, Any], into: Path) -> dict[str, Counter[str]]:
    """Return the calls per request of a router in one of its forms under a load: a count by name for each kind."""
    with bench.fleet() as fleet:
        port, pid = peers.start(form, fleet, shape.get("step_ms", 0.0))
        counter = CallCounter(pid, into)
        bench.load(fleet, shape, port, pid, WARM_UP_S)
        with counter.counting() as found:
            requests = bench.load(fleet, shape, port, pid)["requests"]
    return {kind: Counter({name: count / requests for name, count in found[kind].items()}) for kind in KINDS}


def main() -> int:
    """Count, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=OURS, help=f"of {','.join(FORMS)}")
    parser.add_argument("--tests", default="short", help=f"of {','.join(TESTS)}")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long is counted")
    parser.add_argument("--most", type=int, default=0, help="list so many of what is called most")
    parser.add_argument("--before-python", default="", help="Python that has another version of poolgrid")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "poolgrid-bench-model")
    options = parser.parse_args()
    unknown = sorted(set(options.tests.split(",")) - set(TESTS))
    if unknown:
        parser.error(f"--tests has {', '.join(unknown)}, allowed are {', '.join(TESTS)}")
    unknown = sorted(set(options.forms.split(",")) - set(FORMS))
    if unknown:
        parser.error(f"--forms has {', '.join(unknown)}, allowed are {', '.join(FORMS)}")
    console = Console(width=140)
    model = ensure_model(options.model_dir)
    peers = Peers(sys.executable, model, before_python=options.before_python)
    table = Table("test", "form", "Python's functions", "C's functions", "together", title="calls per request")
    with tempfile.TemporaryDirectory(prefix="poolgrid-calls-") as scratch:
        into = Path(scratch) / "calls.json"
        os.environ |= environment(into)
        bench = Bench(peers, model, options.seconds, Path(scratch))
        for test in options.tests.split(","):
            shape = TESTS[test] | {"concurrency": options.clients, "long_isl": 0, "pause_s": 0.0, "warmup_s": 0.0}
            forms = options.forms.split(",")
            for form in [*forms, *(FORMS[each] for each in forms if options.before_python)]:
                absent_because = peers.absent_because(form)
                if absent_because:
                    parser.error(f"--before-python {options.before_python}: {absent_because}")
                found = counted(bench, peers, form, shape, into)
                sums = [found[kind].total() for kind in KINDS]
                table.add_row(test, form, *(f"{each:.0f}" for each in [*sums, sum(sums)]))
                for kind in KINDS:
                    for name, count in found[kind].most_common(options.most):
                        console.print(f"{test}, {form}: {count:6.2f} {name}", markup=False, highlight=False)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
