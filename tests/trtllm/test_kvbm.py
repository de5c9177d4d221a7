"""Dynamo's block manager in an engine: what is refused, what is set, and what is published and followed.

``POOLGRID_KVBM=DIR`` names a folder with the package ``kvbm`` (``pip download kvbm``, unpacked): its own configuration
is then compared with ours. Its connector itself needs a GPU.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from poolgrid.kernel.kv_events.pub import EngineCleared, EngineRemoved, EngineStored, decode_pub
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.requests import Routing
from poolgrid.kernel.worker_protocol.refusal import UnableError
from poolgrid.plugins.trtllm.arguments.contract import ContractError
from poolgrid.plugins.trtllm.arguments.engine_arguments import KVBM_CONNECTOR, Layer, resolve
from poolgrid.plugins.trtllm.kvbm import (
    ACK_PORT,
    CACHES,
    CONSOLIDATES,
    ENGINE_PORT,
    LEADER_PORT,
    KvbmPorts,
    claim_ports,
)
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from tests.trtllm.engines import BLOCK, make_request, running_engine
from tests.trtllm.test_feed import behave
from tests.workers.builders import fold

PACKAGE = os.environ.get("POOLGRID_KVBM", "")
ROOM = {CACHES[0]: "4"}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"disaggregation_mode": "decode"}, "kv_connector_config: is KVBM's on a decode worker"),
        ({"modality": "multimodal"}, "kv_connector_config: is KVBM's with modality multimodal"),
        ({"override_engine_args": {"enable_lora": True}}, "enable_lora: is true, and KVBM"),
        (
            {"override_engine_args": {"lora_config": {"lora_dir": ["/a"]}}},
            "lora_config: .*adapters would share",
        ),
        (
            {"enable_attention_dp": True, "tensor_parallel_size": 2},
            "enable_attention_dp: is true",
        ),
    ],
)
def test_kvbm_is_refused_with_what_it_cannot_tell_apart(given: dict[str, Any], fault: str) -> None:
    override = Layer("o", given.pop("override_engine_args", {}))
    with pytest.raises(ContractError, match=fault):
        resolve(TrtllmSettings(model_path="m", connector="kvbm", **given), None, override)


def test_a_file_that_names_the_connector_is_refused_alike() -> None:
    file = Layer("engine.yaml", {"kv_connector_config": KVBM_CONNECTOR, "enable_lora": True})
    with pytest.raises(ContractError, match=r"enable_lora.*\(from engine.yaml\)"):
        resolve(TrtllmSettings(model_path="m"), file)


def test_ports_are_free_and_those_that_are_given_stay() -> None:
    made: dict[str, str] = {**ROOM, ENGINE_PORT: "20081"}
    ports = claim_ports(made)
    assert ports is not None
    assert (ports.engine, made[ENGINE_PORT]) == (20081, "20081")
    assert ports.output == int(made[LEADER_PORT]) + 1000
    assert len({made[LEADER_PORT], made[ACK_PORT], made[ENGINE_PORT], str(ports.output)}) == 4
    assert claim_ports({**made, LEADER_PORT: "56001"}) == KvbmPorts(20081, 57001)
    assert claim_ports({**ROOM, CONSOLIDATES: "0"}) is None


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, "DYN_KVBM_CPU_CACHE_GB is not set"),
        ({**ROOM, LEADER_PORT: "65000"}, "DYN_KVBM_LEADER_ZMQ_PUB_PORT is '65000', allowed are ports from 1 to 64535"),
        ({**ROOM, ENGINE_PORT: "x"}, "DYN_KVBM_TRTLLM_ZMQ_PORT is 'x'"),
    ],
)
def test_variables_that_kvbm_cannot_use_are_named(given: dict[str, str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        claim_ports(dict(given))


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENGINE_PORT, LEADER_PORT, ACK_PORT, CONSOLIDATES):
        monkeypatch.setenv(name, "")  # what the start sets is gone after the test
    monkeypatch.delenv(CONSOLIDATES)
    monkeypatch.setenv(CACHES[0], "4")


class BlockManager:
    """Keeps every block that the engine stores until it is told to let go, and publishes that, as KVBM does."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._from = context.socket(zmq.SUB)
        self._from.subscribe(b"")
        self._from.connect(f"tcp://127.0.0.1:{os.environ[ENGINE_PORT]}")
        self._to = context.socket(zmq.PUB)
        self._to.bind(f"tcp://127.0.0.1:{int(os.environ[LEADER_PORT]) + 1000}")
        self._seq = 0
        self.stored: dict[int, None] = {}
        self.engine: dict[int, None] = {}

    def work(self) -> None:
        while self._from.poll(0):
            topic, _, payload = self._from.recv_multipart()
            assert topic == b""
            batch = decode_pub(payload)
            assert not batch.ignored
            for event in batch.events:
                if isinstance(event, EngineStored):
                    assert event.block_size == BLOCK
                    self.engine.update(dict.fromkeys(event.hashes))
                elif isinstance(event, EngineRemoved):
                    for each in event.hashes:
                        del self.engine[each]
                elif isinstance(event, EngineCleared):
                    self.engine.clear()
            raw = msgspec.msgpack.decode(payload)[1]
            passed = [each for each in raw if each["type"] == "BlockStored"]
            fresh = [each for each in passed if any(name not in self.stored for name in each["block_hashes"])]
            self.stored.update(dict.fromkeys(name for each in passed for name in each["block_hashes"]))
            if fresh:
                self._send(fresh)

    def drop(self) -> None:
        """Let go of all that the engine does not hold."""
        gone = [each for each in self.stored if each not in self.engine]
        for each in gone:
            del self.stored[each]
        self._send([{"type": "BlockRemoved", "block_hashes": gone}])

    def _send(self, events: list[Any]) -> None:
        self._to.send_multipart([b"", self._seq.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, events, 0])])
        self._seq += 1

    def close(self) -> None:
        self._from.close(0)
        self._to.close(0)


@pytest.mark.usefixtures("variables")
async def test_blocks_that_left_the_gpu_are_known_on_the_host_while_kvbm_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behave(monkeypatch, device_blocks=12, block_bytes=1)
    context: zmq.Context[Any] = zmq.Context()
    async with running_engine(connector="kvbm", max_batch_size=4) as told:
        manager = BlockManager(context)
        try:
            described = told.engine.describe()
            assert "kvbm" in described

            def held() -> dict[Tier, set[int]]:
                return fold(told.events.get(0, []))

            async def until(holds: Any) -> None:
                async with asyncio.timeout(120):
                    while not holds():
                        manager.work()
                        await asyncio.sleep(0.01)

            await until(lambda: told.engine.describe()["kvbm"]["events"][0]["state"] == "live")  # type: ignore[index]
            for number in range(6):  # more than the GPU holds
                await told.finish(make_request(f"r{number}", range(100 * number, 100 * number + 16), 2))
                await until(lambda known=4 * (number + 1): len(held()[Tier.HOST]) == known)
            everything = held()[Tier.HOST]
            assert len(everything) > len(held()[Tier.DEVICE]) > 0
            await until(lambda: len(manager.engine) == len(held()[Tier.DEVICE]))
            manager.drop()
            await until(lambda: held()[Tier.HOST] == held()[Tier.DEVICE])
            assert fold(told.engine.restate(0)) == held()
        finally:
            manager.close()
    context.term()


@pytest.mark.parametrize("given", [{"routing": Routing(cache_salt="t")}, {"prompt_logprobs": 0}])
@pytest.mark.usefixtures("variables")
async def test_requests_that_need_more_than_tokens_are_refused_by_name(given: dict[str, Any]) -> None:
    async with running_engine(connector="kvbm") as told:
        with pytest.raises(UnableError, match=r"is given, and KVBM .* by their tokens alone"):
            told.engine.submit(make_request(**given))


# -- the package itself ------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(not PACKAGE, reason="needs the package kvbm: POOLGRID_KVBM=DIR")


@pytest.fixture
def configuration() -> Iterator[Any]:
    """The package's own consolidator configuration; the package imports a compiled library, these files do not."""
    folder = Path(PACKAGE, "kvbm")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kvbm"}
    sys.modules["kvbm"] = ModuleType("kvbm")
    try:
        module = ModuleType("none of them")
        for name, file in (("kvbm.utils", "utils.py"), ("kvbm.config", "trtllm_integration/consolidator_config.py")):
            spec = importlib.util.spec_from_file_location(name, folder / file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        yield module
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvbm"]:
            del sys.modules[name]
        sys.modules.update(before)


@real
@pytest.mark.usefixtures("variables")
def test_the_package_derives_the_ports_that_we_follow(configuration: Any) -> None:
    ports = claim_ports()
    assert ports is not None
    engine, output, follow = configuration.get_consolidator_endpoints()
    assert engine == f"tcp://*:{ports.engine}"
    assert (output, follow) == (f"tcp://0.0.0.0:{ports.output}", f"tcp://127.0.0.1:{ports.output}")
    assert configuration.should_enable_consolidator({"kv_connector_config": KVBM_CONNECTOR})


@real
def test_the_package_has_the_connector_and_reads_the_variables() -> None:
    folder = Path(PACKAGE, "kvbm", "trtllm_integration", "connector")
    sources = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
    classes = {
        node.name for text in sources.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    }
    assert {KVBM_CONNECTOR["connector_scheduler_class"], KVBM_CONNECTOR["connector_worker_class"]} <= classes
    leader = sources["kvbm_connector_leader.py"]
    assert all(name in leader for name in (ENGINE_PORT, LEADER_PORT, CONSOLIDATES))
    assert "lora_name=None, salt_hash=None" in leader, "it tells adapters and salts apart now: refusals can go"
