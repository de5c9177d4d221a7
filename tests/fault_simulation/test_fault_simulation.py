"""Some hundred seeds, the seeds that failed once, and whether the simulation finds bugs that are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_simulation.__main__ import PLANTED_WITHIN_SEEDS, first_catch, judge, main
from tests.fault_simulation.planted import PLANTED, planted
from tests.fault_simulation.scenario import PROFILES, make_scenario
from tests.fault_simulation.seeds import KeptSeed, kept_seeds
from tests.fault_simulation.simulation import play

SEEDS_PER_PROFILE = 6
"""``make soak`` plays thousands."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("profile", PROFILES)
def test_nothing_that_must_hold_breaks(profile: str) -> None:
    failures = [verdict for seed in range(SEEDS_PER_PROFILE) if (verdict := judge((seed, profile))).failure]

    assert not failures, "\n".join(
        f"{verdict.failure}\n  again: python -m tests.fault_simulation --profile {verdict.profile} "
        f"--seed {verdict.seed} --trace"
        for verdict in failures
    )


@pytest.mark.parametrize("kept", kept_seeds(), ids=lambda kept: f"{kept.profile}-{kept.seed}")
def test_a_seed_that_failed_once_fails_no_more(kept: KeptSeed) -> None:
    assert play(kept.seed, kept.profile).failure is None, kept.reason


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    caught = first_catch(name, PLANTED_WITHIN_SEEDS)

    assert caught is not None, f"no seed below {PLANTED_WITHIN_SEEDS} finds that {PLANTED[name].words}"
    assert play(caught[0], PLANTED[name].profile).failure is None, "it must be the planted bug that was found"


def test_the_same_seed_gives_the_same_trace_in_another_process_with_other_hashes() -> None:
    seeds = [(profile, 7) for profile in PROFILES]
    program = (
        "from tests.fault_simulation.simulation import play\n"
        f"print(*[play(seed, profile).digest for profile, seed in {seeds!r}])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )

    here = [play(seed, profile).digest for profile, seed in seeds]
    assert elsewhere.stdout.split() == here
    assert len(set(here)) == len(here)


def test_looking_closely_changes_nothing() -> None:
    assert play(3, "crashes", keep_all=True).digest == play(3, "crashes", keep_all=True).digest
    assert play(3, "crashes", keep_all=True).virtual_s == play(3, "crashes").virtual_s


def test_another_seed_is_another_run() -> None:
    assert make_scenario(1) != make_scenario(2)
    assert play(1, "calm").digest != play(2, "calm").digest


def test_an_unknown_profile_is_an_error_that_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="allowed are calm, lossy-network"):
        make_scenario(1, "stormy")


def test_a_failure_prints_what_was_seen_the_last_events_and_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    caught = first_catch("a-replay-is-skipped")
    assert caught is not None
    with planted("a-replay-is-skipped"):
        status = main(["--profile", "lossy-network", "--seed", str(caught[0])])

    printed = capsys.readouterr().out
    assert status == 1
    assert "was given record" in printed
    assert "BREACH" in printed
    assert f"again: python -m tests.fault_simulation --profile lossy-network --seed {caught[0]} --trace" in printed


def test_many_seeds_are_played_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0..2", "--profile", "calm"]) == 0
    assert "3 runs" in capsys.readouterr().out
