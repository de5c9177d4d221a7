"""Writes ``docs/request_life.md`` from the routers' own table: ``python -m lab.website.request_life_page``."""

from __future__ import annotations

import inspect
import re
import sys
from enum import Enum

from poolgrid.serving import request_machine
from poolgrid.serving.legs import LegEvent, LegState
from poolgrid.serving.request_machine import ANY, LEGS, ROWS, Step

HEAD = """# Request life cycle

What happens to a request on its workers, and how the router reacts. Routers and global routers follow this table only:
it is `ROWS` in `src/poolgrid/serving/request_machine.py`, from which this page is generated (`make docs`).

A request is served in *legs*: whole on one worker, or prefill and decode on two, with its images encoded first. Search
for what you saw: a lost worker is *worker lost*, a drain *refused: draining*, fail-over the step *move*.
"""

TAIL = """
*Move* ends the request instead if its output is complete, or if it has moved `migration_limit` times. It also ends the
request if {limit} workers were lost with it before its first token: the request may be the cause, and the client is
informed. Up to {departures} moves are not counted: away from workers that drain, left, or were lost together.
"""


def _text(member: Enum, source: str) -> str:
    """Return the docstring below a member of an enum; empty without one."""
    found = re.search(rf'^    {member.name} = [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _step(step: Step) -> str:
    return step.__name__.replace("_", " ")


def page() -> str:
    """Return the whole page."""
    lines = [HEAD, "| leg | event | steps, in this order | reason |", "|---|---|---|---|"]
    for row in ROWS:
        states = "any" if row.states == ANY else "any leg in flight" if row.states == LEGS else ""
        names = states or ", ".join(state.value for state in row.states)
        lines.append(f"| {names} | {row.event.value} | {', '.join(map(_step, row.steps))} | {row.why} |")
    lines += [
        "",
        "Anything else cannot happen or has no effect, such as output after the end of a request.",
    ]
    for title, members in (("Leg states", LegState), ("Events", LegEvent)):
        source = inspect.getsource(members)
        lines += ["", f"## {title}", "", "| | |", "|---|---|"]
        lines += [f"| {member.value} | {text} |" for member in members if (text := _text(member, source))]
    lines += ["", "## Steps", "", "| | |", "|---|---|"]
    steps = dict.fromkeys(step for row in ROWS for step in row.steps)
    lines += [f"| {_step(step)} | {inspect.getdoc(step)} |" for step in steps]
    return (
        "\n".join(lines)
        + "\n"
        + TAIL.format(limit=request_machine.LOSSES_MAX, departures=request_machine.DEPARTURES_MAX)
    )


if __name__ == "__main__":
    sys.stdout.write(page())
