"""The opaque state of a context request: here enough to find out whether the generation request is the right one."""

from __future__ import annotations

import msgspec
from xxhash import xxh3_64_intdigest

from .pictures import Picture

_MAGIC = b"fake-kv-state"


class State(msgspec.Struct, array_like=True):
    """What a context engine says about the KV it holds."""

    magic: bytes
    ctx_request_id: int
    prompt: int
    first_gen_tokens: tuple[int, ...]
    kv_dtype: str
    tokens_per_block: int
    media_seed: int = 0
    """What the media of the prompt do to its tokens: the generation engine has their KV, not them."""
    pictures: tuple[tuple[bytes, int, int], ...] = ()
    """Digest and place of each medium that has tokens of its own."""


def make(
    ctx_request_id: int,
    prompt: bytes,
    first: tuple[int, ...],
    kv_dtype: str,
    tokens_per_block: int,
    media_seed: int = 0,
    pictures: tuple[Picture, ...] = (),
) -> bytes:
    """Return the state's bytes, ended by a checksum."""
    body = msgspec.msgpack.encode(
        State(
            _MAGIC,
            ctx_request_id,
            xxh3_64_intdigest(prompt),
            first,
            kv_dtype,
            tokens_per_block,
            media_seed,
            tuple((each.digest, each.start, each.length) for each in pictures),
        )
    )
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def media_seed(state: bytes | None) -> int:
    """Return the seed that the media of the prompt gave; 0 when the state cannot be read."""
    try:
        return msgspec.msgpack.decode((state or b"")[:-8], type=State).media_seed
    except msgspec.MsgspecError:
        return 0


def pictures(state: bytes | None) -> tuple[Picture, ...]:
    """Return the media of the prompt that have tokens of their own; the generation engine cannot name them."""
    try:
        found = msgspec.msgpack.decode((state or b"")[:-8], type=State).pictures
    except msgspec.MsgspecError:
        return ()
    return tuple(Picture(digest, "", start, length) for digest, start, length in found)


def fault(
    state: bytes | None,
    ctx_request_id: int | None,
    prompt: bytes,
    first: tuple[int, ...],
    kv_dtype: str,
    tokens_per_block: int,
) -> str | None:
    """Return why a generation request cannot take over from a context request, or ``None``."""
    if state is None:
        return "opaque_state is missing"
    body, checksum = state[:-8], state[-8:]
    if xxh3_64_intdigest(body).to_bytes(8, "little") != checksum:
        return "opaque_state is damaged"
    try:
        found = msgspec.msgpack.decode(body, type=State)
    except msgspec.MsgspecError:
        return "opaque_state is damaged"
    if found.magic != _MAGIC:
        return "opaque_state is of another engine"
    expected = (ctx_request_id, xxh3_64_intdigest(prompt), first, kv_dtype, tokens_per_block)
    actual = (found.ctx_request_id, found.prompt, found.first_gen_tokens, found.kv_dtype, found.tokens_per_block)
    for name, want, have in zip(
        ("ctx_request_id", "prompt", "first_gen_tokens", "kv cache dtype", "tokens_per_block"),
        expected,
        actual,
        strict=True,
    ):
        if want != have:
            return f"{name} is not the context request's: {want} is not {have}"
    return None
