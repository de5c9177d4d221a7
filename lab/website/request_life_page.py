"""Write ``docs/internals/request_life.md`` from the routers' table: ``python -m lab.website.request_life_page``."""

from __future__ import annotations

import sys

from poolgrid.kernel.requests import request_machine
from poolgrid.kernel.requests.request_machine import ANY, LEGS, ROWS, Step

HEAD = """# Request life cycle

What happens to a request on its workers, and how the router reacts. Routers and global routers follow this table only:
it is `ROWS` in `src/poolgrid/kernel/requests/request_machine.py`, from which this page is generated (`make docs`).

A request is served in *legs*: whole on one worker, or prefill and decode on two, with its images encoded first. Search
for what you saw: a lost worker is *worker lost*, a drain *refused: draining*, fail-over the step *move*.
"""

TAIL = """
*Move* ends the request instead if its output is complete, or if it has moved `migration_limit` times. It also ends the
request if {limit} workers were lost with it before its first token: the request may be the cause, and the client is
informed. Up to {departures} moves are not counted: away from workers that drain, left, or were lost together.
"""


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
        "Anything else cannot happen or has no effect, such as output after the end of a request. Docstrings describe",
        "leg states and events (`src/poolgrid/kernel/requests/legs.py`) and steps "
        "(`src/poolgrid/kernel/requests/request_machine.py`).",
    ]
    return (
        "\n".join(lines)
        + "\n"
        + TAIL.format(limit=request_machine.LOSSES_MAX, departures=request_machine.DEPARTURES_MAX)
    )


if __name__ == "__main__":
    sys.stdout.write(page())
