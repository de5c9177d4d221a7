"""Tensors between workers: bit for bit, over both ways, and nothing kept for nobody."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.multimodal import TensorDescriptor
from poolgrid.kernel.wire.requests import RefusalKind
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor, TensorUnavailable
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.tensor_transfer.nixl_transfer import NixlMissing, NixlTensorTransfer, make_agent
from poolgrid.server.workers.tensor_transfer.tensor_store import TensorMetrics, TensorStore
from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

PATIENCE_S = 120.0
HAS_NIXL = importlib.util.find_spec("nixl") is not None
TRANSPORTS = [
    "zmq",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed (poolgrid[nixl])")
    ),
]


class End:
    """One worker's end, and what it was told."""

    def __init__(self, transfer: TensorTransfer, store: TensorStore, registry: CollectorRegistry) -> None:
        self.transfer = transfer
        self.store = store
        self.registry = registry
        self.gone: list[tuple[str, bool]] = []
        self._changed = asyncio.Event()
        transfer.on_gone(self._note)

    def _note(self, tensor_id: str, expired: bool) -> None:
        self.gone.append((tensor_id, expired))
        self._changed.set()

    async def until_gone(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.gone) < count:
                self._changed.clear()
                await self._changed.wait()

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"poolgrid_worker_{name}", labels)


@asynccontextmanager
async def two_ends(
    transport: str, *, lease_ms: float = 60_000, bytes_max: int = 64_000_000, timeout_ms: float = 20_000
) -> AsyncIterator[tuple[End, End]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends: list[End] = []
    try:
        for name in ("source", "taker"):
            registry = CollectorRegistry()
            metrics = TensorMetrics(registry)
            store = TensorStore(name, bytes_max, lease_ms)
            clock = SystemClock()
            common: dict[str, Any] = {
                "context": context,
                "host": "127.0.0.1",
                "port": 0,
                "advertise_host": "",
                "store": store,
                "clock": clock,
                "metrics": metrics,
                "chunk_bytes": 65_536,
                "timeout_ms": timeout_ms,
            }
            transfer = TensorTransfer(**common)
            if transport == "nixl":
                transfer = NixlTensorTransfer(make_agent(name), name, **common)
            ends.append(End(transfer, store, registry))
        yield ends[0], ends[1]
    finally:
        for end in ends:
            await end.transfer.close()
        await asyncio.to_thread(context.term)


def run(
    scenario: Callable[[End, End], Awaitable[None]],
    transport: str = "zmq",
    *,
    lease_ms: float = 60_000,
    bytes_max: int = 64_000_000,
    timeout_ms: float = 20_000,
) -> None:
    async def go() -> None:
        async with two_ends(transport, lease_ms=lease_ms, bytes_max=bytes_max, timeout_ms=timeout_ms) as (one, other):
            await scenario(one, other)

    asyncio.run(go())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_arrive_bit_for_bit_and_are_let_go_of(transport: str) -> None:
    async def scenario(source: End, taker: End) -> None:
        numbers = np.random.default_rng(7)
        tensors: list[Tensor] = [
            numbers.random((577, 1024), np.float32),  # many chunks, the last one partial
            numbers.random((3, 5)).astype(np.float16)[:, ::2],  # not contiguous
            np.arange(6, dtype=">u2").reshape(2, 3),  # the other byte order
            np.array(4.5),  # no dimension
            np.empty((0, 8), np.float32),  # no bytes
        ]
        offers = [source.transfer.offer(f"image {place}", tensor) for place, tensor in enumerate(tensors)]
        fetched = await asyncio.gather(*(taker.transfer.fetch(offer) for offer in offers))

        for tensor, arrived in zip(tensors, fetched, strict=True):
            assert arrived.shape == tensor.shape
            assert arrived.dtype == tensor.dtype.newbyteorder("<")
            np.testing.assert_array_equal(arrived, tensor)
        await source.until_gone(len(offers))
        assert sorted(source.gone) == sorted((offer.tensor_id, False) for offer in offers)
        assert (len(source.store), source.store.held_bytes) == (0, 0)
        # What has no bytes needs no memory to be read from.
        by_memory = len(tensors) - 1 if transport == "nixl" else len(tensors)
        assert taker.sample("tensor_fetches_total", transport=transport, outcome="fetched") == by_memory
        assert source.sample("tensor_kept_bytes") == 0

    run(scenario, transport)


def test_a_source_with_nixl_serves_a_taker_without_it() -> None:
    if not HAS_NIXL:
        pytest.skip("the nixl wheel is not installed (poolgrid[nixl])")

    async def scenario(source: End, taker: End) -> None:
        offer = source.transfer.offer("x", np.arange(100_000, dtype=np.int64))
        assert offer.nixl is not None
        plain = msgspec.structs.replace(offer, nixl=None)

        assert (await taker.transfer.fetch(plain)).sum() == 99_999 * 50_000
        await source.until_gone(1)

    run(scenario, "nixl")


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed")
def test_without_the_wheel_the_message_says_what_to_do() -> None:
    with pytest.raises(NixlMissing, match=r"install poolgrid\[nixl\], or choose zmq"):
        make_agent("a")


def test_a_tensor_that_nobody_comes_for_is_gone_after_its_lease() -> None:
    async def scenario(source: End, taker: End) -> None:
        offer = source.transfer.offer("x", np.ones(10))
        await source.until_gone(1)

        assert source.gone == [(offer.tensor_id, True)]
        assert source.sample("tensor_lease_expiries_total") == 1
        with pytest.raises(TensorUnavailable, match="no longer keeps it"):
            await taker.transfer.fetch(offer)
        assert taker.sample("tensor_fetches_total", transport="zmq", outcome="failed") == 1

    run(scenario, lease_ms=20)


def test_more_than_the_store_holds_is_refused_and_nothing_is_thrown_out_for_it() -> None:
    async def scenario(source: End, taker: End) -> None:
        first = source.transfer.offer("x", np.ones(100, np.uint8))
        with pytest.raises(RefusedError) as caught:
            source.transfer.offer("y", np.ones(1, np.uint8))

        assert caught.value.kind is RefusalKind.BUSY
        assert (await taker.transfer.fetch(first)).sum() == 100
        await source.until_gone(1)
        assert source.transfer.withdraw(source.transfer.offer("y", np.ones(100, np.uint8)).tensor_id)

    run(scenario, bytes_max=100)


def test_a_source_that_is_silent_fails_the_fetch_and_not_the_worker() -> None:
    async def scenario(source: End, taker: End) -> None:
        nobody = TensorDescriptor("gone-1", "x", "float32", (4,), 16, "tcp://127.0.0.1:1")
        with pytest.raises(TensorUnavailable, match="silent for 50 ms"):
            await taker.transfer.fetch(nobody)
        offer = source.transfer.offer("x", np.ones(4))
        assert (await taker.transfer.fetch(offer)).sum() == 4

    run(scenario, timeout_ms=50)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"dtype": "no such type"},
        {"shape": (5,)},
        {"size_bytes": 17},
        {"size_bytes": 2**30, "shape": (2**28,)},
        {"endpoint": "ipc:///tmp/x"},
        {"endpoint": "tcp://"},
    ],
)
def test_a_description_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    async def scenario(source: End, taker: End) -> None:
        offer = source.transfer.offer("x", np.ones(4, np.float32))
        wrong = msgspec.structs.replace(offer, **change)
        with pytest.raises(TensorUnavailable):
            await taker.transfer.fetch(wrong)

    run(scenario)


def test_a_fetch_that_is_given_up_lets_the_source_go() -> None:
    async def scenario(source: End, taker: End) -> None:
        offer = source.transfer.offer("x", np.ones(4_000_000, np.float32))
        fetching = asyncio.ensure_future(taker.transfer.fetch(offer))
        await asyncio.sleep(0)
        fetching.cancel()
        await source.until_gone(1)

        assert source.gone == [(offer.tensor_id, False)]

    run(scenario)
