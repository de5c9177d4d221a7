"""What two servers are asked for one request, one to compute its prompt and the other to answer. Pure.

Members are cut into the client's body. How each server names what moves the KV between them:

vLLM          the prefill server is asked for one token and for ``kv_transfer_params``, which the decode server gets
SGLang        both servers get the same ``bootstrap_room``, at once; the client has the decode server's answer
trtllm-serve  as vLLM, by ``disaggregated_params``; the decode server gets the ids of the prompt too

A prefill server that leaves no parameters has left no KV, for example because its first token ended the answer: the
decode server then computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.server.forwarding.body_edit import edit

_encode = msgspec.json.Encoder().encode

OUTPUT_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""Members that limit the tokens of an answer, by path; the first is added where a body has none."""

PATHS: Final[Mapping[str, frozenset[str]]] = {
    "vllm": frozenset(OUTPUT_LIMITS),
    "sglang": frozenset(("/v1/chat/completions", "/v1/completions")),
    "trtllm-serve": frozenset(("/v1/chat/completions", "/v1/completions")),
}
"""Requests that take the parameters of a transfer, by kind of server: vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.4."""

KEEP_KV: Final = _encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What a prefill server's KV connector is asked for."""

ROOM_BITS: Final = (1 << 63) - 1
"""SGLang's rooms are signed numbers of 64 bits."""

FIRST_REQUEST_ID: Final = 1 << 42
"""trtllm-serve counts its own requests below this number."""

REQUEST_ID_BITS: Final = (1 << 62) - 1

GOES_ON: Final = frozenset(("length", "not_finished"))
"""How trtllm-serve ends a prompt that another server continues from."""


def can_be_split(path: str, kind: str, values: Mapping[str, Raw]) -> bool:
    """Return whether two servers of a kind can serve a request together.

    Several answers, or several prompts, would share the KV of one transfer, which the first that has it frees; SGLang
    makes a room for each.
    """
    if path not in PATHS.get(kind, ()):
        return False
    if begins_together(kind):
        return True
    for name in ("n", "best_of"):
        if name in values and bytes(values[name]) not in (b"1", b"null"):
            return False
    prompt = bytes(values["prompt"]) if "prompt" in values else b""
    return not prompt.startswith(b"[") or not prompt[1:].lstrip().startswith((b'"', b"["))


def begins_together(kind: str) -> bool:
    """Return whether the decode server is asked while the prefill server still computes."""
    return kind == "sglang"


def transfer_of(kind: str, dispatch_id: str, host: str, bootstrap_port: int) -> bytes:
    """Return the parameters that both servers of a transfer get, before either has answered; empty where the prefill
    server names them. ``host`` and ``bootstrap_port`` are where a prefill server of SGLang hands KV over."""
    if not begins_together(kind):
        return b""
    room = stable_u64(dispatch_id) & ROOM_BITS
    return _encode({"bootstrap_host": host, "bootstrap_port": bootstrap_port, "bootstrap_room": room})


def prefill_body(
    path: str, kind: str, body: bytes, values: Mapping[str, Raw], dispatch_id: str, params: bytes
) -> bytes:
    """Return what the prefill server is asked. ``params`` are those of ``transfer_of``. Raises ``ValueError``."""
    if begins_together(kind):
        return edit(body, _members(params))
    limits = OUTPUT_LIMITS[path]
    asked = {name: b"1" for name in limits if name in values} or {limits[0]: b"1"}
    if bytes(values.get("stream", b"false")) != b"false":
        asked["stream"] = b"false"
        asked["stream_options"] = b"null"  # are refused without a stream
    for name in ("prompt_logprobs", "echo"):
        if name in values:  # the decode server answers for the prompt
            asked[name] = b"null" if name == "prompt_logprobs" else b"false"
    if bytes(values.get("min_tokens", b"0")) not in (b"0", b"1", b"null"):
        asked["min_tokens"] = b"1"
    if path == "/v1/responses":
        asked["store"] = b"false"
    if kind == "trtllm-serve":
        request_id = FIRST_REQUEST_ID + (stable_u64(dispatch_id) & REQUEST_ID_BITS) // 2
        asked["disaggregated_params"] = _encode({"request_type": "context_only", "disagg_request_id": request_id})
    else:
        asked["kv_transfer_params"] = KEEP_KV
    return edit(body, asked)


def freeing_body(path: str, body: bytes, values: Mapping[str, Raw], params: bytes) -> bytes:
    """Return what a decode server of vLLM is asked so that KV is freed which no answer needs any more: one token, for
    which it takes the KV over. A prefill server waits 480 s for that (``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``)."""
    return edit(prefill_body(path, "vllm", body, values, "", b""), _members(params))


def decode_body(body: bytes, params: bytes) -> bytes:
    """Return what the decode server is asked, the parameters being those of the prefill leg. Raises ``ValueError``."""
    return edit(body, _members(params)) if params else body


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    disaggregated_params: dict[str, Any] | None = None


class _Answer(msgspec.Struct, gc=False):
    kv_transfer_params: dict[str, Any] | None = None
    choices: list[_Choice] = []
    prompt_token_ids: Raw = Raw()


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


def params_of(path: str, kind: str, answer: bytes) -> bytes:
    """Return the parameters that a prefill server has left, as members of the decode server's body; empty where it has
    left none. Raises ``ValueError`` for an answer that cannot be read."""
    try:
        found = _decode_answer(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the prefill server's answer cannot be read: {error}") from None
    left: dict[str, Any] = {}
    if kind == "trtllm-serve":
        for choice in found.choices[:1]:
            if choice.disaggregated_params is not None and choice.finish_reason in GOES_ON:
                left["disaggregated_params"] = {**choice.disaggregated_params, "request_type": "generation_only"}
                if bytes(found.prompt_token_ids).startswith(b"["):
                    left["prompt" if path == "/v1/completions" else "prompt_token_ids"] = found.prompt_token_ids
    elif found.kv_transfer_params:
        left["kv_transfer_params"] = found.kv_transfer_params
    return _encode(left) if left else b""


def _members(params: bytes) -> dict[str, bytes]:
    return {name: bytes(value) for name, value in _decode_members(params).items()}
