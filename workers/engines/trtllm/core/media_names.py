"""Which media an engine's blocks depend on: its names of media, and the hashes that routers know them by. Pure.

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

import re
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from poolgrid.kv_events.cache_events import StoredBlock
from poolgrid.wire.hashing import BASE_SEED, pack_tokens, unpack_tokens
from poolgrid.wire.multimodal import media_hash_u64

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
