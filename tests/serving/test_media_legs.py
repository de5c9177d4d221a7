"""What each leg of a request with images is given, and what an encode leg may answer."""

from __future__ import annotations

import pytest

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.requests.legs import AvoidWorker, EndRequest, LegEvent, RecordFailure, ReleaseLeg
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media, media_hash_u64
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenDelta
from poolgrid.server.serving.prompt_paths import TenantPaths, media_hashes, media_kinds, prompt_path

IMAGE = MediaItem(MediaKind.IMAGE, b"pixels", "image/png", digest_media(b"pixels"), 4, 4)
TENSOR = MediaItem(MediaKind.EMBEDDINGS, b"numbers", "application/x-pytorch", digest_media(b"numbers"), 10, 4)


def _request(*items: MediaItem) -> InferenceRequest:
    media = MultimodalInput("look", items) if items else None
    return InferenceRequest("r", "m", pack_tokens(range(16)), Sampling(8), multimodal=media)


def _machine(*items: MediaItem) -> RequestMachine:
    return RequestMachine(_request(*items), TokenDelivery("r", lambda delivery: None), 3)


def _begin(machine: RequestMachine, stage: Stage) -> Generate:
    return machine.begin(WorkerKey(WorkerId("w")), "tcp://w:1", stage)


def test_each_leg_gets_what_it_needs_and_no_more() -> None:
    machine = _machine(IMAGE, TENSOR)
    plan = machine.plan
    assert plan.wants_encode
    encode = _begin(machine, Stage.ENCODE)
    assert codec.multimodal.decode(encode.multimodal or b"").items == (IMAGE, TENSOR)

    machine.on_delta(TokenDelta("r", 0, b"", FinishReason.ENCODED, disaggregated_params=b"embeddings"))
    assert not plan.wants_encode
    prefill = _begin(machine, Stage.PREFILL)
    assert prefill.disaggregated_params == b"embeddings"
    items = codec.multimodal.decode(prefill.multimodal or b"").items
    assert [item.data for item in items] == [b"", b"numbers"]
    assert [item.media_hash for item in items] == [IMAGE.media_hash, TENSOR.media_hash]
    assert plan.awaits_embeddings

    ending = TokenDelta("r~1", 0, pack_tokens([9]), FinishReason.PREFILLED, disaggregated_params=b"blocks")
    effects = machine.on_delta(ending)
    assert [effect.dispatch.id for effect in effects if isinstance(effect, ReleaseLeg)] == ["r"], (
        "it has the embeddings"
    )
    decode = _begin(machine, Stage.DECODE)
    assert (decode.disaggregated_params, decode.multimodal) == (b"blocks", None)
    assert not plan.awaits_embeddings
    assert [leg.id for leg in plan.legs] == ["r~2", "r~1"]


def test_embeddings_that_did_not_arrive_are_no_fault_of_who_waited_for_them() -> None:
    machine = _machine(IMAGE)
    _begin(machine, Stage.ENCODE)
    machine.on_delta(TokenDelta("r", 0, b"", FinishReason.ENCODED, disaggregated_params=b"embeddings"))
    _begin(machine, Stage.PREFILL)

    effects = machine.on_delta(TokenDelta("r~1", 0, b"", FinishReason.ERROR, refusal=RefusalKind.BROKEN))

    assert not any(isinstance(effect, RecordFailure | AvoidWorker) for effect in effects)
    assert machine.plan.encodes_itself, "it gets the images themselves"
    _begin(machine, Stage.PREFILL)
    effects = machine.on_delta(TokenDelta("r~2", 0, b"", FinishReason.ERROR, refusal=RefusalKind.BROKEN))
    assert any(isinstance(effect, RecordFailure) for effect in effects)


def test_who_encodes_itself_gets_the_images() -> None:
    machine = _machine(IMAGE)
    machine.plan.encodes_itself = True

    assert not machine.plan.wants_encode
    assert codec.multimodal.decode(_begin(machine, Stage.WHOLE).multimodal or b"").items == (IMAGE,)


def test_text_and_embeddings_want_no_encode_leg() -> None:
    assert not _machine().plan.wants_encode
    assert not _machine(TENSOR).plan.wants_encode


def test_the_path_covers_media_of_known_length_and_ends_before_others() -> None:
    plain = prompt_path(_request(), 4, TenantPaths())
    known = prompt_path(_request(IMAGE), 4, TenantPaths())
    unknown = MediaItem(MediaKind.IMAGE, b"?", "image/png", digest_media(b"?"), 9, 0)

    assert len(known) == len(plain) == 4
    assert known[0] == plain[0]
    assert not set(known[1:]) & set(plain[1:])
    assert prompt_path(_request(IMAGE, unknown), 4, TenantPaths()) == known[:2]
    assert media_hashes(_request(IMAGE)) == (media_hash_u64(IMAGE.media_hash),)
    assert media_kinds(_request(TENSOR, IMAGE)) == ("embeddings", "image")


CAUSE = "medium 0 (image/png) needs Pillow, which is not installed here"
WANTING = "the request has images without embeddings"


def _refused(machine: RequestMachine, stage: Stage, error: str, refusal: RefusalKind) -> None:
    leg = _begin(machine, stage)
    machine.on_delta(TokenDelta(leg.request_id, 0, b"", FinishReason.ERROR, error=error, refusal=refusal))


def _last_error(machine: RequestMachine) -> str:
    """Return what the client gets when no worker is left."""
    effects = machine.end(LegEvent.NOWHERE, "no worker is left")
    [end] = [effect for effect in effects if isinstance(effect, EndRequest)]
    return end.last.error or ""


@pytest.mark.parametrize("encode", [RefusalKind.CANNOT_DO, RefusalKind.BROKEN, RefusalKind.DRAINING])
@pytest.mark.parametrize("prompt", [RefusalKind.CANNOT_DO, RefusalKind.BROKEN])
@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.WHOLE])
def test_client_gets_the_reason_of_the_encode_worker_with_that_of_the_worker_that_lacked_its_embeddings(
    encode: RefusalKind, prompt: RefusalKind, stage: Stage
) -> None:
    machine = _machine(IMAGE)
    _refused(machine, Stage.ENCODE, CAUSE, encode)
    machine.plan.encodes_itself = True  # as routers do once there is none to encode
    _refused(machine, stage, WANTING, prompt)

    error = _last_error(machine)
    assert f"w: {CAUSE}" in error
    assert (WANTING in error) is (prompt is RefusalKind.CANNOT_DO)


def test_client_gets_the_reason_why_embeddings_did_not_arrive() -> None:
    machine = _machine(IMAGE)
    _begin(machine, Stage.ENCODE)
    machine.on_delta(TokenDelta("r", 0, b"", FinishReason.ENCODED, disaggregated_params=b"embeddings"))
    _refused(machine, Stage.PREFILL, "fetching the embeddings took 5 s", RefusalKind.BROKEN)
    _refused(machine, Stage.PREFILL, WANTING, RefusalKind.CANNOT_DO)

    error = _last_error(machine)
    assert WANTING in error
    assert "fetching the embeddings took 5 s" in error


def test_client_gets_the_reason_with_a_refusal_that_ends_the_request() -> None:
    machine = _machine(IMAGE)
    _refused(machine, Stage.ENCODE, CAUSE, RefusalKind.BROKEN)
    machine.plan.encodes_itself = True
    leg = _begin(machine, Stage.PREFILL)
    refusal = TokenDelta(leg.request_id, 0, b"", FinishReason.ERROR, error=WANTING, refusal=RefusalKind.INVALID)
    effects = machine.on_delta(refusal)

    [end] = [effect for effect in effects if isinstance(effect, EndRequest)]
    assert end.last.error == f"{WANTING}; its media were not encoded: w: {CAUSE}"


def test_client_gets_the_loss_of_the_encode_worker() -> None:
    machine = _machine(IMAGE)
    leg = _begin(machine, Stage.ENCODE)
    machine.on_lost(leg.request_id, LegEvent.LOST, "its connection broke")
    machine.plan.encodes_itself = True
    _refused(machine, Stage.PREFILL, WANTING, RefusalKind.CANNOT_DO)

    assert "its connection broke" in _last_error(machine)


def test_refusal_of_a_request_whose_media_were_encoded_names_nothing_else() -> None:
    machine = _machine(IMAGE)
    _begin(machine, Stage.ENCODE)
    machine.on_delta(TokenDelta("r", 0, b"", FinishReason.ENCODED, disaggregated_params=b"embeddings"))
    prefill = _begin(machine, Stage.PREFILL)
    machine.on_delta(TokenDelta(prefill.request_id, 0, pack_tokens([9])))

    assert _last_error(machine) == "no worker is left"
