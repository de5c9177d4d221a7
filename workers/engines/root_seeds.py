"""Which tenant the first block of a chain belongs to, of an engine whose events do not name it. Pure.

The cache salt and the adapter enter the engine's own hash; few versions name the salt in an event, none the adapter.
The worker knows which requests it was given. So for each request with a salt or an adapter the engine's hash of its
first block is computed and remembered with the wire's hash seed. A first block is

1. one of those, by its hash, or by the names of the media that touch it (``media_names``);
2. of the salt that its event names, where no request with an adapter began with its tokens;
3. no tenant's, when its hash is that of the bare tokens;
4. not known, when its hash is not that of the bare tokens and this engine's hash of bare tokens is known to be ours;
5. not known, when a request with a salt or an adapter began with its tokens. An event without a salt proves nothing,
   unless this engine has named salts and no request with an adapter began with these tokens;
6. no tenant's, otherwise: an engine that hashes otherwise.

What is not known is reported to no router. Tenants never share a key by mistake.

The stream that the second cache manager publishes by itself names blocks by SHA-256 digests, and no salts
(``of_stream``). There rules 1, 3, 5 and 6 hold for digests, and rule 4 once any digest was found to be ours. Who sees
no prompts of requests, only their salts, notes those (``note_salt``): a first block is tried with each.

Bounded: the oldest of ``ROOTS_MAX`` first blocks is forgotten; its events came long ago. So is the salt that was not
used for the longest time, of ``SALTS_MAX``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from blake3 import blake3

from poolgrid.kernel.kv_events.cache_events import StoredBlock
from poolgrid.kernel.wire.hashing import BASE_SEED, hash_seed, unpack_tokens

ROOTS_MAX = 65_536
"""First blocks that are remembered: far more than an engine has requests."""

SALTS_MAX = 256
"""Salts that a first block is tried with: a fifth of a millisecond where none fits."""


class RootSeeds:
    """The first blocks of requests that have a salt or an adapter."""

    def __init__(self, block_size: int, digest_is_known: bool = False) -> None:
        """``digest_is_known``: a name in the stream that is not ours is another tenant's, never another version's."""
        self._bytes = 4 * block_size
        self._seeds: OrderedDict[int, int] = OrderedDict()
        self._tokens: OrderedDict[bytes, None] = OrderedDict()
        self._adapted: OrderedDict[bytes, None] = OrderedDict()
        """First blocks of requests with an adapter."""
        self._names_salts = False
        """This engine has named a salt."""
        self._hash_is_known = False
        """A first block of this engine had the hash of its bare tokens."""
        self._digest_is_known = digest_is_known
        """The digest of a first block in its stream was ours."""
        self._salts: OrderedDict[str, None] = OrderedDict()

    def note(self, token_ids: bytes, lora_name: str, lora_number: int | None, cache_salt: str) -> None:
        """Remember a request that the engine is about to get; its prompt in u32 little-endian."""
        if not (lora_name or cache_salt) or len(token_ids) < self._bytes:
            return
        first = token_ids[: self._bytes]
        seed = hash_seed(lora_name, cache_salt)
        for salt in salt_ids(cache_salt):
            _remember(self._seeds, root_key(unpack_tokens(first), salt, lora_number), seed, ROOTS_MAX)
        _remember(self._seeds, root_digest(first, salt_ids(cache_salt)[0], lora_number), seed, ROOTS_MAX)
        _remember(self._tokens, first, None, ROOTS_MAX)
        if lora_name:
            _remember(self._adapted, first, None, ROOTS_MAX)

    def __call__(self, block: StoredBlock) -> int | None:
        """Return the wire's hash seed of a chain's first block, or ``None`` when it is unknown."""
        if block.media_hashes:
            # The engine has other tokens for media than the request, and its hash covers more: neither tells.
            return block.hash_seed
        seed = self._seeds.get(block.block_hash)
        if seed is not None:
            return seed
        if block.cache_salt:
            self._names_salts = True
            return None if block.tokens in self._adapted else hash_seed("", block.cache_salt)
        if root_key(unpack_tokens(block.tokens)) == block.block_hash:
            self._hash_is_known = True
            return BASE_SEED
        if block.tokens not in self._tokens:
            return None if self._hash_is_known else BASE_SEED
        return BASE_SEED if self._names_salts and block.tokens not in self._adapted else None

    def note_salt(self, cache_salt: str) -> bool:
        """Remember a salt of requests whose prompts are not seen here; return whether it is new."""
        is_new = bool(cache_salt) and cache_salt not in self._salts
        if cache_salt:
            _remember(self._salts, cache_salt, None, SALTS_MAX)
        return is_new

    @staticmethod
    def of_salt(cache_salt: str) -> Callable[[bytes, int], int | None]:
        """Return what does the same as ``of_stream``, for this salt alone."""
        salt_id, seed = salt_ids(cache_salt)[0], hash_seed("", cache_salt)
        return lambda tokens, name: seed if root_digest(tokens, salt_id) == name else None

    def of_stream(self, tokens: bytes, name: int) -> int | None:
        """Return the same for the first block of a chain in the stream, by its tokens and its name there."""
        seed = self._seeds.get(name)
        if seed is None:
            seed = BASE_SEED if root_digest(tokens) == name else self._by_salt(tokens, name)
        if seed is not None:
            self._digest_is_known = True
            return seed
        return None if self._digest_is_known or tokens in self._tokens else BASE_SEED

    def _by_salt(self, tokens: bytes, name: int) -> int | None:
        for cache_salt in reversed(self._salts):
            if root_digest(tokens, salt_ids(cache_salt)[0]) == name:
                self.note_salt(cache_salt)
                return hash_seed("", cache_salt)
        return None


def _remember(into: OrderedDict, key: object, value: object, most: int) -> None:  # type: ignore[type-arg]
    into[key] = value
    into.move_to_end(key)
    if len(into) > most:
        into.popitem(last=False)


_U32 = 0xFFFF_FFFF
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9


def salt_ids(cache_salt: str) -> tuple[int | None, ...]:
    """Return the numbers that may stand for a cache salt in the engine's hash; none without a salt.

    The second cache manager takes the first 8 bytes, little-endian, of its SHA-256 digest. Versions before 1.3 took
    those of its BLAKE3 digest. The first cache manager of 1.3 has a hash of its C++ library, not computed here.
    """
    if not cache_salt:
        return (None,)
    text = cache_salt.encode()
    return tuple(int.from_bytes(each[:8], "little") for each in (hashlib.sha256(text).digest(), blake3(text).digest()))


def root_digest(tokens: bytes, salt_id: int | None = None, lora_number: int | None = None) -> int:
    """Return the name of a first block in the stream: 8 bytes, big-endian, of the digest over its scope's digest and
    its tokens (u32 little-endian).

    A scope is a byte that says which of adapter (1) and salt (2) there are, and 8 bytes, little-endian, of each.
    """
    given = [each for each in (lora_number, salt_id) if each is not None]
    scope = bytes([(lora_number is not None) + 2 * (salt_id is not None)])
    scope += b"".join((each & _U64).to_bytes(8, "little") for each in given)
    digest = hashlib.sha256(hashlib.sha256(scope).digest() + tokens).digest()
    return int.from_bytes(digest[:8], "big")


def root_key(token_ids: Sequence[int], salt_id: int | None = None, lora_number: int | None = None) -> int:
    """Return the engine's hash, "v1", of a first block.

    Arithmetic is modulo 2^64; the mix of a token wraps at 32 bits.
    """
    seed = len(token_ids)
    if salt_id is not None:
        seed = _mix_64(seed, salt_id)
    for token_id in token_ids:
        value = token_id & _U32
        value = ((value >> 16) ^ value) * 0x45D9_F3B & _U32
        value = ((value >> 16) ^ value) * 0x45D9_F3B & _U32
        value = (value >> 16) ^ value
        seed ^= (((value + _GOLDEN) & _U32) + (seed << 6) + (seed >> 2)) & _U64
    if lora_number is not None:
        seed = _mix_64(seed, lora_number)
    return seed


def _mix_64(seed: int, value: int) -> int:
    value &= _U64
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & _U64
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & _U64
    value ^= value >> 31
    return seed ^ ((value + _GOLDEN + (seed << 6) + (seed >> 2)) & _U64)
