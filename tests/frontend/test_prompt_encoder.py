"""The prompt encoder gives the tokenizer's own answer on every input, whatever it cuts, caches or hands to others."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from poolgrid.kernel.requests.inference import EVERYBODY
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.frontend import prompt_encoder
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_encoder import Lookup, PromptEncoder
from poolgrid.server.frontend.tokenization import SEGMENT_CHARS_MIN, cut
from tests.examples import examples

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock, don't you know?\n",
    "def encode(text: str) -> bytes:\n    return text.encode('utf-8')  # naïve café, 日本語, emoji 🙂\n",
    "Der schnelle braune Fuchs springt über den faulen Hund.\t« Ça va ? »  Ünïcödé\r\n",
] * 4
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, special=True, **{"normalized": False, **flags})


CHAT = [special("<|start|>"), special("<|end|>"), special("<bos>")]
AWKWARD = [
    *CHAT,
    special("<mask>", lstrip=True),
    special("<right>", rstrip=True),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("lazy", normalized=True),
    AddedToken("QUICK", normalized=True, single_word=True),
]


def byte_level(added: list[AddedToken], add_prefix_space: bool = False, **model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(added)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", bos)]),
        ]
    )
    return tokenizer


def gpt2_style(added: list[AddedToken]) -> Tokenizer:
    tokenizer = byte_level(added)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel()
    return tokenizer


def sentence_piece(scheme: str) -> Callable[[list[AddedToken]], Tokenizer]:
    def make(added: list[AddedToken]) -> Tokenizer:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.add_tokens(added)
        return tokenizer

    return make


def llama2_style(added: list[AddedToken]) -> Tokenizer:
    tokenizer = byte_level(added)
    document = json.loads(tokenizer.to_str())
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    document["pre_tokenizer"] = None
    document["model"]["unk_token"] = None
    return Tokenizer.from_str(json.dumps(document))


def word_piece(added: list[AddedToken]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(added)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", tokenizer.token_to_id("[SEP]") or 0), ("[CLS]", tokenizer.token_to_id("[CLS]") or 0)
    )
    return tokenizer


KINDS: dict[str, Callable[[list[AddedToken]], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, ignore merges": lambda added: byte_level(added, ignore_merges=True),
    "byte-level, prefix space": lambda added: byte_level(added, add_prefix_space=True),
    "gpt2": gpt2_style,
    "metaspace first": sentence_piece("first"),
    "metaspace always": sentence_piece("always"),
    "metaspace never": sentence_piece("never"),
    "prepend": llama2_style,
    "word piece": word_piece,
}


@cache
def trained(kind: str, awkward: bool) -> Tokenizer:
    return KINDS[kind](AWKWARD if awkward else CHAT)


@cache
def made(kind: str, awkward: bool, fast: bool) -> tuple[Tokenizer, PromptEncoder]:
    tokenizer = trained(kind, awkward)
    return tokenizer, PromptEncoder(tokenizer, cache_bytes=64 * 1024, fast=fast)


def answer(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> bytes:
    return pack_tokens(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


TOKENS = [str(token.content) for token in AWKWARD]
fragments = st.one_of(
    st.sampled_from([*TOKENS, *(token[:-1] for token in TOKENS), *(token[1:] for token in TOKENS)]),
    st.sampled_from([" ", "  ", "\n", "\t\n", "lazy", "quick QUICK", "it's", "1234", "é", "e\u0301", "🙂", "▁"]),
    st.text(max_size=12),
    # Long enough that the next delimiter is cut at.
    st.sampled_from(["word " * 60, "\n" * 300, " " * 257, "abc\u0301 " * 70]),
)
texts = st.lists(fragments, max_size=14).map("".join)


@pytest.mark.parametrize("awkward", [False, True], ids=["plain", "awkward"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_tokenizers_own_ids(kind: str, awkward: bool) -> None:
    tokenizer, slow = made(kind, awkward, fast=False)
    _, fast = made(kind, awkward, fast=True)
    assert slow.delimiters, "these tokenizers have a delimiter that is proven safe"

    @settings(max_examples=examples(6), deadline=None, database=None)
    @given(texts, st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        expected = answer(tokenizer, text, add_special_tokens)
        for encoder in (slow, fast):
            assert encoder.encode(text, add_special_tokens, EVERYBODY) == expected
            # Again, now from the cache.
            assert encoder.encode(text, add_special_tokens, EVERYBODY) == expected

    check()


contents = st.one_of(
    texts,
    # Long texts that begin alike: nothing but the comparison itself tells them from each other.
    st.tuples(st.sampled_from(["word " * 120, "\n" * 300]), texts).map("".join),
)
turns = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["say", "say", "say", "forget the oldest", "branch"]), contents),
    min_size=3,
    max_size=12,
)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace first", "prepend", "word piece"])
def test_conversations_that_interleave_have_the_tokenizers_own_ids(kind: str) -> None:
    """In a cache so small that segments are forgotten all the time, also between looking up and completing."""
    tokenizer = trained(kind, awkward=True)
    encoder = PromptEncoder(tokenizer, cache_bytes=48 * 1024, fast=False)
    assert encoder.delimiters

    @settings(max_examples=examples(5), deadline=None, database=None)
    @given(turns)
    def check(turns: list[tuple[int, str, str]]) -> None:
        held: dict[int, list[str]] = {number: [] for number in range(3)}
        waiting: list[tuple[str, Lookup]] = []
        for number, what, content in turns:
            said = held[number]
            if what == "forget the oldest":
                said = said[1:]
            elif what == "branch":
                said = held[(number + 1) % 3][:-1]
            said = held[number] = [*said, f"<|start|>user\n{content}<|end|>\n"]
            text = f"{''.join(said)}<|start|>"
            waiting.append((text, encoder.look_up(text, domain=EVERYBODY)))
            if len(waiting) > 2:
                asked, lookup = waiting.pop(0)
                assert encoder.complete(lookup) == answer(tokenizer, asked)
            assert encoder.encode(text, domain=EVERYBODY) == answer(tokenizer, text)
            assert encoder.cache_used_bytes <= 48 * 1024
        for asked, lookup in waiting:
            assert encoder.complete(lookup) == answer(tokenizer, asked)

    check()


def test_a_later_turn_of_a_conversation_is_computed_for_its_new_text_only() -> None:
    tokenizer, encoder = made("byte-level", awkward=False, fast=False)
    encoder.clear()
    reused, encoded = encoder.reused_tokens, encoder.encoded_tokens
    turns = ""
    for number in range(6):
        turns += f"<|start|>user\nquestion {number} {'quick brown fox ' * 40}<|end|>\n"
        before = encoder.encoded_tokens
        prompt = f"{turns}<|start|>assistant\n"
        assert encoder.encode(prompt, domain=EVERYBODY) == answer(tokenizer, prompt)
        computed = encoder.encoded_tokens - before
        assert computed < 1.5 * len(answer(tokenizer, turns)) / 4 / (number + 1) + 8
        turns += f"<|start|>assistant\nanswer {number} {'lazy dog ' * 40}<|end|>\n"
    assert encoder.reused_tokens - reused > encoder.encoded_tokens - encoded


def test_the_cache_stays_within_its_bytes_and_forgets_the_oldest() -> None:
    tokenizer, _ = made("byte-level", awkward=False, fast=False)
    encoder = PromptEncoder(tokenizer, cache_bytes=40_000, fast=False)
    texts = [f"<|start|>{number} {'filler ' * 60}<|end|>{number}{'more ' * 60}" for number in range(100)]
    for text in texts:
        assert encoder.encode(text, domain=EVERYBODY) == answer(tokenizer, text)
        assert encoder.cache_used_bytes <= 40_000
    encoded = encoder.encoded_tokens
    encoder.encode(texts[-1], domain=EVERYBODY)
    assert encoder.encoded_tokens == encoded, "the newest is there"
    encoder.encode(texts[0], domain=EVERYBODY)
    assert encoder.encoded_tokens > encoded, "the oldest is gone"


@pytest.mark.parametrize(
    "added",
    [
        [special("<|s|>", lstrip=True)],
        [special("<|s|>", rstrip=True)],
        [special("<|s|>", single_word=True)],
        [special("<|s|>", normalized=True)],
        [special(" <|s|>")],
        [special("<|s|>"), special("<|s|>x")],
        [special("<|s|>"), special("|>y")],
        [special("<<s|>")],
        [special("sx"), special("other", single_word=True)],
    ],
    ids=["lstrip", "rstrip", "single word", "normalized", "blank edge", "prefix", "overlap", "self-overlap", "word"],
)
def test_a_token_that_is_not_proven_safe_is_not_cut_at(added: list[AddedToken]) -> None:
    tokenizer = Tokenizer.from_str(made("byte-level", awkward=False, fast=False)[0].to_str())
    tokenizer.add_tokens(added)
    encoder = PromptEncoder(tokenizer, template_text=str(added[0].content), fast=False)
    assert str(added[0].content) not in encoder.delimiters
    text = f"{'a b ' * 80}{added[0].content} {'c d ' * 80}{added[0].content}x"
    assert encoder.encode(text, domain=EVERYBODY) == answer(tokenizer, text)


def test_a_tokenizer_that_rolls_dice_is_never_cut() -> None:
    document = json.loads(made("byte-level", awkward=False, fast=False)[0].to_str())
    document["model"]["dropout"] = 0.5
    encoder = PromptEncoder(Tokenizer.from_str(json.dumps(document)), fast=False)
    assert encoder.delimiters == ()


def test_a_fast_tokenizer_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = made("byte-level", awkward=False, fast=False)

    class Differs:
        @staticmethod
        def from_json_str(_: str) -> Differs:
            return Differs()

        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            flat = b"".join(answer(tokenizer, text.replace("ﬁ", "fi"), add_special_tokens) for text in texts)
            return flat, b""

    fastokens = pytest.importorskip("fastokens")
    monkeypatch.setattr(fastokens, "Tokenizer", Differs)
    encoder = PromptEncoder(tokenizer)
    assert not encoder.is_fast
    assert "ﬁ" in encoder.slow_because
    assert encoder.encode("ﬁ", domain=EVERYBODY) == answer(tokenizer, "ﬁ")


def test_a_prompt_on_which_the_fast_tokenizer_fails_is_encoded_all_the_same() -> None:
    tokenizer, _ = made("byte-level", awkward=False, fast=False)
    encoder = PromptEncoder(tokenizer, fast=False)

    class Panic(BaseException):
        """What a native panic looks like."""

    class Failing:
        def encode(self, _: object, __: bool) -> list[bytes]:
            raise Panic("match limit exceeded")

    encoder._backend.encoder = Failing()
    long = f"<|start|>{'some text ' * 60}<|end|>{'more text ' * 60}"
    for text in ("short", long):
        assert encoder.encode(text, domain=EVERYBODY) == answer(tokenizer, text)
    assert encoder.fast_failures == 2


def test_the_shipped_model_is_cut_at_its_template_and_tokenized_fast_where_that_is_installed() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
    encoder = PromptEncoder(tokenizer, template_text="<|im_start|>{{ role }}<|im_end|>")
    assert set(encoder.delimiters) == {"<|im_start|>", "<|im_end|>"}
    pytest.importorskip("fastokens")
    assert encoder.is_fast


def test_a_tokenizer_that_is_proven_later_gives_the_same_ids_before_and_after() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
    at_once = PromptEncoder(tokenizer)
    later = PromptEncoder(tokenizer, proves_later=True)
    texts = ["hello", "<|im_start|>user\n" + "more text " * 60 + "<|im_end|>" + "and more " * 60]
    before = [later.encode(text, domain=EVERYBODY) for text in texts]
    assert later.slow_because == "it is not proven yet"
    copy = later.for_template("<|im_start|>")

    later.prove()

    assert later.slow_because == copy.slow_because == at_once.slow_because
    assert [later.encode(text) for text in texts] == before == [at_once.encode(text) for text in texts]


def test_cuts_depend_on_the_text_before_them_only() -> None:
    text = "".join(f"<|start|>{'z' * size}" for size in (0, 10, 300, 20, 400, 250, 6))
    segments = cut(text, ("<|start|>",))
    assert "".join(segments) == text
    assert all(len(segment) >= SEGMENT_CHARS_MIN for segment in segments[:-1])
    longer = cut(text + "<|start|>" + "q" * 500, ("<|start|>",))
    assert longer[: len(segments) - 1] == segments[:-1]


def test_without_the_package_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fastokens", None)
    encoder = PromptEncoder(made("byte-level", awkward=False, fast=False)[0])
    assert encoder.slow_because.startswith("it is not installed")
    assert prompt_encoder.CACHE_BYTES_DEFAULT > 0


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, False),
        ({"fast": False}, False),
        ({"word_cache": False}, False),
        ({"fast": False, "proves_later": True}, False),
        ({"word_cache": False, "proves_later": True}, False),
        ({"proves_later": True}, True),
    ],
)
def test_text_of_a_tokenizer_is_kept_only_while_it_is_still_to_be_proven(settings: dict[str, Any], kept: bool) -> None:
    tokenizer = Tokenizer.from_str(trained("byte-level", False).to_str())
    encoder = PromptEncoder(tokenizer, **settings)
    assert bool(encoder._backend._text) is kept
    encoder.prove()
    assert not encoder._backend._text


def test_encoder_chosen_later_that_contradicts_the_cuts_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_str(trained("byte-level", False).to_str())

    class Contradicts:
        """The reference, with a mark at the end of every text: the pieces of a text have more than the whole."""

        def encode(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
            return [answer(tokenizer, text, add_special_tokens) + pack_tokens([7]) for text in texts]

    def chosen(*_: object) -> tuple[Contradicts, str]:
        return Contradicts(), ""

    monkeypatch.setattr(prompt_encoder, "_choose", chosen)
    later = PromptEncoder(tokenizer, proves_later=True)
    copy = later.for_template("<|end|>")
    assert later.delimiters
    assert [*copy.delimiters] == ["<|end|>"]
    text = f"<|start|>{'some text ' * 60}<|end|>{'more text ' * 60}"
    begun = later.look_up(text, domain=EVERYBODY)
    assert begun.is_cut

    later.prove()

    assert later.is_fast
    assert not any((later.delimiters, copy.delimiters, later.for_template("<|start|>").delimiters))
    assert later.complete(begun) == answer(tokenizer, text)
    assert not later.look_up(text, domain=EVERYBODY).is_cut
    assert later.encode(text, domain=EVERYBODY) == answer(tokenizer, text) + pack_tokens([7])
