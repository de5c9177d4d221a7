"""A request's images as engine servers take them: data URLs next to token ids, a placeholder each. Pure.

Rules:

1. The bytes were fetched, checked and hashed by the front end. A server is given the bytes, and never an address: it
   opens nothing that a client wrote.
2. An image is one token of the prompt: the server puts in its place as many as its model makes of it. Where a router
   has put them there already they are taken out again.
3. An image is named by the hash of its bytes, where the server takes names: equal images share what it caches.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass

from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import TOKEN_BYTES, unpack_tokens
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.multimodal import MediaItem, MediaKind
from poolgrid.wire.requests import Generate
from poolgrid.workers.core.refusal import RefusedError, UnableError


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """One image."""

    url: str
    """A data URL with its bytes."""
    name: str
    """BLAKE3 of its bytes, 64 hexadecimal digits."""


def prompt_with_pictures(title: str, request: Generate) -> tuple[list[int], list[RequestPicture]]:
    """Return the token ids of a prompt with one placeholder for each image, and the images in their order.

    The request has media. Raises ``RefusedError`` for those that no such server takes with token ids.
    """
    assert request.multimodal is not None, "it has media"
    if request.stage is not Stage.WHOLE:
        raise UnableError(
            f"the request has images and disaggregated prefill and decode: {title} takes images with whole "
            "requests only"
        )
    if request.sampling.prompt_logprobs is not None:
        raise UnableError(
            f"prompt_logprobs are set and the request has images: {title} would give them for tokens that it puts "
            "in the place of an image, which no other process knows"
        )
    try:
        items = codec.multimodal.decode(request.multimodal).items
    except DecodeError as error:
        raise RefusedError(f"multimodal: {error}") from None
    pictures = [_picture(title, at, item) for at, item in enumerate(items)]
    return _with_one_token_each(request.token_ids, items), pictures


def _picture(title: str, at: int, item: MediaItem) -> RequestPicture:
    if item.kind is not MediaKind.IMAGE:
        raise UnableError(f"media {at} are {item.kind.value}, {title} takes images only")
    if not item.data:
        raise UnableError(f"image {at} comes without its bytes, {title} encodes images itself")
    return RequestPicture(f"data:{item.media_type};base64,{b64encode(item.data).decode()}", item.media_hash.hex())


def _with_one_token_each(token_ids: bytes, items: tuple[MediaItem, ...]) -> list[int]:
    pieces: list[bytes] = []
    at = 0
    for item in items:
        if item.token_count > 1:
            first = item.first_token * TOKEN_BYTES
            end = first + item.token_count * TOKEN_BYTES
            if first < at or end > len(token_ids):
                raise RefusedError(
                    f"an image has the tokens {item.first_token} to {item.first_token + item.token_count - 1} "
                    f"of {len(token_ids) // TOKEN_BYTES}: allowed are tokens of the prompt, in order"
                )
            pieces.append(token_ids[at : first + TOKEN_BYTES])
            at = end
    return list(unpack_tokens(b"".join([*pieces, token_ids[at:]])))
