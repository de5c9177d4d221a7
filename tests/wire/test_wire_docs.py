"""``docs/internals/wire.md`` says what the definitions do not: frames of the feed, numbers of enumerations, vectors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from poolgrid.kernel.wire import feed, hashing, identifiers

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "wire.md").read_text()


def _frames(name: str) -> tuple[list[str], bool]:
    """The frames of one feed message as the page has them, and whether the last may come again."""
    (row,) = [line for line in PAGE.splitlines() if re.match(rf"\| {name} \| `", line)]
    cell = row.split(" | ")[1]
    return re.findall(r"`(\w+)`", cell), cell.endswith("…")


OFFSET, LIFE = 0x0102030405060708, b"one life"
FRAME_NAMES = {
    feed.FEED_TOPIC: "topic",
    feed.ALIVE_TOPIC: "topic",
    OFFSET.to_bytes(8, "big"): "offset",
    LIFE: "life",
    b"first": "record",
    b"second": "record",
    b"an answer": "answer",
}


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("records", next(feed.encode_records(OFFSET, [b"first", b"second"], LIFE))),
        ("keepalive", feed.encode_alive(OFFSET, LIFE)),
        ("answer", feed.encode_answer(b"an answer", LIFE)),
    ],
)
def test_the_frames_of_the_feed_are_sent_in_the_order_of_the_page_and_of_the_docstring(
    name: str, frames: list[bytes]
) -> None:
    printed, repeats = _frames(name)
    (line,) = [line for line in (feed.__doc__ or "").splitlines() if line.startswith(f"    {name}  ")]

    sent = [FRAME_NAMES[frame] for frame in frames]

    assert sent == (printed + printed[-1:] if repeats else printed)
    assert re.findall(r"(?:^|, )(topic|offset|life|record|answer)\b", line[17:]) == sent
    assert repeats == line.endswith("...")


def test_tiers_roles_and_stages_are_listed_with_their_numbers() -> None:
    for member in (*identifiers.Tier, *identifiers.Role, *identifiers.Stage):
        assert f"{member.value} = {member.name.lower()}" in PAGE


def test_the_printed_vectors_are_what_the_code_computes() -> None:
    tokens = hashing.pack_tokens(range(64))
    plain = hashing.block_hashes(tokens, 16)
    seeds = [hashing.hash_seed(*names) for names in (("a", ""), ("", "s"), ("a", "s"))]

    printed = {int(number) for number in re.findall(r"\b\d{16,20}\b", PAGE.replace(",", ""))}

    assert {
        *plain,
        *hashing.sequence_hashes(plain),
        *(hashing.block_hashes(tokens, 16, seed)[0] for seed in seeds),
        hashing.block_hashes(tokens, 16, multimodal_hashes={0: [5]})[0],
    } == printed
    assert hashing.HASH_SPEC in PAGE
