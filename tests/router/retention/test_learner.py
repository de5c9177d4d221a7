"""What is learnt of prompts is said when it pays, never against the order of their blocks, and of one seed only."""

from __future__ import annotations

from itertools import islice

import msgspec
import pytest

from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.policies.retention.ghosts import SPENT
from poolgrid.router.policies.retention.learner import USUAL_OUTPUT_TOKENS, LearnerState, RetentionLearner
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.requests import RETENTION_DEFAULT, KvRetention, RetainedTokens
from tests.router.retention.mixed_prompts import BLOCKS, WORKER, asked, mixed, prompt


def _decisive(learner: RetentionLearner) -> LearnerState:
    """All that advice depends on: what would be there without priorities is only counted."""
    state = learner.checkpoint()
    held = [(name, rank, each, msgspec.structs.replace(one, found=-1)) for name, rank, each, one in state.held]
    return msgspec.structs.replace(state, held=held)


def test_nothing_is_said_until_it_pays_and_then_what_comes_again_is_kept_and_the_rest_is_not() -> None:
    learner = RetentionLearner()
    sent = list(mixed(learner, 10))
    assert all(said is None for _, said in sent[:30]), "before anything is known"
    assert learner.pays
    for number, said in sent[-24:]:
        assert said is not None
        assert not said.fault
        assert said.ranges[-1].end == 4_200
        # A few of the others fill what room is left.
        assert (said.ranges[0].priority > 60) is (number < 6)
        assert all(each.duration_ms is None for each in said.ranges if each.priority <= 35)
        priorities = [each.priority for each in said.ranges]
        assert priorities == sorted(priorities, reverse=True)


def test_what_a_seed_does_is_not_said_of_another() -> None:
    learner = RetentionLearner()
    for _ in mixed(learner, 10, seed=1):
        pass
    assert learner.pays
    same = prompt("1 3", 8)
    assert learner.advise(asked("a", 4_200, seed=1), same, 600_000.0) is not None
    assert learner.advise(asked("a", 4_200, seed=2), same, 600_000.0) is None
    # Nor when it has prompts of its own, until it has been learnt of long enough.
    request = asked("b", 4_200, seed=2)
    learner.begin(WORKER, BLOCKS, "b", request, same, 601_000.0)
    assert learner.advise(request, same, 602_000.0) is None


def test_what_paid_once_is_said_no_more_when_lru_finds_as_much() -> None:
    learner = RetentionLearner()
    for _ in mixed(learner, 10):
        pass
    assert learner.pays
    for second in range(600, 3_000):
        path, request = prompt("both", 8), asked(f"b{second}", 4_200)
        learner.begin(WORKER, BLOCKS, request.request_id, request, path, second * 1000.0)
        learner.on_finished(WORKER, request.request_id, None, second * 1000.0 + 500.0)
    assert not learner.pays


def test_a_learner_that_is_given_anothers_state_says_what_that_one_says() -> None:
    one = RetentionLearner()
    for _ in mixed(one, 8):
        pass
    request, path = asked("under way", 4_200), prompt("under way", 8)
    one.begin(WORKER, BLOCKS, "under way", request, path, 480_000.0)
    kept = msgspec.msgpack.encode(one.checkpoint())
    other = RetentionLearner()
    other.restore(msgspec.msgpack.decode(kept, type=LearnerState))
    for each in (one, other):
        each.on_finished(WORKER, "under way", None, 480_500.0)
    expected, found = list(mixed(one, 5, since=9)), list(mixed(other, 5, since=9))
    assert found == expected
    assert any(said is not None for _, said in found)
    assert _decisive(other) == _decisive(one)
    # A copy: what happens to the one later is nothing to the other.
    assert len(list(mixed(one, 1, since=20))) == 60
    assert _decisive(other) != _decisive(one)


def test_a_state_of_other_kinds_is_refused() -> None:
    learner = RetentionLearner()
    for _ in mixed(learner, 1):
        pass
    state = learner.checkpoint()
    chapter = msgspec.structs.replace(state.chapters[0], visits=[0.0])
    with pytest.raises(ValueError, match="1 kinds, this version has"):
        RetentionLearner().restore(msgspec.structs.replace(state, chapters=[chapter]))


def test_after_a_snapshot_only_what_is_there_is_known() -> None:
    learner = RetentionLearner()
    for name in ("here", "gone"):
        worker = WorkerKey(WorkerId(name))
        for request_id in ("1", "2"):
            request = asked(f"{name} {request_id}", 4_200)
            learner.begin(worker, BLOCKS, request.request_id, request, prompt(request.request_id, 8), 0.0)
    here = WorkerKey(WorkerId("here"))
    learner.on_snapshot([here], lambda worker, dispatch_id: dispatch_id == "here 2")
    state = learner.checkpoint()
    assert state.room == [("here", 0, BLOCKS)]
    assert [(name, dispatch_id) for name, _, dispatch_id, _ in state.held] == [("here", "here 2")]


def test_short_prompts_and_lost_workers_leave_nothing_behind() -> None:
    learner = RetentionLearner()
    learner.begin(WORKER, BLOCKS, "short", asked("short", 300), [], 0.0)
    learner.on_finished(WORKER, "short", None, 1.0)
    assert len(learner) == 0
    learner.begin(WORKER, BLOCKS, "long", asked("long", 4_200), prompt("x", 8), 2.0)
    learner.on_left(WORKER)
    learner.on_finished(WORKER, "long", None, 3.0)
    learner.on_started(WORKER, "long", 512)
    assert (learner.gained_tokens, learner.lost_tokens) == (0, 0)


def test_the_end_of_a_prompt_that_never_comes_again_is_spent_and_one_that_does_is_kept() -> None:
    def last_of(ends_alike: bool) -> KvRetention:
        learner = RetentionLearner()
        for _ in mixed(learner, 10):
            pass
        said: KvRetention | None = None
        for turn in range(120):
            now_ms = 600_000.0 + turn * 4_000.0
            # Blocks of 64: what is behind the last 512 tokens are four more.
            path = prompt("conversation", 8 * (turn % 8 + 3))
            path += prompt("conversation", 8 * (turn % 8 + 3) + 4)[-4:] if ends_alike else prompt(f"end {turn}", 4)
            request = RoutingRequest(f"c{turn}", "m", 64 * len(path), 64, len(path))
            said = learner.advise(request, path, now_ms) or said
            learner.begin(WORKER, BLOCKS * 8, request.request_id, request, path, now_ms)
            learner.on_finished(WORKER, request.request_id, None, now_ms + 500.0)
        assert said is not None
        return said

    spent = last_of(ends_alike=False)
    assert (spent.ranges[-1].priority, spent.decode_priority) == (SPENT, SPENT)
    kept = last_of(ends_alike=True)
    assert kept.ranges[-1].priority == kept.decode_priority > SPENT


def test_what_begins_to_harm_is_said_no_more_at_once_and_then_blocks_get_back_the_usual_priority() -> None:
    learner = RetentionLearner()
    assert learner.advise(asked("x", 4_200), prompt("0 0", 8), 0.0) is None
    for _ in mixed(learner, 10):
        pass
    assert learner.pays
    found = learner.checkpoint()
    assert found.kept_lately > found.plain_lately
    lost = msgspec.structs.replace(found, kept_lately=0.9 * found.kept_hits, plain_lately=found.kept_hits)
    learner.restore(lost)
    assert learner.pays
    for _ in islice(mixed(learner, 1, since=10), 2):
        pass

    assert not learner.pays
    assert learner.ghosts.kept_hits <= learner.ghosts.plain_hits + 16, "what it gained before says nothing of now"
    usual = learner.advise(asked("x", 4_200), prompt("0 0", 8), 602_000.0)
    assert usual == KvRetention((RetainedTokens(0, 4_200, RETENTION_DEFAULT),))


def test_the_next_turn_of_a_conversation_has_the_last_word_on_its_blocks() -> None:
    learner = RetentionLearner()
    for _ in mixed(learner, 10):
        pass
    state = learner.checkpoint()
    (chapter,) = state.chapters
    run = next(each for each in chapter.runs if each.turn == 1 and each.visits == 1)
    standing = msgspec.structs.replace(run, priority=99, duration_ms=10_000_000, until_ms=1e12)
    runs = [standing if each is run else each for each in chapter.runs]
    learner.restore(msgspec.structs.replace(state, chapters=[msgspec.structs.replace(chapter, runs=runs)]))
    learner.ghosts.pays = True

    follow_up = list(run.granules) + prompt("more", 2)
    said = learner.advise(asked("next", 512 * len(follow_up)), follow_up, 600_000.0)
    assert said is not None
    assert said.ranges[0].priority < 99

    branch = list(run.granules)[:4] + prompt("other", 2)
    said = learner.advise(asked("branch", 512 * len(branch)), branch, 600_000.0)
    assert said is not None
    assert said.ranges[0].priority == 99, "what hangs off it may still be wanted"


def test_what_requests_leave_beside_their_prompts_is_learnt_and_goes_with_what_is_handed_on() -> None:
    def cells_of(output_blocks: int | None) -> tuple[float, LearnerState]:
        learner = RetentionLearner()
        for second in range(200):
            request = asked(f"r{second}", 4_200)
            learner.begin(WORKER, BLOCKS, request.request_id, request, prompt(str(second), 8), second * 1000.0)
            blocks = None if output_blocks is None else request.blocks + output_blocks
            learner.on_finished(WORKER, request.request_id, blocks, second * 1000.0 + 500.0)
        return learner.checkpoint().output_tokens / learner.checkpoint().outputs, learner.checkpoint()

    unknown, _ = cells_of(None)
    none, state = cells_of(0)
    many, _ = cells_of(10)

    assert unknown == USUAL_OUTPUT_TOKENS
    assert none < 0.1 * USUAL_OUTPUT_TOKENS
    assert many == pytest.approx(5_120, rel=0.05)
    restored = RetentionLearner()
    restored.restore(state)
    assert restored.checkpoint() == state
