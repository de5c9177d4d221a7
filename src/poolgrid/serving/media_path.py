"""The sequence hashes of a request's prompt, media included: what routers compare with what workers hold."""

from __future__ import annotations

from array import array

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.serving.tenant_paths import TenantPaths
from poolgrid.wire.hashing import TOKEN_BYTES, hash_seed
from poolgrid.wire.multimodal import known_tokens, media_hash_u64, media_hashes_of_blocks


def prompt_path(request: InferenceRequest, block_size: int, paths: TenantPaths) -> array[int]:
    """Return the sequence hashes of the prompt's whole blocks of ``block_size`` tokens.

    ``paths`` remembers those of text. With media they end where the engine's own tokens are not known: at the first
    medium of unknown length.
    """
    token_ids = request.token_ids
    touched: dict[int, list[int]] = {}
    media = request.multimodal
    if media is not None:
        known = known_tokens(media.items, len(token_ids) // TOKEN_BYTES)
        touched = media_hashes_of_blocks(media.items, block_size)
        token_ids = token_ids[: TOKEN_BYTES * known]
    return paths.of(request).path(token_ids, block_size, hash_seed(request.lora_name, request.cache_salt), touched)


def media_hashes(request: InferenceRequest) -> tuple[int, ...]:
    """Return the u64 hashes of a request's media, in order."""
    media = request.multimodal
    return () if media is None else tuple(media_hash_u64(item.media_hash) for item in media.items)


def media_kinds(request: InferenceRequest) -> tuple[str, ...]:
    """Return the kinds of a request's media, sorted."""
    media = request.multimodal
    return () if media is None else tuple(sorted({item.kind.value for item in media.items}))
