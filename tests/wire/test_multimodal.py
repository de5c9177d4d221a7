"""What media do to block hashes, and which bytes are not a request's media."""

from __future__ import annotations

import pytest

from poolgrid.kernel.wire import codec, limits
from poolgrid.kernel.wire.errors import DecodeError, LimitError
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens
from poolgrid.kernel.wire.multimodal import (
    MediaItem,
    MediaKind,
    MultimodalInput,
    digest_media,
    known_tokens,
    media_hash_u64,
    media_hashes_of_blocks,
)

BLOCK_SIZE = 4


def _item(first_token: int, token_count: int, data: bytes = b"a cat") -> MediaItem:
    return MediaItem(MediaKind.IMAGE, data, "image/png", digest_media(data), first_token, token_count)


def test_the_hash_is_blake3_of_the_raw_bytes() -> None:
    """The empty input's digest is the first vector that BLAKE3 publishes."""
    digest = digest_media(b"")

    assert digest.hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert media_hash_u64(digest) == int.from_bytes(bytes.fromhex("af1349b9f5f9a1a6"), "little")


def test_an_item_touches_every_block_that_one_of_its_tokens_lies_in() -> None:
    cat, dog = _item(3, 6), _item(9, 3, b"a dog")

    assert media_hashes_of_blocks([cat, dog], BLOCK_SIZE) == {
        0: [media_hash_u64(cat.media_hash)],
        1: [media_hash_u64(cat.media_hash)],
        2: [media_hash_u64(cat.media_hash), media_hash_u64(dog.media_hash)],
    }


def test_equal_media_share_blocks_and_different_media_share_only_what_comes_before_them() -> None:
    tokens = pack_tokens([1, 2, 3, 4, 7, 7, 7, 7])
    cat, same, dog = (
        block_hashes(tokens, BLOCK_SIZE, multimodal_hashes=media_hashes_of_blocks([_item(4, 4, data)], BLOCK_SIZE))
        for data in (b"a cat", b"a cat", b"a dog")
    )

    assert cat == same
    assert cat[0] == dog[0]
    assert cat[1] != dog[1]


def test_tokens_are_known_up_to_the_first_item_whose_length_is_not() -> None:
    assert known_tokens([], 20) == 20
    assert known_tokens([_item(3, 6)], 20) == 20
    assert known_tokens([_item(3, 6), _item(9, 0), _item(12, 0)], 20) == 9


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ((), "length >= 1"),
        ((MediaItem(MediaKind.IMAGE, b"", "image/png", b"short"),), "length >= 32"),
        ((MediaItem("video", b"", "video/mp4", bytes(32)),), "video"),  # type: ignore[arg-type]
        (tuple([_item(0, 0)] * (limits.MEDIA_ITEMS_MAX + 1)), "length <="),
    ],
)
def test_media_beyond_the_contract_are_not_decoded(items: tuple[MediaItem, ...], words: str) -> None:
    frame = codec.multimodal.encode(MultimodalInput("look", items))

    with pytest.raises(DecodeError, match=words):
        codec.multimodal.decode(frame)


def test_media_beyond_a_frame_are_not_encoded() -> None:
    half = bytes(limits.FRAME_BYTES_MAX // 2)
    item = MediaItem(MediaKind.IMAGE, half, "image/png", bytes(32))

    with pytest.raises(LimitError):
        codec.multimodal.encode(MultimodalInput("look", (item, item)))
