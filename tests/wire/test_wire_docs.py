"""``docs/wire.md`` says what ``wire`` is: every message with its fields in order, every limit with its value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from poolgrid.wire import feed, hashing, identifiers, limits
from tests.cases import for_each
from tests.wire.messages import messages

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()

# By what they are called on the wire.
STRUCTS = {str(value.__struct_config__.tag or value.__name__): value for value in messages()}
LIMITS = {name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)}


def _row(name: str) -> list[str]:
    """The cells of the one table row whose first cell is ``name``."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"docs/wire.md: {len(rows)} table rows begin with `{name}`, wanted is one"
    return [cell.strip() for cell in rows[0].strip("|").split(" | ")]


@for_each("name", sorted(STRUCTS))
def test_every_message_has_a_row_with_its_fields_in_wire_order(name: str) -> None:
    fields = re.findall(r"`(\w+)`", _row(name)[1])

    assert tuple(fields) == STRUCTS[name].__struct_fields__


@for_each("name", sorted(STRUCTS))
def test_optional_fields_are_marked(name: str) -> None:
    marked = re.findall(r"`(\w+)`\?", _row(name)[1])
    fields = STRUCTS[name].__struct_fields__
    defaults = STRUCTS[name].__struct_defaults__

    assert tuple(marked) == (fields[-len(defaults) :] if defaults else ())


@for_each("name", sorted(LIMITS))
def test_every_limit_has_a_row_with_its_value(name: str) -> None:
    assert _row(name)[1].replace(",", "") == str(LIMITS[name])


def test_no_row_speaks_of_what_does_not_exist() -> None:
    named = re.findall(r"^\| `([A-Z]\w+)` \|", PAGE, re.MULTILINE)

    assert set(named) <= set(STRUCTS) | set(LIMITS)


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
        limits.U64_MAX,
    } == printed
    assert hashing.HASH_SPEC in PAGE
