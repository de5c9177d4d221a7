"""What is excused while hosts are cut off, and that a host which is cut off really is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

from tests.hosts.fleet import CONSOLIDATORS, FRONTS, POOLS, ROUTERS
from tests.hosts.network import why_not
from tests.hosts.verdict import Absence, Asked, Outcome, is_excused

GONE = [Absence("a", 10.0, 30.0)]


@pytest.mark.parametrize(
    ("front", "begun_s", "ended_s", "outcome", "excused"),
    [
        ("a", 9.0, 11.0, Outcome.BROKEN, True),
        ("a", 29.0, 50.0, Outcome.BROKEN, True),
        ("a", 9.0, 31.0, Outcome.ERROR, True),
        ("a", 31.0, 32.0, Outcome.BROKEN, False),
        ("a", 1.0, 9.0, Outcome.ERROR, False),
        ("b", 9.0, 11.0, Outcome.BROKEN, False),
        ("a", 9.0, 11.0, Outcome.WRONG, False),
        ("a", 9.0, 99.0, Outcome.HUNG, False),
        ("", 9.0, 11.0, Outcome.REFUSED, False),
    ],
)
def test_only_what_a_global_router_that_was_gone_had_taken_is_excused(
    front: str, begun_s: float, ended_s: float, outcome: Outcome, excused: bool
) -> None:
    assert is_excused(Asked(front, begun_s, ended_s, outcome), GONE) is excused


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_whichever_host_is_gone_each_pool_has_a_living_path(gone: int) -> None:
    assert set(FRONTS) - {gone}
    for pool in POOLS:
        assert set(ROUTERS[pool]) - {gone}
        assert set(CONSOLIDATORS[pool]) - {gone}


@pytest.mark.e2e
@pytest.mark.skipif(bool(why_not()), reason="no network namespaces here")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_command_ends_all_that_it_began(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-m", "tests.hosts.network", "hold"], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"held\n"
        below = psutil.Process(command.pid).children(recursive=True)
        assert len(below) >= 3, "the namespaces' first process, and a host's"

        command.send_signal(number)
        command.wait(20)

        assert psutil.wait_procs(below, 20)[1] == []


@pytest.mark.e2e
@pytest.mark.skipif(bool(why_not()), reason="no network namespaces here")
def test_a_host_that_is_cut_off_is_reached_by_nobody_until_it_is_healed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hosts.network"], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    reached = {"1": True, "2": True}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        assert said["reached"] == (reached if said["way"] == "" else {**reached, "1": False}), said
    assert [json.loads(line)["way"] for line in done.stdout.splitlines()] == ["", "cable", "", "silence", ""]
    assert "host-1" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout


@pytest.mark.e2e
@pytest.mark.skipif(bool(why_not()), reason="no network namespaces here")
def test_a_connection_to_a_host_that_is_gone_is_given_up_whether_or_not_anything_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hosts.silent_host"], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    gave_up = json.loads(done.stdout)
    assert len(gave_up) == 4
    assert all(gave_up.values()), gave_up
