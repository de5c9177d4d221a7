"""The pure parts of the TensorRT-LLM adapter: outputs, progress, load, adapters, first blocks, model files."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.kv_events.cache_events import StoredBlock
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import LoadReported
from poolgrid.kernel.wire.hashing import BASE_SEED, hash_seed, pack_tokens, unpack_tokens
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind
from poolgrid.kernel.worker_protocol.engine_numbers import UNLIKELY
from poolgrid.plugins.trtllm.core.model_facts import ModelFacts, adapter_number, adapters, model_facts
from poolgrid.plugins.trtllm.core.outputs import OutputCursor, prompt_logprobs
from poolgrid.plugins.trtllm.core.statistics import (
    EngineStatistics,
    KvCacheStatistics,
    load_of,
    parse_statistics,
)
from poolgrid.plugins.trtllm.model_files import read_model_facts
from poolgrid.plugins.trtllm.requests import EngineRequests
from poolgrid.server.workers.engines import root_seeds
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError, ProgressMonitor
from poolgrid.server.workers.engines.lifecycle.rank_load import RankLoad
from poolgrid.server.workers.engines.root_seeds import RootSeeds, root_digest, root_key, salt_ids
from tests.fakes.tensorrt_llm._fake.block_key import block_key_hash, radix_key, salt_id, truncated
from tests.fakes.tensorrt_llm.executor.result import CompletionOutput, Logprob
from tests.trtllm.engines import RunningEngine, expected, make_request, running_engine
from tests.trtllm.facts import facts

# -- outputs -----------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(0, 5), max_size=12), looks=st.lists(st.booleans(), max_size=12), first=st.booleans())
def test_a_cursor_takes_every_token_once_however_seldom_it_looks(
    steps: list[int], looks: list[bool], first: bool
) -> None:
    """``first``: the engine has no log probability of the first token, as a decode engine may."""
    output = CompletionOutput(0)
    cursor = OutputCursor(1)
    taken: list[int] = []
    reported: list[tuple[int, float]] = []
    number = 0
    for at, count in enumerate([*steps, 0]):
        for _ in range(count):
            number += 1
            assert output.token_ids is not None
            output.token_ids.append(number)
            if number > 1 or not first:
                output.logprobs = [*(output.logprobs or []), {number: Logprob(-float(number))}]
        if at == len(steps) or (at < len(looks) and looks[at]):
            tokens, logprobs = cursor.take(output)
            taken += unpack_tokens(tokens)
            reported += [(each.token_id, each.logprob) for each in logprobs or ()]
    assert taken == list(range(1, number + 1))
    assert reported == [(each, 0.0 if first and each == 1 else -float(each)) for each in taken]
    assert cursor.taken == number


def test_alternatives_are_the_best_ones_and_the_tokens_own_is_always_there() -> None:
    output = CompletionOutput(0, token_ids=[7], logprobs=[{7: Logprob(-3.0), 8: Logprob(-1.0), 9: Logprob(-2.0)}])
    for count, wanted in ((0, ()), (1, ((8, -1.0),)), (2, ((8, -1.0), (9, -2.0)))):
        _, (only,) = OutputCursor(count).take(output)  # type: ignore[misc]
        assert (only.logprob, only.alternatives) == (-3.0, wanted)
    plain = CompletionOutput(0, token_ids=[7], logprobs=[-0.5])
    assert OutputCursor(0).take(plain)[1][0].logprob == -0.5  # type: ignore[index]
    assert OutputCursor(None).take(output) == (pack_tokens([7]), None)


def test_prompt_log_probabilities_belong_to_the_tokens_from_the_second_on() -> None:
    rows = [{5: Logprob(-1.0)}, {9: Logprob(-0.1), 6: Logprob(-2.0)}, {1: Logprob(-0.2)}, {8: Logprob(-0.3)}]
    made = prompt_logprobs([4, 5, 6, 7], rows, 1)
    assert [(each.token_id, each.logprob) for each in made] == [(5, -1.0), (6, -2.0), (7, UNLIKELY)]
    assert prompt_logprobs([4, 5, 6, 7], rows[2:], 1) == made[2:], "rows of a reused prefix are missing"
    assert prompt_logprobs([4], rows[:1], 1) == ()
    assert prompt_logprobs([4], [], 1) == ()


# -- progress ----------------------------------------------------------------------------------------------------------


def test_a_full_batch_is_no_stall_and_a_passed_over_transfer_is() -> None:
    monitor = ProgressMonitor(100.0)
    monitor.entered("stuck", True, 0.0)
    monitor.entered("later", True, 10.0)
    monitor.entered("computes", False, 20.0)
    for now in range(30, 150, 10):
        monitor.ended("another", now)
        assert monitor.stall(now) is None, "others move and none has passed it"
    monitor.moved("later", 150.0)
    stall = monitor.stall(201.0)
    assert stall is not None
    assert "'stuck' has waited 201 ms for its KV while later ones began" in stall.reason


def test_a_stall_is_seen_though_every_client_gives_up_before_it() -> None:
    monitor = ProgressMonitor(100.0)
    for at in range(3):
        monitor.entered(f"r{at}", False, 1000.0 * at)
        assert monitor.stall(1000.0 * at + 30) is None, "no more than 90 ms so far"
        monitor.given_up(f"r{at}", 1000.0 * at + 30)
        assert monitor.stall(1000.0 * at + 900) is None, "an idle engine owes nothing"
    monitor.entered("r3", False, 5000.0)
    stall = monitor.stall(5011.0)
    assert stall is not None
    assert (stall.total, stall.certain) == (True, False), "each may have been given up at once"
    assert monitor.stall(5101.0) is not None
    assert monitor.stall(5101.0).certain  # type: ignore[union-attr]
    monitor.proved(5102.0)
    assert monitor.stall(5103.0) is None


def test_clients_that_give_up_one_after_another_are_no_movement() -> None:
    monitor = ProgressMonitor(100.0)
    monitor.entered("r0", False, 0.0)
    for at in range(1, 6):
        monitor.entered(f"r{at}", False, 30.0 * at)
        monitor.given_up(f"r{at - 1}", 30.0 * at + 1)
    stall = monitor.stall(150.0)
    assert stall is not None
    assert stall.certain


# -- load --------------------------------------------------------------------------------------------------------------


def test_the_books_return_to_zero_and_count_blocks_as_the_sequence_grows() -> None:
    load = RankLoad(4)
    load.assume_total_blocks(3)
    load.entered("a", 10, computes=True)
    load.entered("b", 6, computes=False)
    assert load.report(5) == LoadReported(0, 2, 10, 0, 5, 3)
    assert load.grew("a", 11) == (True, 3)
    assert load.grew("a", 13) == (False, None)
    assert load.grew("a", 14) == (False, 4)
    assert load.report(0) == LoadReported(1, 1, 0, 3, 0, 3), "never more blocks than there are"
    load.keep("a")
    assert (load.report(0).running_requests, load.report(0).active_blocks) == (0, 3)
    load.left("a")
    load.left("b")
    load.left("unknown")
    assert load.report(0) == LoadReported(0, 0, 0, 0, 0, 3)


def test_the_engines_statistics_count_while_it_works() -> None:
    load = RankLoad(4)
    numbers = EngineStatistics(
        iteration=9,
        active_requests=3,
        queued_requests=2,
        kv_cache=KvCacheStatistics(max_num_blocks=50, used_num_blocks=7),
    )
    load.reported(load_of(numbers, 0))
    assert load.report(0) == LoadReported(0, 0, 0, 0, 0, 50, 9), "of a step before it rested"
    load.entered("a", 10, computes=True)
    assert load.report(0) == LoadReported(0, 1, 10, 0, 0, 50, 9), "still of that step"
    load.reported(load_of(numbers, 0))
    assert load.report(1) == LoadReported(3, 2, 10, 7, 1, 50, 9)


# -- tenants -----------------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64),
    salt=st.text(max_size=9),
    lora=st.integers(1, 2**31),
)
def test_root_keys_are_the_engines_hashes(tokens: list[int], salt: str, lora: int) -> None:
    assert root_key(tokens) == block_key_hash(tokens)
    for known, algorithm in zip(salt_ids(salt), ("sha256", "blake3"), strict=False):
        theirs = salt_id(salt, algorithm) if salt else None
        assert root_key(tokens, known, lora) == block_key_hash(tokens, 0, theirs, lora)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64), salt=st.text(max_size=9))
def test_root_digests_are_the_names_of_the_stream(tokens: list[int], salt: str) -> None:
    for lora in (None, 0, 2**31):
        theirs = truncated(radix_key(None, tokens, salt_id(salt) if salt else None, lora))
        assert root_digest(pack_tokens(tokens), salt_ids(salt)[0], lora) == theirs


def test_a_first_block_of_the_stream_is_tried_with_the_salts_that_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_seeds, "SALTS_MAX", 2)
    roots = RootSeeds(4)
    tokens = pack_tokens([1, 2, 3, 4])
    names = {salt: root_digest(tokens, salt_ids(salt)[0]) for salt in ("", "a", "b", "c")}
    assert roots.of_stream(tokens, 99) == BASE_SEED, "the engine may name otherwise"
    for salt in ("a", "b", ""):
        roots.note_salt(salt)
    assert roots.of_stream(tokens, names["a"]) == hash_seed("", "a")
    assert roots.of_stream(tokens, names[""]) == BASE_SEED
    assert roots.of_stream(tokens, 99) is None, "it names as we do, so this is somebody's"
    assert roots.of_stream(tokens, names["c"]) is None
    roots.note_salt("c")
    assert roots.of_stream(tokens, names["c"]) == hash_seed("", "c")
    assert roots.of_stream(tokens, names["b"]) is None, "the one that was not used is forgotten"
    assert roots.of_stream(tokens, names["a"]) == hash_seed("", "a")


def block(tokens: list[int], key: int) -> StoredBlock:
    return StoredBlock(block_hash=key, tokens=pack_tokens(tokens), cache_level=0, multimodal=False)


def test_a_first_block_is_its_tenants_or_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_seeds, "ROOTS_MAX", 4)
    roots = RootSeeds(4)
    tokens = [1, 2, 3, 4]
    assert roots(block(tokens, 99)) == BASE_SEED, "no request with these tokens had a tenant"
    roots.note(pack_tokens([*tokens, 5]), "", None, "s")
    roots.note(pack_tokens(tokens[:3]), "", None, "s")
    assert {roots(block(tokens, root_key(tokens, each))) for each in salt_ids("s")} == {hash_seed("", "s")}
    assert roots(block(tokens, 99)) is None, "somebody's: never told under another's name"
    assert roots(block([5] * 4, 98)) == BASE_SEED, "the engine may hash otherwise"
    assert roots(block(tokens, root_key(tokens))) == BASE_SEED
    assert roots(block([5] * 4, 98)) is None, "it hashes as we do, so this is somebody's"
    adapter = adapter_number("a")
    roots.note(pack_tokens(tokens), "a", adapter, "")
    assert roots(block(tokens, root_key(tokens, None, adapter))) == hash_seed("a", "")
    roots.note(pack_tokens(tokens), "a", adapter, "t")
    assert roots(block(tokens, root_key(tokens, salt_ids("s")[0]))) is None, "the oldest is forgotten"


def test_a_salt_is_known_only_where_an_event_names_it() -> None:
    roots = RootSeeds(4)
    tokens = [1, 2, 3, 4]
    named = StoredBlock(block_hash=99, tokens=pack_tokens(tokens), cache_salt="s")
    roots.note(pack_tokens(tokens), "", None, "s")
    assert roots(block(tokens, 98)) is None, "an engine that names no salts says nothing by naming none"
    assert roots(named) == hash_seed("", "s")
    assert roots(block(tokens, 97)) == BASE_SEED, "it names salts"
    roots.note(pack_tokens(tokens), "a", 7, "")
    assert roots(block(tokens, 97)) is None, "it may be the adapter's"
    assert roots(named) is None, "it may be the adapter's too"


def test_adapters_are_called_like_their_directories_and_numbered_by_name() -> None:
    found = adapters({"lora_config": {"lora_dir": ["/models/legal", "/other/médical/"], "lora_ckpt_source": "nemo"}})
    assert list(found) == ["legal", "médical"]
    assert found["legal"].number == adapter_number("legal") >= 1
    assert found["legal"].checkpoint_source == "nemo"
    assert adapters({}) == {}
    with pytest.raises(ValueError, match="both called 'a'"):
        adapters({"lora_config": {"lora_dir": ["/x/a", "/y/a"]}})
    with pytest.raises(ValueError, match="no name"):
        adapters({"lora_config": {"lora_dir": ["/"]}})


# -- the model's files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({}, {}, ModelFacts()),
        ({"eos_token_id": 2, "vocab_size": 100, "max_position_embeddings": 64, "image_token_index": 9}, {},
         ModelFacts((2,), 100, 64, 9)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, ModelFacts((7, 2))),
        ({"text_config": {"vocab_size": 9, "eos_token_id": [1]}}, {}, ModelFacts((1,), 9)),
        ({"eos_token_id": "2", "vocab_size": True, "image_token_id": -5}, {}, ModelFacts()),
        ({}, {"eos_token_id": [None, -1]}, ModelFacts()),
    ],
)  # fmt: skip
def test_a_models_files_say_what_its_card_needs(config: Any, generation: Any, wanted: ModelFacts) -> None:
    assert model_facts(config, generation) == wanted


def test_files_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "generation_config.json").write_text("{")
    assert read_model_facts(str(tmp_path)) == ModelFacts((), 5)
    assert read_model_facts(str(tmp_path / "none")) == ModelFacts()
    assert read_model_facts("no-such/model") == ModelFacts()


EXAMPLE: dict[str, Any] = facts()["iteration_stats_example"]


def example(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(EXAMPLE), **changes}


def test_the_documented_example_is_read() -> None:
    read = parse_statistics(EXAMPLE)

    assert (read.iteration, read.active_requests, read.queued_requests, read.rank) == (154, 1, 0, 0)
    assert read.iteration_latency_ms == pytest.approx(7.00688)
    assert read.kv_cache is not None
    assert (read.kv_cache.max_num_blocks, read.kv_cache.used_num_blocks) == (101256, 3)
    assert read.kv_cache.cache_hit_rate == pytest.approx(0.00128)
    assert load_of(read, cached_blocks=40) == LoadReported(1, 0, 0, 3, 40, 101256, 154)


def test_later_versions_name_the_rank_and_the_tokens_that_wait() -> None:
    batch = {**EXAMPLE["inflightBatchingStats"], "numPausedRequests": 1, "numCtxTokens": 7, "numQueuedCtxTokens": 100}
    read = parse_statistics(
        example(attentionDpRank=3, numActiveRequests=4, numQueuedRequests=2, inflightBatchingStats=batch)
    )

    load = load_of(read, 0)

    assert read.rank == 3
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens) == (3, 3, 107)
    assert load_of(read, 0, prefill_tokens=9).prefill_tokens == 9


@pytest.mark.parametrize(("key", "value"), [("iter", "x"), ("kvCacheStats", [1]), ("iterLatencyMS", {})])
def test_a_wrong_type_is_a_decode_error_that_names_the_key(key: str, value: object) -> None:
    with pytest.raises(DecodeError, match=key):
        parse_statistics(example(**{key: value}))


async def three(told: RunningEngine) -> None:
    """Run three requests, of which the second is the odd one."""
    for number in (1, 2, 3):
        told.engine.submit(make_request(f"r{number}", range(number, number + 10), 6))
    await told.until(lambda: all(told.finished(f"r{number}") for number in (1, 2, 3)))
    for number in (1, 3):
        assert told.output(f"r{number}") == expected(make_request(f"r{number}", range(number, number + 10), 6))


async def test_an_output_is_cut_at_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    take = OutputCursor.take
    longer: list[OutputCursor] = []

    def over(self: OutputCursor, output: Any) -> Any:
        if not longer:
            longer.append(self)
        if longer[0] is self and output.token_ids:
            output = SimpleNamespace(token_ids=[*output.token_ids, *range(50)], logprobs=None)
        return take(self, output)

    monkeypatch.setattr(OutputCursor, "take", over)

    async with running_engine() as told:
        longer.clear()
        last = await told.finish(make_request("r", range(10), 6))
        assert last.finish_reason is FinishReason.LENGTH
        assert len(told.output("r")) == 4 * 6
        assert told.sample("overlong_answers_total") == 1.0
        await three(told)


@pytest.mark.parametrize("place", ["_collect", "_book"])
async def test_a_fault_over_one_output_is_its_own(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = getattr(EngineRequests, place)

    def faulty(self: EngineRequests, active: Any, *rest: Any) -> Any:
        if active.request_id == "r2":
            raise RuntimeError("injected")
        return method(self, active, *rest)

    monkeypatch.setattr(EngineRequests, place, faulty)

    async with running_engine() as told:
        await three(told)
        last = told.last("r2")
        assert last is not None
        assert (last.finish_reason, last.refusal) == (FinishReason.ERROR, RefusalKind.BROKEN)
        assert told.sample("request_faults_total") == 1.0


async def test_a_report_that_is_lost_breaks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine() as told:

        def broken(*_: Any) -> Any:
            raise RuntimeError("injected")

        monkeypatch.setattr(told.engine._report, "_load", broken)
        told.engine.submit(make_request("r", range(10), 6))
        assert told.running is not None
        with pytest.raises(EngineBrokenError, match="injected"):
            async with asyncio.timeout(120):
                await told.running
