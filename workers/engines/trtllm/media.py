"""From a request's media to what TensorRT-LLM takes: images, embeddings, or the handles of an encode worker.

Rules:

1. The bytes were fetched, checked and hashed by the front end; nothing here opens a URL or a path.
2. The prompt goes as text: with token ids and media TensorRT-LLM would decode the ids and tokenize again, and their
   number may change.
3. A request has images or embeddings, not both: TensorRT-LLM takes one of the two.
4. Images are named where the version takes names, so that its events say which blocks depend on them
   (``core.media_names``). Embeddings cannot be named.
5. A ``.pt`` file is loaded with ``weights_only``: a pickle of anything but tensors is refused, never run.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.multimodal import MediaItem, MediaKind
from poolgrid.wire.requests import Generate
from poolgrid.workers.core.refusal import RefusedError, UnableError, UnsupportedError
from poolgrid.workers.engines.trtllm.core.media_names import media_name
from poolgrid.workers.engines.trtllm.library import MEDIA_NAMES

SAFETENSORS = "application/x-safetensors"


def load_media(
    request: Generate,
    has_handles: bool,
    hash_seed: int | None = None,
    takes_embeddings: bool = True,
    encoded_by: str = "",
) -> dict[str, Any]:
    """Return the inputs of ``generate_async``; blocks while images are decoded. Raises ``RefusedError``.

    ``has_handles``: an encode worker has the embeddings already, and the media themselves are not needed.
    ``hash_seed``: the seed of the request's block hashes, by which its images are named; ``None`` = they are not.
    ``encoded_by``: who makes embeddings of images, where this worker does not.
    """
    assert request.multimodal is not None
    try:
        media = codec.multimodal.decode(request.multimodal)
    except DecodeError as error:
        raise RefusedError(f"multimodal: {error}") from None
    inputs: dict[str, Any] = {"prompt": media.prompt_text}
    if has_handles:
        return inputs
    kinds = {item.kind for item in media.items}
    if len(kinds) > 1:
        raise UnsupportedError("the request has images and embeddings, TensorRT-LLM takes one of the two per request")
    if MediaKind.IMAGE in kinds and encoded_by:
        raise UnableError(
            f"the request has images without embeddings, which {encoded_by} makes (encode_endpoint): this worker "
            "encodes none itself"
        )
    if MediaKind.IMAGE in kinds:
        inputs["multi_modal_data"] = {"image": [_load(at, item, _image) for at, item in enumerate(media.items)]}
        if hash_seed is not None:
            inputs[MEDIA_NAMES] = {"image": [media_name(item.media_hash, hash_seed) for item in media.items]}
    elif not takes_embeddings:
        raise UnableError("the request has embeddings, which TensorRT-LLM's class of this model does not take")
    else:
        inputs["multi_modal_embeddings"] = {
            "image": [_load(at, item, _embeddings) for at, item in enumerate(media.items)]
        }
    return inputs


def _load(at: int, item: MediaItem, load: Callable[[MediaItem], Any]) -> Any:
    if not item.data:
        raise RefusedError(f"medium {at} has no bytes, and no encode worker's params stand for it")
    try:
        return load(item)
    except RefusedError:
        raise
    except ImportError as error:
        raise UnableError(f"medium {at} ({item.media_type}) needs {error.name}, which is not installed here") from None
    except Exception as error:  # whatever the decoder of a broken file raises
        raise UnsupportedError(f"medium {at} ({item.media_type}) cannot be loaded: {error}") from None


def _image(item: MediaItem) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(item.data)) as image:
        return image.convert("RGB")


def _embeddings(item: MediaItem) -> Any:
    found: Any
    if item.media_type == SAFETENSORS:
        from safetensors.torch import load

        found = list(load(item.data).values())
    else:
        import torch

        found = torch.load(io.BytesIO(item.data), map_location="cpu", weights_only=True)
        found = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else [found]
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} tensors, allowed is 1")
    return found[0]
