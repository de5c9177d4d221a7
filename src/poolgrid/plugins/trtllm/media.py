"""From a request's media to what TensorRT-LLM takes: images, embeddings, or the handles of an encode worker.

Rules:

1. The bytes were fetched, checked and hashed by the front end; nothing here opens a URL or a path.
2. The prompt goes as text: with token ids and media TensorRT-LLM would decode the ids and tokenize again, and their
   number may change.
3. A request has images or embeddings, not both: TensorRT-LLM takes one of the two.
4. Images are named where the version takes names, so that its events say which blocks depend on them
   (``media_name``). Embeddings cannot be named.
5. A ``.pt`` file is loaded with ``weights_only``: a pickle of anything but tensors is refused, never run.

Which media an engine's blocks depend on: its names of media, and the hashes that routers know them by. Pure.

A medium is known on the wire by the BLAKE3 of its bytes. The engine is given a name made of it (``multi_modal_uuids``,
after 1.2), and says that name in its events (``mm_keys``), so events can be translated without remembering anything:

1. The name is 32 hexadecimal digits: the wire's hash seed, which covers the tenant's salt and the adapter, then the
   u64 hash of the medium. So equal media of two tenants have different names, as their blocks have, and the first block
   of a prompt tells whose it is. A digest of the engine's own has 64 digits: the two cannot be mistaken for each other.
2. Embeddings that an encode worker made have no name but the digest that came with them. Those of requests that are
   here are remembered, ``DIGESTS_MAX`` of them. A digest says nothing about tenants: a first block goes by it only when
   no request with a salt or an adapter brought the same digest.
3. Any other name is not ours. Its blocks stay without a name, as those of media did before.

A medium's tokens are numbers beyond the vocabulary, which differ between models and versions. Here they are the token
that stands for an image in the prompt's text, as a router fills them in.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from poolgrid.kernel.kv_events.cache_events import StoredBlock
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.hashing import BASE_SEED, pack_tokens, unpack_tokens
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, media_hash_u64
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError, UnsupportedError
from poolgrid.plugins.trtllm.library import MEDIA_NAMES

DIGESTS_MAX = 65_536
"""Digests that are remembered (some 20 MB): far more media than a cache holds."""

_NAME = re.compile(r"([0-9a-f]{16})([0-9a-f]{16})")


def media_name(media_hash: bytes, hash_seed: int) -> str:
    """Return what the engine is to call a medium of a request with a wire hash seed."""
    return f"{hash_seed:016x}{media_hash_u64(media_hash):016x}"


class MediaNames:
    """Translates blocks that media touch."""

    def __init__(self, vocabulary_size: int, image_token_id: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._image_token_id = image_token_id
        self._digests: OrderedDict[str, tuple[int, int | None]] = OrderedDict()
        """By digest: the medium's u64 hash, and the one seed that it came with (``None`` = several)."""

    def note(self, digests: Sequence[str], media_hashes: Sequence[bytes], hash_seed: int) -> None:
        """Remember the digests of a request's media, in their order, before the engine gets it."""
        for digest, media_hash in zip(digests, media_hashes, strict=False):
            known = self._digests.get(digest)
            seed = hash_seed if known is None or known[1] == hash_seed else None
            self._digests[digest] = (media_hash_u64(media_hash), seed)
            self._digests.move_to_end(digest)
            if len(self._digests) > DIGESTS_MAX:
                self._digests.popitem(last=False)

    def __call__(self, blocks: Sequence[StoredBlock]) -> tuple[StoredBlock, ...]:
        """Return blocks with the media that touch them, where all of those are known."""
        return tuple([self._named(block) if block.media_keys else block for block in blocks])

    def _named(self, block: StoredBlock) -> StoredBlock:
        hashes: list[int] = []
        seeds: set[int | None] = set()
        for key in block.media_keys:
            ours = _NAME.fullmatch(key)
            if ours is not None:
                seeds.add(int(ours[1], 16))
                hashes.append(int(ours[2], 16))
                continue
            known = self._digests.get(key)
            if known is None:
                return block
            seeds.add(BASE_SEED if known[1] == BASE_SEED else None)
            hashes.append(known[0])
        beyond, stands_in = self._vocabulary_size, self._image_token_id
        tokens = [stands_in if token >= beyond else token for token in unpack_tokens(block.tokens)]
        return msgspec.structs.replace(
            block,
            tokens=pack_tokens(tokens),
            multimodal=False,
            media_hashes=tuple(hashes),
            hash_seed=seeds.pop() if len(seeds) == 1 else None,
        )


PACKAGES = {"PIL": "Pillow"}
"""Packages whose modules have another name."""

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
        package = PACKAGES.get(error.name or "", error.name)
        raise UnableError(f"medium {at} ({item.media_type}) needs {package}, which is not installed here") from None
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
