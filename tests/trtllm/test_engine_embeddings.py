"""Embeddings that travel as bytes between TensorRT-LLM adapters, which pretend to be on two machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import RequestFinished
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.multimodal import TensorDescriptor
from poolgrid.kernel.wire.requests import Generate, RefusalKind
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.kernel.worker_protocol.tensor_transfer import TensorUnavailable
from poolgrid.plugins.trtllm.core.disaggregated_params import (
    EMBEDDINGS,
    HANDLE_FIELDS,
    CarriedTensor,
    carried_tensors,
    with_tensors,
)
from poolgrid.plugins.trtllm.shared_tensors import SharedTensors
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.tensor_transfer.tensor_store import TensorMetrics, TensorStore
from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer
from tests.fakes import install_tensorrt_llm
from tests.fakes.tensorrt_llm._fake.behaviour import behaviour
from tests.trtllm.engines import RunningEngine, expected, make_request, running_engine
from tests.trtllm.test_engine_media import MULTIMODAL, item, picture, seen, text_request, with_media


@asynccontextmanager
async def transfer(lease_ms: float = 60_000, bytes_max: int = 64_000_000) -> AsyncIterator[TensorTransfer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = TensorTransfer(
        context,
        "127.0.0.1",
        0,
        "",
        TensorStore("t", bytes_max, lease_ms),
        SystemClock(),
        TensorMetrics(CollectorRegistry()),
        chunk_bytes=1_048_576,
        timeout_ms=20_000,
    )
    try:
        yield made
    finally:
        await made.close()
        await asyncio.to_thread(context.term)


async def encoded(encode: RunningEngine, request: Generate) -> bytes:
    """Return what an encode leg leaves."""
    last = await encode.finish(msgspec.structs.replace(request, stage=Stage.ENCODE))
    assert last.finish_reason == "encoded", last.error
    assert last.disaggregated_params is not None
    return last.disaggregated_params


def behind(params: bytes) -> Generate:
    """The leg that comes after an encode leg: without the picture's bytes."""
    bare = with_media(make_request(), msgspec.structs.replace(item(picture()), data=b""))
    return msgspec.structs.replace(bare, disaggregated_params=params)


async def test_embeddings_come_from_another_machine_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        transfer() as source,
        transfer() as taker,
        running_engine(Role.ENCODE, tensors=source) as encode,
        running_engine(tensors=taker, **MULTIMODAL) as whole,
    ):
        params = await encoded(encode, with_media(make_request(), item(picture())))
        assert not set(HANDLE_FIELDS) & set(msgspec.msgpack.decode(params)), "a handle is good once, and here"
        assert encode.engine.describe() == {"kept_embeddings": 1}
        monkeypatch.setattr(behaviour, "machine", "another")
        tensors = [await taker.fetch(each.tensor) for each in carried_tensors(params)]
        whole.engine.submit_embedded(behind(params), tensors)
        await whole.until(lambda: whole.finished("r"))
        assert whole.output("r") == expected(text_request(), seen())
        await encode.until(lambda: encode.released == ["r"])
        assert encode.engine.describe() == {"kept_embeddings": 0}
        assert RequestFinished("r", "encoded") in encode.events_of("r")


@pytest.mark.parametrize("cause", ["nobody comes", "cancelled"])
async def test_what_nobody_takes_is_let_go_of(cause: str) -> None:
    lease_ms = 10.0 if cause == "nobody comes" else 60_000.0
    async with transfer(lease_ms) as source, running_engine(Role.ENCODE, tensors=source) as encode:
        params = await encoded(encode, with_media(make_request(), item(picture()), item(picture("blue"))))
        if cause == "cancelled":
            with pytest.raises(RefusedError, match="already active"):
                encode.engine.submit(with_media(make_request(stage=Stage.ENCODE), item(picture())))
            encode.engine.cancel("r")
        await encode.until(lambda: encode.released == ["r"])
        with pytest.raises(TensorUnavailable, match="no longer keeps"):
            await source.fetch(carried_tensors(params)[1].tensor)
        assert encode.reports[-1].keeps_encoded


async def test_a_full_store_refuses_an_encode_leg_as_busy_and_keeps_nothing_of_it() -> None:
    one = 576 * 4096 * 2
    async with transfer(bytes_max=one) as source, running_engine(Role.ENCODE, tensors=source) as encode:
        request = with_media(make_request(stage=Stage.ENCODE), item(picture()), item(picture("blue")))
        last = await encode.finish(request)
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BUSY), last.error
        await encoded(encode, with_media(make_request("s"), item(picture())))


async def test_a_worker_that_cannot_fetch_says_which_setting_is_missing() -> None:
    async with (
        transfer() as source,
        running_engine(Role.ENCODE, tensors=source) as encode,
        running_engine(**MULTIMODAL) as whole,
    ):
        last = await whole.finish(behind(await encoded(encode, with_media(make_request(), item(picture())))))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.CANNOT_DO)
        assert "tensor_transport" in (last.error or "")


async def test_embeddings_that_the_encode_worker_cannot_open_are_not_the_requests_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: SharedTensors, params: object) -> None:
        monkeypatch.setattr(behaviour, "machine", "another")
        return original(self, params)  # type: ignore[return-value]

    original = SharedTensors.copy_out

    async with transfer() as source, running_engine(Role.ENCODE, tensors=source) as encode:
        monkeypatch.setattr(SharedTensors, "copy_out", fails)
        last = await encode.finish(with_media(make_request(stage=Stage.ENCODE), item(picture())))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.CANNOT_DO)
        assert "CUDA error" in (last.error or "")


def test_tensors_become_handles_of_their_fields_and_types() -> None:
    install_tensorrt_llm()
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    def carried(dtype: str) -> CarriedTensor:
        return CarriedTensor(EMBEDDINGS, dtype, TensorDescriptor("t", "n", "uint16", (2, 3), 12, "tcp://h:1"))

    shared, data = SharedTensors(), np.arange(6, dtype="uint16").reshape(2, 3)
    made = shared.share([carried("bfloat16"), carried("uint16")], [data, data])
    (field, first), (_, second) = made.handles
    assert (field, first["tensor_size"]) == (EMBEDDINGS, [2, 3])
    opened = [SharedTensorContainer.from_dict(each).get_local_view() for each in (first, second)]
    assert [str(each.dtype) for each in opened] == ["torch.bfloat16", "torch.uint16"]
    assert opened[0].content()[2] == data.tobytes()
    with pytest.raises(RefusedError, match=r"uint16 is declared as torch\.float32"):
        shared.share([carried("float32")], [data])
    del made, opened
    with pytest.raises(RuntimeError, match="shared memory"):
        SharedTensorContainer.from_dict(first).get_local_view()


def test_descriptions_of_tensors_are_checked_as_what_comes_from_another_process() -> None:
    tensor = CarriedTensor(EMBEDDINGS, "float16", TensorDescriptor("t", "n", "float16", (1,), 2, "tcp://h:1"))
    assert carried_tensors(with_tensors(msgspec.msgpack.encode({"draft_tokens": [1]}), [tensor])) == (tensor,)
    assert carried_tensors(msgspec.msgpack.encode({"draft_tokens": [1]})) == ()
    for wrong in ([["first_gen_tokens", "float16", tensor.tensor]], [7], "x"):
        with pytest.raises(DecodeError):
            carried_tensors(msgspec.msgpack.encode({"poolgrid_tensors": wrong}))
