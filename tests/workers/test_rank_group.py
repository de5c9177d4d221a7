"""What a leader makes of its ranks' beats, what a rank of its leader's words, and where a process is among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.wire.errors import DecodeError
from poolgrid.workers.core.rank_group import RankGroup, named
from poolgrid.workers.core.rank_keeping import LAST_WORDS_MS, LEADER_START_MS, ORDERLY_END_MS, RankKeeping
from poolgrid.workers.core.rank_messages import Beat, GroupState, Word, decode_beat, decode_word, encode
from poolgrid.workers.core.rank_place import RankPlace, place_of, words_for_launcher

LEASE_MS = 1000.0
LOST = "rank 1 on host h1 was lost: its process was killed by SIGKILL"
SILENT = "rank 1 on host h1 was lost: it was silent for more than 1000 ms"


def beat(rank: int, ended: str = "", **changed: object) -> Beat:
    given: dict[str, object] = {"group": "g", "rank": rank, "host": f"h{rank}", "life": 7 + rank, "ended": ended}
    return Beat(**given | changed)  # type: ignore[arg-type]


def whole(size: int = 3) -> RankGroup:
    group = RankGroup("g", size, LEASE_MS)
    for rank in range(size):
        group.heard(beat(rank), 0.0)
    return group


def test_a_group_is_whole_when_every_rank_was_heard_and_names_the_missing_before() -> None:
    group = RankGroup("g", 3, LEASE_MS)
    assert group.missing == [0, 1, 2]
    group.heard(beat(2), 0.0)
    group.heard(beat(0), 0.0)
    assert (group.missing, group.is_whole) == ([1], False)
    assert group.heard(beat(1), 0.0) == Word(GroupState.STARTING)
    assert group.is_whole
    group.run()
    assert group.heard(beat(1), 1.0) == Word(GroupState.RUNNING)


def test_a_rank_whose_process_ended_is_lost_at_once_and_stays_lost() -> None:
    group = whole()
    assert group.heard(beat(1, "its process was killed by SIGKILL"), 5.0) == Word(GroupState.FAILED, LOST)
    assert group.heard(beat(1), 6.0).state is GroupState.FAILED, "nobody takes it back"
    assert group.describe() == {
        "expected": 3,
        "alive": 2,
        "hosts": ["h0", "h1", "h2"],
        "missing": [1],
        "lost": {"1": LOST},
    }


def test_a_rank_that_is_silent_for_the_lease_is_lost_and_the_first_loss_is_the_reason() -> None:
    group = whole()
    group.heard(beat(0), 900.0)
    group.heard(beat(2), 900.0)
    group.check(LEASE_MS)
    assert not group.failure
    group.check(LEASE_MS + 1)
    assert group.failure == SILENT
    group.check(3 * LEASE_MS)
    assert group.failure == SILENT
    assert group.missing == [0, 1, 2]


def test_another_process_in_a_ranks_place_and_a_rank_of_another_group_are_turned_away() -> None:
    group = whole()
    left_over = group.heard(beat(1, group="before"), 1.0)
    assert (left_over.state, group.word.state) == (GroupState.FAILED, GroupState.STARTING)
    assert group.heard(beat(3), 1.0).state is GroupState.FAILED
    assert group.is_whole
    assert group.heard(beat(1, life=99), 1.0).reason == "rank 1 was here before: a rank cannot come back to its group"
    assert group.failure == "rank 1 on host h1 was lost: another process took its place"


def test_ranks_that_go_at_the_orderly_end_are_not_lost() -> None:
    group = whole()
    group.run()
    group.begin_end()
    assert group.heard(beat(1, "its process ended with status 0"), 1.0).state is GroupState.RUNNING
    group.end()
    group.check(99 * LEASE_MS)
    group.end("too late")
    assert group.word == Word(GroupState.DONE)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([3, 5], "ranks 3 and 5"),
        ([0, 1, 2, 5, 7, 8], "ranks 0 to 2, 5, 7 and 8"),
        (list(range(0, 60, 2)), "ranks " + ", ".join(map(str, range(0, 40, 2))) + " and 10 more"),
    ],
)
def test_ranks_are_named_shortly(ranks: list[int], said: str) -> None:
    assert named(ranks) == said


def keeping(rank: int = 1) -> RankKeeping:
    return RankKeeping("g", rank, f"h{rank}", 7, lease_ms=LEASE_MS, start_timeout_ms=5 * LEASE_MS, now_ms=0.0)


def test_a_rank_ends_with_its_engine_at_once_after_a_failure_and_in_its_own_time_in_order() -> None:
    for rank, grace_ms in ((1, 0.0), (0, LAST_WORDS_MS)):
        kept = keeping(rank)
        kept.heard(Word(GroupState.RUNNING), 1.0)
        assert kept.check(2.0) is None
        kept.heard(Word(GroupState.FAILED, LOST), 2.0)
        kept.heard(Word(GroupState.DONE), 3.0)
        end = kept.check(3.0)
        assert end is not None
        assert (end.reason, end.in_order, end.grace_ms) == (LOST, False, grace_ms)
    kept = keeping()
    kept.heard(Word(GroupState.DONE), 2.0)
    end = kept.check(2.0)
    assert end is not None
    assert (end.in_order, end.grace_ms) == (True, ORDERLY_END_MS)


@pytest.mark.parametrize(
    ("word", "patience_ms"),
    [(None, 5 * LEASE_MS), (GroupState.STARTING, LEADER_START_MS), (GroupState.RUNNING, LEASE_MS)],
)
def test_a_rank_ends_when_its_leader_is_silent_and_waits_longer_while_it_starts(
    word: GroupState | None, patience_ms: float
) -> None:
    kept = keeping()
    if word is not None:
        kept.heard(Word(word), 0.0)
    assert kept.check(patience_ms) is None
    end = kept.check(patience_ms + 1)
    assert end is not None
    assert (end.in_order, end.grace_ms) == (False, 0.0)
    assert f"the leader was silent for more than {patience_ms:.0f} ms" in end.reason


def test_a_rank_that_is_told_to_end_says_so_and_goes_on_for_the_others() -> None:
    kept = keeping()
    kept.heard(Word(GroupState.RUNNING), 0.0)
    kept.stop(1.0)
    assert kept.beat.stops
    assert kept.check(2.0) is None
    alone = keeping()
    alone.stop(1.0)
    assert alone.check(2.0) is None
    silent = RankKeeping("g", 1, "h1", 7, lease_ms=LEASE_MS, start_timeout_ms=1e9, now_ms=0.0)
    silent.stop(1.0)
    end = silent.check(LEADER_START_MS + 2)
    assert end is not None
    assert end.in_order


def test_a_rank_whose_engine_ended_tells_it_and_does_not_wait_for_a_leader_that_never_comes() -> None:
    kept = keeping()
    kept.engine_ended("its process ended with status 127", 1.0)
    assert kept.beat.ended == "its process ended with status 127"
    assert kept.check(LEASE_MS) is None
    end = kept.check(LEASE_MS + 2)
    assert end is not None
    assert end.reason == "rank 1: its process ended with status 127, and no leader was there"


@given(st.binary(max_size=200))
def test_what_is_no_beat_and_no_word_is_refused_and_nothing_else(frame: bytes) -> None:
    for decode in (decode_beat, decode_word):
        try:
            decode(frame)
        except DecodeError:
            pass
    assert decode_beat(encode(beat(1, "x", stops=True))) == beat(1, "x", stops=True)


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "16", "PMIX_NAMESPACE": "1234"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM | {"SLURM_STEP_NODELIST": "n[04-07,9],x3"}, RankPlace(3, 16, "17.4", "n04", "SLURM_PROCID")),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]n[4-7]"}, RankPlace(3, 16, "17.4", "rack1n4", "SLURM_PROCID")),
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, RankPlace(3, 16, "17.4.2", "", "SLURM_PROCID")),
        (MPIRUN, RankPlace(3, 16, "1234", "", "OMPI_COMM_WORLD_RANK")),
        # mpirun in a job of Slurm: Slurm's rank is that of mpirun's own daemon.
        (
            MPIRUN | SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            RankPlace(3, 16, "1234", "", "OMPI_COMM_WORLD_RANK"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, RankPlace(0, 2, "", "", "PMI_RANK")),
    ],
)
def test_a_process_knows_its_place_from_who_started_it(environment: dict[str, str], expected: RankPlace) -> None:
    assert place_of(environment) == expected


def test_the_launcher_is_shown_the_same_place() -> None:
    place = RankPlace(3, 16, "g", "", "OMPI_COMM_WORLD_RANK")
    assert words_for_launcher(place, MPIRUN) == {}
    outer = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert words_for_launcher(place, outer) == {"SLURM_PROCID": "3", "SLURM_NTASKS": "16"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "none of OMPI_COMM_WORLD_RANK, SLURM_PROCID, PMI_RANK is set"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is '', allowed are 1 to 4096"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "SLURM_PROCID is '2', allowed are 0 to 1"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "SLURM_PROCID is 'x'"),
    ],
)
def test_a_place_that_nothing_tells_is_an_error_that_names_the_variable(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match="nothing was started") as error:
        place_of(environment)
    assert said in str(error.value)
