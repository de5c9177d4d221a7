"""Media on the TensorRT-LLM adapter: pictures, embeddings, and the way from encode to decode, on the fake."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest
from PIL import Image

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.kernel.wire.requests import Generate, RefusalKind
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError
from poolgrid.plugins.trtllm.media import load_media
from tests.trtllm.engines import MODES, expected, make_request, running_engine
from tests.trtllm.test_engine_legs import decode_leg, prefilled

MULTIMODAL: dict[str, Any] = {"modality": "multimodal", "max_batch_size": 64}
TEXT = "What is <image> this?"


def picture(colour: str = "red") -> bytes:
    data = io.BytesIO()
    Image.new("RGBA", (3, 2), colour).save(data, "PNG")
    return data.getvalue()


def seen(colour: str = "red") -> Any:
    """The picture as an engine sees it."""
    return Image.open(io.BytesIO(picture(colour))).convert("RGB")


def item(data: bytes, kind: MediaKind = MediaKind.IMAGE, media_type: str = "image/png") -> MediaItem:
    return MediaItem(kind, data, media_type, digest_media(data))


def with_media(request: Generate, *items: MediaItem) -> Generate:
    return msgspec.structs.replace(request, multimodal=codec.multimodal.encode(MultimodalInput(TEXT, items)))


def text_request(request_id: str = "r") -> Generate:
    """The request that the fake's tokenizer makes of the text."""
    return make_request(request_id, [3 + each for each in TEXT.encode()])


async def test_pictures_go_to_the_engine_as_pictures_with_the_prompt_as_text() -> None:
    async with running_engine(**MULTIMODAL) as told:
        calls: list[Any] = []
        original = told.llm.generate_async

        def noting(inputs: Any, **given: Any) -> Any:
            calls.append(inputs)
            return original(inputs, **given)

        told.llm.generate_async = noting
        await told.finish(with_media(make_request(), item(picture("red")), item(picture("blue"))))
        (inputs,) = calls
        assert inputs["prompt"] == TEXT
        assert [(each.mode, each.getpixel((0, 0))) for each in inputs["multi_modal_data"]["image"]] == [
            ("RGB", (255, 0, 0)),
            ("RGB", (0, 0, 255)),
        ]
        assert told.output("r") == expected(text_request(), seen("red"), seen("blue"))


async def test_encode_prefill_and_decode_give_what_one_worker_gives() -> None:
    async with (
        running_engine(Role.ENCODE) as encode,
        running_engine(Role.PREFILL, **MULTIMODAL) as prefill,
        running_engine(Role.DECODE, **MULTIMODAL) as decode,
    ):
        request = with_media(make_request(), item(picture()))
        encoded = await encode.finish(msgspec.structs.replace(request, stage=Stage.ENCODE))
        assert (encoded.finish_reason, encoded.token_ids) == ("encoded", b"")
        assert encoded.disaggregated_params is not None
        bare = msgspec.structs.replace(item(picture()), data=b"")
        leg = msgspec.structs.replace(
            with_media(make_request(), bare), disaggregated_params=encoded.disaggregated_params
        )
        params = await prefilled(prefill, leg)
        text = msgspec.structs.replace(request, multimodal=None)
        last = await decode.finish(decode_leg(text, params))
        assert last.finish_reason == "length"
        assert decode.output("r") == expected(text_request(), seen())


async def test_a_picture_that_is_broken_is_its_requests_error() -> None:
    async with running_engine(**MULTIMODAL) as told:
        last = await told.finish(with_media(make_request(), item(picture()[:40])))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.INVALID)
        assert "medium 0 (image/png) cannot be loaded" in (last.error or "")
        assert (await told.finish(make_request("s"))).finish_reason == "length"


async def test_a_cancel_while_media_are_loaded_ends_the_request() -> None:
    async with running_engine(**MULTIMODAL) as told:
        told.engine.submit(with_media(make_request(), item(picture())))
        told.engine.cancel("r")
        await told.until(lambda: told.finished("r"))
        assert told.deltas["r"][-1].finish_reason == "cancelled"


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL, Role.DECODE])
async def test_workers_without_media_say_so(role: Role) -> None:
    async with running_engine(role, max_batch_size=64) as told:
        with pytest.raises(RefusedError, match="modality text") as refused:
            told.engine.submit(with_media(make_request(), item(picture())))
        assert refused.value.kind is RefusalKind.CANNOT_DO
        assert MODES[role] == told.engine._calls._processors._mode


def test_a_request_has_pictures_or_embeddings_and_each_has_its_bytes() -> None:
    embeddings = item(b"x", MediaKind.EMBEDDINGS, "application/x-safetensors")
    with pytest.raises(RefusedError, match="one of the two"):
        load_media(with_media(make_request(), item(picture()), embeddings), False)
    with pytest.raises(RefusedError, match="medium 0 has no bytes"):
        load_media(with_media(make_request(), msgspec.structs.replace(embeddings, data=b"")), False)
    with pytest.raises(RefusedError, match="multimodal"):
        load_media(msgspec.structs.replace(make_request(), multimodal=b"\xc1"), False)


def test_embeddings_are_loaded_as_tensors_and_never_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and safetensors are not here: their stand-ins note how they are called."""
    torch, safetensors, of_torch = ModuleType("torch"), ModuleType("safetensors"), ModuleType("safetensors.torch")
    calls: list[Any] = []

    def load(file: Any, **given: Any) -> Any:
        calls.append(given)
        return {"features": file.read()}

    torch.load = load  # type: ignore[attr-defined]
    of_torch.load = lambda data: dict.fromkeys(data.decode(), data)  # type: ignore[attr-defined]
    for name, module in (("torch", torch), ("safetensors", safetensors), ("safetensors.torch", of_torch)):
        monkeypatch.setitem(sys.modules, name, module)

    def loaded(data: bytes, media_type: str) -> Any:
        return load_media(with_media(make_request(), item(data, MediaKind.EMBEDDINGS, media_type)), False)

    assert loaded(b"tensor", "application/x-pytorch") == {
        "prompt": TEXT,
        "multi_modal_embeddings": {"image": [b"tensor"]},
    }
    assert calls == [{"map_location": "cpu", "weights_only": True}]
    assert loaded(b"a", "application/x-safetensors")["multi_modal_embeddings"] == {"image": [b"a"]}
    with pytest.raises(RefusedError, match="it has 2 tensors, allowed is 1"):
        loaded(b"ab", "application/x-safetensors")


def test_what_is_missing_to_load_embeddings_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    request = with_media(make_request(), item(b"x", MediaKind.EMBEDDINGS, "application/x-pytorch"))
    with pytest.raises(RefusedError, match="needs torch") as refused:
        load_media(request, False)
    assert refused.value.kind is RefusalKind.CANNOT_DO


async def test_an_encode_leg_gives_its_handles_as_a_list() -> None:
    """A request that carries params would get a 1-tuple around them from 1.2.1."""

    async with running_engine(Role.ENCODE) as encode:
        request = with_media(make_request(stage=Stage.ENCODE), item(picture()), item(picture("blue")))
        last = await encode.finish(msgspec.structs.replace(request, disaggregated_params=b"\x80"))
        assert last.disaggregated_params is not None
        carried = msgspec.msgpack.decode(last.disaggregated_params)
        assert isinstance(carried["multimodal_embedding_handles"], list)
        assert len(carried["multimodal_embedding_handles"]) == len(carried["multimodal_hashes"]) == 2
        with pytest.raises(RefusedError, match="role encode"):
            encode.engine.submit(make_request("s"))
        with pytest.raises(RefusedError, match="without media"):
            encode.engine.submit(make_request("s", stage=Stage.ENCODE))


def test_a_prompt_that_travels_with_its_params_is_checked() -> None:
    from poolgrid.kernel.wire.errors import DecodeError
    from poolgrid.plugins.trtllm.core import disaggregated_params as params_codec

    library = pytest.importorskip("tests.fakes.tensorrt_llm")
    made = library.DisaggregatedParams(request_type="context_only")
    packed = params_codec.encode(made, pack_tokens([1, 2]))
    assert params_codec.decode(packed, library.DisaggregatedParams).prompt == pack_tokens([1, 2])
    assert params_codec.decode(params_codec.encode(made), library.DisaggregatedParams).prompt is None
    with pytest.raises(DecodeError, match="4-byte"):
        params_codec.decode(params_codec.encode(made, b"123"), library.DisaggregatedParams)


@pytest.mark.parametrize("cause", ["another machine", "handles that cannot be opened"])
async def test_embeddings_that_cannot_be_taken_are_not_the_requests_fault(
    cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``cannot-do`` lets the router begin anew with the pictures; ``invalid`` would be the client's error."""

    async with running_engine(Role.ENCODE) as encode, running_engine(**MULTIMODAL) as whole:
        if cause == "another machine":
            monkeypatch.setattr(encode.engine._calls, "machine", "another")
        request = with_media(make_request(), item(picture()))
        encoded = await encode.finish(msgspec.structs.replace(request, stage=Stage.ENCODE))
        params = encoded.disaggregated_params
        assert params is not None
        if cause != "another machine":
            carried = msgspec.msgpack.decode(params)
            carried["multimodal_embedding_handles"][0]["method_key"] = 9
            params = msgspec.msgpack.encode(carried)
        bare = with_media(make_request(), msgspec.structs.replace(item(picture()), data=b""))
        for name in ("r", "s"):
            leg = msgspec.structs.replace(bare, request_id=name, disaggregated_params=params)
            last = await whole.finish(leg)
            assert (last.finish_reason, last.refusal) == ("error", RefusalKind.CANNOT_DO), last.error
        again = await whole.finish(with_media(make_request("t"), item(picture())))
        assert again.finish_reason == "length"
    warned = sum("encode worker on another machine" in record.message for record in caplog.records)
    assert warned == (cause == "another machine")


def test_package_that_a_medium_needs_is_named_as_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = with_media(text_request(), item(picture()))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnableError, match=r"medium 0 \(image/png\) needs Pillow, which is not installed here"):
        load_media(request, False)
