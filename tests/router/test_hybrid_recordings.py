"""What is promised of hybrid models, replayed from what a real vLLM published (``tests/data/kv_groups``)."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import pytest

from poolgrid.wire.events import GroupsReported, KvGroup
from tests.real_vllm.hybrid import FrameReader
from tests.real_vllm.servers import BLOCK_SIZE

RECORDINGS = Path(__file__).parents[1] / "data" / "kv_groups"


@pytest.mark.parametrize(
    ("kind", "group"), [("window", KvGroup(-(-(96 - 1) // BLOCK_SIZE))), ("state", KvGroup(1))], ids=["window", "state"]
)
def test_what_is_promised_is_what_the_engine_reused(kind: str, group: KvGroup) -> None:
    recorded = zlib.decompress((RECORDINGS / f"{kind}.msgpack.zlib").read_bytes())
    frames, asked = msgspec.msgpack.decode(recorded, type=tuple[list[bytes], list[tuple[list[int], int, int]]])
    reader = FrameReader()
    too_many = reused = 0
    for prompt, cached_tokens, published in asked:
        for payload in frames[len(reader.frames) : published]:
            reader.take(payload)
        promised, by_full_attention_alone = reader.promised(prompt)
        assert promised == cached_tokens
        too_many += max(0, by_full_attention_alone - cached_tokens)
        reused += cached_tokens

    assert reader.groups == [msgspec.to_builtins(GroupsReported((group,)))]
    assert any(b"BlockRemoved" in each for each in frames)
    assert too_many > 0, "full attention alone promises what cannot be resumed"
    assert reused > 10 * BLOCK_SIZE
