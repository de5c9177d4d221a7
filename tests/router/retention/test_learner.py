"""What is learnt of prompts is said when it pays, never against the order of their blocks, and of one seed only."""

from __future__ import annotations

from collections.abc import Iterator

from poolgrid.router.core.candidates import RoutingRequest
from poolgrid.router.core.retention.learner import SPENT, RetentionLearner
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.requests import KvRetention

WORKER = WorkerKey(WorkerId("w"))
BLOCKS = 64
"""Of 512 tokens each, as many as granules."""

Sent = tuple[int, KvRetention | None]


def prompt(name: str, blocks: int) -> list[int]:
    return [stable_u64(f"{name} {at}") for at in range(blocks)]


def asked(request_id: str, isl: int, seed: int = 0) -> RoutingRequest:
    return RoutingRequest(request_id, "m", isl, 512, -(-isl // 512), seed=seed)


def mixed(learner: RetentionLearner, minutes: int, seed: int = 0) -> Iterator[Sent]:
    """Let six prompts of 8 blocks come in turn, and after each one that never comes again, one a second.

    What LRU keeps is 8 prompts, and 12 come until one comes again.
    """
    for second in range(minutes * 60):
        number = second // 2 % 6 if second % 2 == 0 else 100 + second
        now_ms = second * 1000.0
        path, request = prompt(f"{seed} {number}", 8), asked(f"r{seed} {now_ms}", 4_200, seed)
        said = learner.advise(request, path, now_ms)
        learner.begin(WORKER, BLOCKS, request.request_id, request, path, now_ms)
        learner.started(WORKER, request.request_id, 0)
        learner.end(WORKER, request.request_id, now_ms + 500.0)
        yield number, said


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


def test_where_everything_fits_nothing_is_said() -> None:
    learner = RetentionLearner()
    for second in range(600):
        path, request = prompt(str(second % 4), 8), asked(f"r{second}", 4_200)
        assert learner.advise(request, path, second * 1000.0) is None
        learner.begin(WORKER, BLOCKS, request.request_id, request, path, second * 1000.0)
        learner.end(WORKER, request.request_id, second * 1000.0 + 500.0)


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


def test_the_same_requests_at_the_same_times_teach_the_same() -> None:
    one, other = RetentionLearner(), RetentionLearner()
    expected = list(mixed(one, 10))
    found = []
    for number, said in mixed(other, 10):
        # Looking changes nothing.
        other.advise(asked("preview", 4_200), prompt("0 7", 8), 1e9)
        found.append((number, said))
    assert found == expected


def test_short_prompts_and_lost_workers_leave_nothing_behind() -> None:
    learner = RetentionLearner()
    learner.begin(WORKER, BLOCKS, "short", asked("short", 300), [], 0.0)
    learner.end(WORKER, "short", 1.0)
    assert len(learner) == 0
    learner.begin(WORKER, BLOCKS, "long", asked("long", 4_200), prompt("x", 8), 2.0)
    learner.drop(WORKER)
    learner.end(WORKER, "long", 3.0)
    learner.started(WORKER, "long", 512)
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
            learner.end(WORKER, request.request_id, now_ms + 500.0)
        assert said is not None
        return said

    spent = last_of(ends_alike=False)
    assert (spent.ranges[-1].priority, spent.decode_priority) == (SPENT, SPENT)
    kept = last_of(ends_alike=True)
    assert kept.ranges[-1].priority == kept.decode_priority > SPENT
