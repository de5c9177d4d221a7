"""What one request passes in a router: its functions, modules and Python calls, until the first byte and to the end.

    python -m lab.benchmarks.request_path [--forms ours,ours-front] [--requests 8] [--tokens 8] [--list]

A real router, with own workers and in front of mock engine servers, answers a chat as a stream, several times in
succession. What counts of poolgrid's functions ran for each of these requests and not while the router was idle; a part
in ``<>`` (a comprehension) counts as its function. The first byte is the first write to the client. A coroutine that
continues is a call. C's functions, libraries and other threads do not count.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lab.benchmarks.call_counter import CallCounter, environment
from lab.benchmarks.fleet import Fleet
from lab.benchmarks.http_model import ensure_model
from lab.benchmarks.peers import FRONT, MODEL, OURS, Peers

FORMS = (OURS, FRONT)
WARM_UP_REQUESTS = 12
"""After so many the router knows the prompt, its servers and their versions."""

IDLE_S = 4.0
"""Longer than the periods of what a router does by itself."""

STEP_MS = 20.0
"""Between two tokens, so that the first byte comes before the end."""

SETTLE_S = 0.3
"""After the last byte: what a request leaves to do is done."""

TIMEOUT_S = 60.0

Call = tuple[str, str]
"""Module and function; empty: bytes left for a client."""


class PathFigures(NamedTuple):
    """What a part of a request passes."""

    functions: list[str]
    modules: list[str]
    calls: float


def figures(requests: Sequence[Sequence[Call]], idle: Sequence[Call]) -> PathFigures:
    """Return what all of these requests, or parts of them, pass and an idle router does not."""
    others = {_function(call) for call in idle}
    by_request = [[_function(call) for call in calls if call[0]] for calls in requests]
    common = set.intersection(*map(set, by_request)) - others
    return PathFigures(
        sorted(common),
        sorted({function.partition(" ")[0] for function in common}),
        statistics.median(sum(function in common for function in each) for each in by_request),
    )


def _function(call: Call) -> str:
    module, name = call
    while name.endswith(">") and ".<locals>.<" in name and not name.endswith("<lambda>"):
        name = name.rpartition(".<locals>.<")[0]
    return f"{module.removeprefix('poolgrid.')} {name}"


def ask(connection: http.client.HTTPConnection, tokens: int) -> None:
    """Have one chat answered as a stream; raises ``RuntimeError`` for another answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200 or b"[DONE]" not in text:
        raise RuntimeError(f"the router answered {answer.status}: {text[:300]!r}")


def traced(
    peers: Peers, fleet: Fleet, form: str, into: Path, requests: int, tokens: int
) -> tuple[PathFigures, PathFigures]:
    """Return what a request passes in a form of ours, until its first byte and to its end."""
    port, pid = peers.start(form, fleet, STEP_MS)
    counter = CallCounter(pid, into)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    for _ in range(WARM_UP_REQUESTS):
        ask(connection, tokens)
    found = []
    with counter.counting() as idle:
        time.sleep(IDLE_S)  # noqa: TID251 - what is counted is what happens while nothing happens
    for _ in range(requests):
        with counter.counting() as counts:
            ask(connection, tokens)
            time.sleep(SETTLE_S)  # noqa: TID251 - the end of what a request leaves to do is not announced
        found.append([(module, name) for module, name in counts["in_order"]])
    connection.close()
    before = [calls[: calls.index(("", ""))] for calls in found]
    idle_calls = [(module, name) for module, name in idle["in_order"]]
    return figures(before, idle_calls), figures(found, idle_calls)


def main() -> int:
    """Trace, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {','.join(FORMS)}")
    parser.add_argument("--requests", type=int, default=8, help="how many are traced")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--list", action="store_true", help="print the functions too, by module")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "poolgrid-bench-model")
    options = parser.parse_args()
    unknown = sorted(set(options.forms.split(",")) - set(FORMS))
    if unknown:
        parser.error(f"--forms has {', '.join(unknown)}, allowed are {', '.join(FORMS)}")
    if options.requests < 1:
        parser.error(f"--requests is {options.requests}, allowed is 1 or more")
    console = Console(width=140)
    model = ensure_model(options.model_dir)
    table = Table("form", "until", "functions", "modules", "Python calls", title="a request in the router")
    for form in options.forms.split(","):
        with tempfile.TemporaryDirectory(prefix="poolgrid-path-") as scratch:
            into = Path(scratch) / "calls.json"
            os.environ |= environment(into, in_order=True)
            fleet = Fleet(Path(scratch))
            try:
                found = traced(Peers(sys.executable, model), fleet, form, into, options.requests, options.tokens)
            finally:
                fleet.close()
        for until, each in zip(("first byte", "end"), found, strict=True):
            table.add_row(form, until, str(len(each.functions)), str(len(each.modules)), f"{each.calls:.0f}")
            for function in each.functions if options.list else ():
                console.print(f"{form}, {until}: {function}", markup=False, highlight=False)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
