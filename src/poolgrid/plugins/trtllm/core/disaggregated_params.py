"""Carries TensorRT-LLM's ``DisaggregatedParams`` from the worker that prefilled to the worker that decodes.

The form is a msgpack map of the fields that are set (``opaque_state`` stays bytes). Nothing between the two
workers looks inside.

Rules:

1. Fields are found on the installed class (``dataclasses.fields``), never by version number: 1.3 has more than 1.2.1.
2. Decoding keeps only the fields that the installed class has, and says which it dropped.
3. Bytes from another process are checked: shape, types, and the limits of the wire. A fault is a ``DecodeError``.
4. Tuples inside handles come back as tuples: they hold shapes and storage keys that are compared as such.
5. Log probabilities of the first token are objects of the engine's: their values travel. Logits do not, and decode
   does without.
6. Handles of embeddings mean something on one machine only: which one travels along.
7. Where embeddings travel as tensors, the params have no handles: they say where each tensor is fetched, and which
   handle is to be made of it (``CarriedTensor``).
8. A prompt with media has other token ids in the engine than on the wire: those that the context engine computed travel
   along, because the decode engine gets no media to make them of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.errors import DecodeError, LimitError
from poolgrid.kernel.wire.limits import OPAQUE_BYTES_MAX, TENSORS_PER_REQUEST_MAX
from poolgrid.kernel.wire.multimodal import TensorDescriptor

CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"
WHOLE = "context_and_generation"
REQUEST_TYPES = (CONTEXT_ONLY, GENERATION_ONLY, WHOLE)

HASH_WORDS = 8
"""Integers of one multimodal hash: 32 bytes as 8 of 32 bits."""

_TUPLE = 1
"""msgpack extension code of a tuple."""

_LOGPROB = 2
"""msgpack extension code of a token's log probability: the value and its rank among all tokens, or nil."""

DROPPED = frozenset({"first_gen_logits"})
"""Fields that decode can do without and that hold tensors."""

_WHAT = "disaggregated params"

_PROMPT = "poolgrid_prompt_token_ids"
_MACHINE = "poolgrid_machine"
_TENSORS = "poolgrid_tensors"

EMBEDDINGS: Final = "multimodal_embedding_handles"
"""The field with one handle for each medium; the others below have one handle."""

HandleField = Literal["multimodal_embedding_handles", "mrope_position_ids_handle", "mrope_position_deltas_handle"]

HANDLE_FIELDS: tuple[HandleField, ...] = (EMBEDDINGS, "mrope_position_ids_handle", "mrope_position_deltas_handle")
"""Fields whose values are handles of tensors."""

P = TypeVar("P")


class CarriedTensor(msgspec.Struct, array_like=True, frozen=True):
    """A tensor that a worker is to fetch before its engine can have the handle of it."""

    field: HandleField
    dtype: Annotated[str, Meta(max_length=32)]
    """PyTorch's name: the descriptor has NumPy's, which has no ``bfloat16``."""
    tensor: TensorDescriptor


class Decoded(NamedTuple, Generic[P]):
    """Params of the installed class, and the fields that it has no place for."""

    params: P
    dropped: tuple[str, ...]
    prompt: bytes | None = None
    """Token ids of the prompt as the context engine computed it, u32 little-endian; only of a prompt with media."""
    machine: str = ""
    """Where its handles mean something; empty = not told."""
    tensors: tuple[CarriedTensor, ...] = ()
    """What is fetched in place of handles."""


class CarriedLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Log probability of a token, where the installed version has no class for it."""

    logprob: float
    rank: int | None = None


class _Known(msgspec.Struct, kw_only=True):
    """The fields of 1.2.1 with their types; what later versions add is passed on unchecked."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


class _Carrying(msgspec.Struct):
    tensors: Annotated[tuple[CarriedTensor, ...], Meta(max_length=TENSORS_PER_REQUEST_MAX)] = msgspec.field(
        default=(), name=_TENSORS
    )


class _Hashes(msgspec.Struct):
    multimodal_hashes: list[list[int]] | None = None


def encode(params: Any, prompt: bytes | None = None, machine: str = "", without: Collection[str] = ()) -> bytes:
    """Return the msgpack form of a ``DisaggregatedParams``, of the prompt's token ids if they are given, and of the
    machine on which its handles mean something; ``without`` some fields.

    Raises ``TypeError`` naming the field whose value cannot travel (a tensor), ``LimitError`` when it is too large.
    """
    carried: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value is not None and field.name not in DROPPED and field.name not in without:
            carried[field.name] = _outward(value, field.name)
    if prompt is not None:
        carried[_PROMPT] = prompt
    if machine:
        carried[_MACHINE] = machine
    try:
        return _bounded(msgspec.msgpack.encode(carried))
    except OverflowError as error:
        raise TypeError(f"encoding {_WHAT}: an integer is beyond 64 bits: {error}") from None


def with_tensors(data: bytes, tensors: Sequence[CarriedTensor]) -> bytes:
    """Return encoded params with what is fetched in place of their handles; raises ``LimitError``."""
    if len(tensors) > TENSORS_PER_REQUEST_MAX:
        raise LimitError("tensors of a request", len(tensors), TENSORS_PER_REQUEST_MAX)
    carried: dict[str, Any] = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
    carried[_TENSORS] = tensors
    return _bounded(msgspec.msgpack.encode(carried))


def carried_tensors(data: bytes | memoryview) -> tuple[CarriedTensor, ...]:
    """Return what encoded params have fetched in place of handles; raises ``DecodeError``."""
    try:
        return msgspec.msgpack.decode(data, type=_Carrying, ext_hook=_passed_over).tensors
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(_WHAT, str(error)) from None


def _bounded(data: bytes) -> bytes:
    if len(data) > OPAQUE_BYTES_MAX:
        raise LimitError(f"size of {_WHAT}", len(data), OPAQUE_BYTES_MAX)
    return data


def decode(
    data: bytes | memoryview, params_class: type[P], logprob_class: Callable[..., Any] | None = None
) -> Decoded[P]:
    """Return params of the installed class from their msgpack form; raise ``DecodeError`` saying what is wrong.

    ``logprob_class`` makes log probabilities (``logprob``, ``rank``); without one they have a class of ours.
    """
    made_logprob = logprob_class or CarriedLogprob

    def inward(code: int, data: memoryview) -> Any:
        return _inward(code, data, made_logprob)

    if len(data) > OPAQUE_BYTES_MAX:
        raise DecodeError(_WHAT, f"{len(data)} bytes, allowed are at most {OPAQUE_BYTES_MAX}")
    try:
        carried = msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=inward)
        # Bytes are bytes here: text in their place is not base64 to be decoded.
        known = msgspec.convert(carried, _Known, builtin_types=(bytes,))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(_WHAT, str(error)) from None
    _check(known)
    prompt = carried.pop(_PROMPT, None)
    if prompt is not None and (not isinstance(prompt, bytes) or len(prompt) % 4):
        raise DecodeError(_WHAT, f"{_PROMPT} is not a string of 4-byte token ids")
    machine = carried.pop(_MACHINE, "")
    if not isinstance(machine, str):
        raise DecodeError(_WHAT, f"{_MACHINE} is no text")
    tensors = carried_tensors(data) if carried.pop(_TENSORS, None) is not None else ()
    installed = {field.name for field in dataclasses.fields(params_class)}  # type: ignore[arg-type]
    dropped = tuple(name for name in carried if name not in installed)
    try:
        params = params_class(**{name: value for name, value in carried.items() if name in installed})
    except (TypeError, ValueError) as error:
        raise DecodeError(_WHAT, f"TensorRT-LLM refuses them: {error}") from None
    return Decoded(params, dropped, prompt, machine, tensors)


def media_digests(data: bytes | memoryview) -> list[str]:
    """Return the digests of the media that params speak of, as events name them; none where the form is wrong."""

    try:
        hashes = msgspec.msgpack.decode(data, type=_Hashes, ext_hook=_passed_over).multimodal_hashes or []
        return [b"".join((word & 0xFFFF_FFFF).to_bytes(4, "big") for word in words).hex() for words in hashes]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return []  # the decoder reports it


def _passed_over(code: int, data: memoryview) -> Any:
    return None


def _check(known: _Known) -> None:
    if known.request_type is not None and known.request_type.lower() not in REQUEST_TYPES:
        raise DecodeError(_WHAT, f"request_type is {known.request_type!r}, allowed are {', '.join(REQUEST_TYPES)}")
    if (known.mrope_position_ids_handle is None) != (known.mrope_position_deltas_handle is None):
        raise DecodeError(_WHAT, "one of the two mrope handles is there, allowed are both or none")
    hashes, handles = known.multimodal_hashes, known.multimodal_embedding_handles
    for at, each in enumerate(hashes or ()):
        if len(each) != HASH_WORDS:
            raise DecodeError(_WHAT, f"multimodal_hashes[{at}] has {len(each)} integers, allowed are {HASH_WORDS}")
    # A context result keeps hashes and gives up the handles: only where both are there must they match.
    if hashes is not None and handles is not None and len(hashes) != len(handles):
        raise DecodeError(_WHAT, f"{len(hashes)} multimodal_hashes come with {len(handles)} handles")


def _outward(value: Any, where: str) -> Any:
    """Return a value in plain types, tuples as an extension."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {key: _outward(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_outward(each, f"{where}[{at}]") for at, each in enumerate(value)]
    if isinstance(value, tuple):
        inner = [_outward(each, f"{where}[{at}]") for at, each in enumerate(value)]
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(inner))
    if hasattr(value, "logprob") and hasattr(value, "rank"):
        return msgspec.msgpack.Ext(_LOGPROB, msgspec.msgpack.encode([float(value.logprob), value.rank]))
    raise TypeError(f"encoding {_WHAT}: {where} is a {type(value).__name__}, which cannot travel between processes")


def _inward(code: int, data: memoryview, logprob_class: Callable[..., Any]) -> Any:
    if code == _LOGPROB:
        carried = msgspec.msgpack.decode(data, type=CarriedLogprob)
        return logprob_class(logprob=carried.logprob, rank=carried.rank)
    if code != _TUPLE:
        raise msgspec.ValidationError(f"extension {code} is unknown")
    inner = msgspec.msgpack.decode(data, ext_hook=lambda code, data: _inward(code, data, logprob_class))
    if not isinstance(inner, list):
        raise msgspec.ValidationError("a tuple holds no list")
    return tuple(inner)
