"""TensorRT-LLM as it is installed, compared with the contract: the fake, or a real one with a model.

``POOLGRID_TRTLLM_MODEL=/models/Qwen3-0.6B python -m pytest -m trtllm -p no:xdist`` on a machine with a GPU.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import Role
from tests.fakes import install_tensorrt_llm, tensorrt_llm_of
from tests.trtllm.engines import make_request, running_engine
from tests.trtllm.installation import (
    BLOCK,
    MODEL,
    PROBES,
    PROMPT,
    engine_contradictions,
    make_llm,
    surface_contradictions,
)

pytestmark = pytest.mark.trtllm


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    install_tensorrt_llm()


def test_the_installations_surface_is_the_contracts() -> None:
    found = surface_contradictions()
    assert not found, "this installation contradicts the contract:\n" + "\n".join(found)


@pytest.fixture(scope="module")
def behaviour() -> dict[str, list[str]]:
    """What every probe finds, all on one engine: loading a model takes a minute."""

    async def ask() -> dict[str, list[str]]:
        llm = make_llm()
        try:
            return await engine_contradictions(llm)
        finally:
            llm.shutdown()

    return asyncio.run(ask())


@pytest.mark.parametrize("name", PROBES)
def test_the_engine_does_what_the_contract_says(name: str, behaviour: dict[str, list[str]]) -> None:
    assert not behaviour[name], "this installation contradicts the contract:\n" + "\n".join(behaviour[name])


async def test_a_worker_drives_it() -> None:
    """Our engine over this one: a request, its repetition from the cache, a cancelled one, and the index of it all."""

    settings: dict[str, Any] = {"model_path": MODEL or "m", "kv_block_size": BLOCK, "max_batch_size": 8}
    if MODEL:
        settings |= {"free_gpu_memory_fraction": 0.3, "trust_remote_code": True}
    async with running_engine(Role.AGGREGATED, **settings) as told:
        first = await told.finish(make_request("first", PROMPT, 16, temperature=0.0, ignore_eos=True))
        again = await told.finish(make_request("again", PROMPT, 16, temperature=0.0, ignore_eos=True))
        assert (first.error, again.error) == (None, None)
        assert told.output("again") == told.output("first")
        assert max(delta.cached_tokens or 0 for delta in told.deltas["again"]) >= BLOCK
        told.engine.submit(make_request("given-up", PROMPT[:5], 30_000, temperature=0.0, ignore_eos=True))
        await told.until(lambda: told.last("given-up"))
        told.engine.cancel("given-up")
        await told.until(lambda: told.finished("given-up"))

        def stored() -> int:
            chains = [event for event in told.events.get(0, []) if isinstance(event, BlocksStored)]
            return sum(len(unpack_hashes(chain.sequence_hashes)) for chain in chains)

        await told.until(lambda: stored() >= 2)
        assert told.engine.unhealthy_reason == ""


@pytest.mark.skipif(bool(MODEL), reason="about the check itself, on releases that the fake pretends to be")
@pytest.mark.parametrize(
    ("version", "lines"),
    [
        (
            "1.3",
            [
                "LLM.generate_async.priority: is in the installation, not in the contract",
                "DisaggregatedParams.first_gen_log_probs: is in the installation, not in the contract",
            ],
        ),
    ],
)
def test_the_check_names_what_another_release_has(version: str, lines: list[str]) -> None:
    with tensorrt_llm_of(version):
        found = surface_contradictions()
        assert set(lines) <= set(found)


@pytest.mark.skipif(bool(MODEL), reason="about the check itself, on what the fake can do")
def test_the_check_names_what_an_engine_does_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    with tensorrt_llm_of("1.3") as later:
        monkeypatch.setattr(later._fake.behaviour, "behaviour", later._fake.behaviour.Behaviour())
        cache = later.llmapi.KvCacheConfig(
            event_buffer_max_size=100, use_kv_cache_manager_v2=True, kv_cache_event_hash_algo="v2_sha256"
        )

        async def ask() -> dict[str, list[str]]:
            with later.LLM("m", skip_tokenizer_init=True, kv_cache_config=cache, enable_iter_perf_stats=True) as llm:
                return await engine_contradictions(llm)

        found = asyncio.run(ask())
        assert any("has the hash" in line for line in found["events"])
        assert any("has the keys" in line for line in found["events"])
        assert found["a result"] == []
