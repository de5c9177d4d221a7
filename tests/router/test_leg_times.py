"""What prompts and transfers take is learned from first tokens."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.decision.stage_plan import DECODE_ROLES, PREFILL_ROLES
from poolgrid.kernel.projection.leg_times import (
    AWAITED_PER_WORKER_MAX,
    FORGOTTEN_MS,
    PRIOR_MS_PER_TOKEN,
    TRANSFER_PRIOR,
    LearnedLegTimes,
)
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerKey
from tests.router.fleet_builder import Pool, decided, make_card, worker_key

PREFILL, DECODE = worker_key("p"), worker_key("d")


class Learner:
    """A prefill and a decode worker, whose first tokens come when the test says so."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.join("p", card=make_card(role=Role.PREFILL, max_sequence_length=10**6))
        self.pool.join("d", card=make_card(role=Role.DECODE, max_sequence_length=10**6))
        self.selector = Selector(self.pool.projection, KvAware(), requests_per_worker_factor=1e6)
        assert self.pool.projection.legs is not None
        self.times = self.pool.projection.legs

    def choose(self, request_id: str, tokens: int, at_ms: float, stage: Stage = Stage.PREFILL) -> None:
        request = RoutingRequest(request_id, "m", tokens, 16, -(-tokens // 16), stage=stage)
        roles = DECODE_ROLES if stage is Stage.DECODE else PREFILL_ROLES
        decision = decided(self.selector.select(WorkerWanted(request, [], at_ms, 0, roles=roles)))
        self.selector.book(decision, [], at_ms)

    def prompt_ms(self, tokens: float, now_ms: float, queued: float = 0.0) -> tuple[float, float]:
        return self.times.prompt_ms(PREFILL, queued, tokens, now_ms)


def test_a_pool_without_prefill_workers_has_nothing_to_learn() -> None:
    pool = Pool()
    pool.join("a")

    assert pool.projection.legs is None
    assert pool.projection.observers == ()


def test_before_the_first_prompt_the_measured_rate_holds() -> None:
    assert Learner().prompt_ms(1000.0, 0.0, 500.0) == (500 * PRIOR_MS_PER_TOKEN, 1000 * PRIOR_MS_PER_TOKEN)


def test_prompts_in_a_queue_are_timed_one_after_the_other() -> None:
    learner = Learner()
    for number in range(60):
        learner.choose(f"r{number}", 1000, 0.0)
    for number in range(60):
        learner.times.on_first_token(PREFILL, f"r{number}", 100.0 * (number + 1))

    assert learner.prompt_ms(1000.0, 6000.0)[1] == pytest.approx(100.0, rel=0.1)


def test_prompts_of_one_step_share_its_time() -> None:
    learner = Learner()
    for number in range(60):
        learner.choose(f"r{number}", 1000, 0.0)
    for number in range(60):
        learner.times.on_first_token(PREFILL, f"r{number}", 200.0 * (number // 2 + 1))

    assert learner.prompt_ms(1000.0, 6000.0)[1] == pytest.approx(100.0, rel=0.1)


def test_what_is_done_of_the_oldest_prompt_is_no_queue() -> None:
    learner = Learner()
    learner.choose("r", 1000, 0.0)

    assert learner.prompt_ms(1.0, 10.0, 1000.0)[0] == pytest.approx(1000 * PRIOR_MS_PER_TOKEN - 10.0)


def test_a_worker_that_answers_no_more_is_expected_to_take_as_long_again() -> None:
    learner = Learner()
    learner.choose("r", 1000, 0.0)

    assert learner.prompt_ms(1.0, 5000.0, 1000.0)[0] == pytest.approx(5000.0 + 1000 * PRIOR_MS_PER_TOKEN)


def test_a_transfer_is_a_line_over_tokens() -> None:
    learner = Learner()
    assert learner.times.transfer_ms(0.0, 0.0) == pytest.approx(TRANSFER_PRIOR[0][1])
    for number in range(200):
        tokens = 1000 + 7000 * (number % 2)
        learner.choose(f"r{number}", tokens, 0.0, Stage.DECODE)
        learner.times.on_first_token(DECODE, f"r{number}", 5.0 + tokens / 1000)

    assert learner.times.transfer_ms(1000.0, 20.0) == pytest.approx(6.0, abs=6.0)
    assert learner.times.transfer_ms(8000.0, 20.0) == pytest.approx(13.0, abs=13.0)
    assert learner.prompt_ms(1000.0, 10.0)[1] == 1000 * PRIOR_MS_PER_TOKEN


def test_while_a_transfer_is_late_the_next_is_expected_to_take_as_much_longer() -> None:
    learner = Learner()
    learner.choose("r", 8900, 0.0, Stage.DECODE)
    prior_ms = TRANSFER_PRIOR[1][1]

    assert learner.times.transfer_ms(8900.0, 400.0) == pytest.approx(prior_ms)
    assert learner.times.transfer_ms(8900.0, 5000.0) == pytest.approx(5000.0 + prior_ms)

    learner.times.on_first_token(DECODE, "r", 44_000.0)

    assert learner.times.transfer_ms(8900.0, 44_000.0) > 20_000.0


def test_slow_transfers_are_forgotten_so_that_another_is_tried() -> None:
    learner = Learner()
    learner.choose("r", 8900, 0.0, Stage.DECODE)
    learner.times.on_first_token(DECODE, "r", 44_000.0)

    assert learner.times.transfer_ms(8900.0, 44_000.0 + FORGOTTEN_MS) > 20_000.0
    assert learner.times.transfer_ms(8900.0, 44_001.0 + FORGOTTEN_MS) == pytest.approx(TRANSFER_PRIOR[1][1])


@given(st.lists(st.tuples(st.integers(1, 30_000), st.floats(0, 1e5)), max_size=50), st.integers(0, 10**6))
def test_a_transfer_never_takes_less_than_nothing_nor_less_for_more(seen: list[tuple[int, float]], tokens: int) -> None:
    learner = Learner()
    for number, (moved, ms) in enumerate(seen):
        learner.choose(f"r{number}", moved, 0.0, Stage.DECODE)
        learner.times.on_first_token(DECODE, f"r{number}", ms)

    assert 0.0 <= learner.times.transfer_ms(tokens, 1e5) <= learner.times.transfer_ms(tokens + 1000, 1e5)


def test_a_release_before_the_first_tokens_event_loses_nothing() -> None:
    learner = Learner()
    learner.choose("r", 8192, 0.0)
    learner.pool.projection.release(PREFILL, "r")
    learner.times.on_first_token(PREFILL, "r", 1000.0)

    assert learner.prompt_ms(8192.0, 1000.0)[1] > 500.0


def test_what_is_awaited_is_bounded_and_forgotten_with_its_worker() -> None:
    learner = Learner()
    for number in range(AWAITED_PER_WORKER_MAX + 10):
        learner.choose(f"r{number}", 16, 0.0)
    [known] = [each for each in learner.times.checkpoint().workers if each.worker_id == "p"]
    assert len(known.times.prompts) == AWAITED_PER_WORKER_MAX

    learner.times.on_left(PREFILL)

    assert [each.worker_id for each in learner.times.checkpoint().workers] == [""]


def test_a_checkpoint_restores_everything() -> None:
    learner = Learner()
    for number in range(5):
        learner.choose(f"r{number}", 1000 + number, float(number))
        learner.choose(f"t{number}", 1000 + number, float(number), Stage.DECODE)
    learner.times.on_first_token(PREFILL, "r0", 70.0)
    learner.times.on_first_token(DECODE, "t0", 70.0)
    packed = msgspec.msgpack.encode(learner.times.checkpoint())
    other = LearnedLegTimes()
    other.restore(msgspec.msgpack.decode(packed))

    for times in (learner.times, other):
        times.on_first_token(PREFILL, "r1", 100.0)
    assert msgspec.msgpack.encode(other.checkpoint()) == msgspec.msgpack.encode(learner.times.checkpoint())
    assert other.prompt_ms(WorkerKey(PREFILL.worker_id, 0), 10.0, 10.0, 200.0) == learner.prompt_ms(10.0, 200.0, 10.0)
