"""Tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lab.build_tiny import VOCAB_SIZE
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.server.frontend.detokenization import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_level_alphabet,
)
from poolgrid.server.frontend.stop_strings import StopStrings
from tests.examples import examples
from tests.frontend.fake_backend import TINY

TEXTS = [
    "Hello, world!",
    " leading space",
    "héllo wörld",
    "emoji 😀👩‍👩‍👧‍👦 done",
    "日本語のテキスト",
    "a\n\n\tb  c",
    "x",
]


def fed(detokenizer: Detokenizer, token_ids: Sequence[int], cuts: Sequence[int]) -> str:
    text = ""
    begin = 0
    for end in [*sorted(cuts), len(token_ids)]:
        text += detokenizer.feed(token_ids[begin:end])
        begin = max(begin, end)
    return text + detokenizer.flush()


@given(data=st.data(), token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
@settings(max_examples=examples(40))
def test_any_byte_level_tokens_cut_anywhere_give_the_text_of_the_whole(
    data: st.DataObject, token_ids: list[int]
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8))

    text = fed(TINY.detokenizer(), token_ids, cuts)

    assert text == TINY.tokenizer.decode(token_ids, skip_special_tokens=True)


def test_a_split_character_waits_for_its_last_token() -> None:
    token_ids = unpack_tokens(TINY.encode("\U0001f9a9"))
    assert len(token_ids) > 1
    detokenizer = TINY.detokenizer()

    pieces = [detokenizer.feed((token_id,)) for token_id in token_ids]

    assert pieces == [""] * (len(token_ids) - 1) + ["\U0001f9a9"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_at_the_end_becomes_the_replacement_character() -> None:
    token_ids = unpack_tokens(TINY.encode("\U0001f9a9"))
    assert fed(TINY.detokenizer(), token_ids[:-1], []) == "\ufffd"


def test_ids_beyond_the_tokenizer_are_silent_as_in_the_tokenizer_itself() -> None:
    detokenizer = TINY.detokenizer()
    assert detokenizer.feed((40, VOCAB_SIZE + 5, 41)) == TINY.tokenizer.decode([40, 41])
    assert detokenizer.feed((VOCAB_SIZE + 5,)) == ""


def test_the_byte_alphabet_is_the_one_of_the_tokenizers_library() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


@functools.cache
def sentencepiece_like() -> Tokenizer:
    """A Llama-style tokenizer: metaspace, byte fallback, the leading space stripped when decoding."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["Hello world, how are you today? the end of a time " * 20, "abc xyz é"], trainer)
    # The trainer marks byte tokens as special; in real models they are ordinary.
    rebuilt = Tokenizer.from_str(tokenizer.to_str().replace('"special":true', '"special":false', 259))
    rebuilt.add_special_tokens(["<unk>", "<s>", "</s>"])
    return rebuilt


@functools.cache
def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(["Hello, world! how are you today? don't stop the ending of times " * 20], trainer)
    return tokenizer


@pytest.mark.parametrize("build", [sentencepiece_like, wordpiece])
@given(data=st.data())
def test_other_tokenizers_cut_anywhere_give_the_text_of_the_whole(build: object, data: st.DataObject) -> None:
    tokenizer = sentencepiece_like() if build is sentencepiece_like else wordpiece()
    text = data.draw(
        st.sampled_from(["Hello world", "how are you today? 😀 the end", "é times 日本", "don't stop", "a"])
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8))

    assert fed(WindowDetokenizer(tokenizer), token_ids, cuts) == tokenizer.decode(token_ids)


CHARACTERS_OF_BYTES = "the end of a time 日é🦩 how are you 🦩🦩 today, Hello world 日"


@pytest.mark.parametrize("stride", [1, 3, 16, 17, 100])
def test_tokens_of_a_character_that_arrive_apart_make_it_however_many_arrive_together(stride: int) -> None:
    tokenizer = sentencepiece_like()
    token_ids = tokenizer.encode(CHARACTERS_OF_BYTES, add_special_tokens=False).ids
    for shift in range(min(stride, len(token_ids))):
        cuts = range(shift, len(token_ids), stride)
        assert fed(WindowDetokenizer(tokenizer), token_ids, cuts) == CHARACTERS_OF_BYTES


def test_a_continuation_keeps_the_space_that_begins_it() -> None:
    tokenizer = sentencepiece_like()
    prompt = tokenizer.encode("how are", add_special_tokens=False).ids
    continuation = tokenizer.encode("you", add_special_tokens=False).ids
    assert tokenizer.decode(continuation) == "you"

    assert fed(WindowDetokenizer(tokenizer, prompt), continuation, []) == " you"


def test_a_step_of_the_window_decodes_a_bounded_number_of_tokens() -> None:
    tokenizer = sentencepiece_like()
    sizes: list[int] = []

    class Counting:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            sizes.append(len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = WindowDetokenizer(cast(Tokenizer, Counting()))
    token_ids = tokenizer.encode("Hello world " * 200, add_special_tokens=False).ids
    byte_token = tokenizer.token_to_id("<0xFF>")
    assert byte_token is not None
    text = "".join(detokenizer.feed((token_id,)) for token_id in [*token_ids, *[byte_token] * 200])

    assert text.startswith("Hello world")
    assert max(sizes) <= 40


@pytest.mark.parametrize("text", TEXTS)
def test_a_table_of_bytes_and_the_tokenizer_agree(text: str) -> None:
    assert TINY.byte_table is not None
    token_ids = unpack_tokens(TINY.encode(text))
    assert fed(ByteLevelDetokenizer(TINY.byte_table()), token_ids, range(len(token_ids))) == text
    assert TINY.decode(pack_tokens(token_ids)) == text


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    search = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += search.feed(piece)
        if search.matched is not None:
            return shown, search.matched
    return shown + search.flush(), None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """What a reader would have shown who looked at the text character by character."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "The END of it", "The ", "END"),
        (["END"], "The EN", "The EN", None),
        (["abc", "b"], "xabc", "xa", "b"),
        (["aab"], "aaaab", "aa", "aab"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["😀!"], "so 😀!", "so ", "😀!"),
        (["a"], "a", "", "a"),
    ],
)
def test_a_stop_string_is_found_wherever_the_text_is_cut_in_two(
    stops: list[str], text: str, shown: str, matched: str | None
) -> None:
    for cut in range(len(text) + 1):
        assert run(stops, [text[:cut], text[cut:]]) == (shown, matched)
    assert run(stops, list(text)) == (shown, matched)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab\nc", max_size=5), max_size=10),
)
def test_any_cut_gives_what_a_reader_of_single_characters_would_show(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_no_more_is_held_back_than_could_still_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    search = StopStrings(stops)
    text = ""
    shown = ""
    for piece in pieces:
        text += piece
        shown += search.feed(piece)
        if search.matched is not None:
            break
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
