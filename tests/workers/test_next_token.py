"""The simulated model's output depends on every token before it, and on nothing else."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.plugins.simulated.core.next_token import (
    AnswerLengths,
    GeneratedTokens,
    Vocabulary,
    expected_output,
    expected_reply,
    prompt_logprobs,
)
from poolgrid.plugins.simulated.opening import read_words
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.workers.builders import VOCABULARY
from tests.workers.running import running_worker

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200)


@given(prompt=tokens, split=st.integers(0, 19), seed=st.none() | st.integers(-(2**63), 2**63 - 1))
def test_a_prompt_continued_with_its_own_output_goes_on_exactly(
    prompt: list[int], split: int, seed: int | None
) -> None:
    whole = expected_output(pack_tokens(prompt), Sampling(max_tokens=20, seed=seed), VOCABULARY)

    rest = expected_output(
        pack_tokens([*prompt, *whole[:split]]), Sampling(max_tokens=20 - split, seed=seed), VOCABULARY
    )

    assert whole[:split] + rest == whole


def test_the_output_of_a_known_prompt_never_changes() -> None:
    """A golden value: the load generator and stored results rely on it."""
    output = expected_output(pack_tokens(range(64)), Sampling(max_tokens=6), Vocabulary(size=32_000, first_token_id=3))

    assert output == GOLDEN


GOLDEN = (20361, 13699, 8344, 13235, 18577, 29982)


@given(prompt=tokens, chunks=st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_generating_in_pieces_gives_the_same_tokens(prompt: list[int], chunks: list[int]) -> None:
    sampling = Sampling(max_tokens=30)
    stream = GeneratedTokens(VOCABULARY, pack_tokens(prompt), sampling)
    count = 0
    for chunk in chunks:
        count += chunk
        stream.generate_to(count)

    expected = expected_output(pack_tokens(prompt), sampling, VOCABULARY)
    assert unpack_tokens(bytes(stream.output)) == expected[: min(count, 30)]


def test_end_of_sequence_comes_about_as_often_as_asked() -> None:
    vocabulary = Vocabulary(size=1000, first_token_id=10, eos_probability=0.02)
    lengths = [
        len(expected_output(pack_tokens([prompt]), Sampling(max_tokens=10_000), vocabulary)) for prompt in range(400)
    ]

    assert 40 < sum(lengths) / len(lengths) < 60


CHAT = Vocabulary(size=1000, first_token_id=10, eos_token_id=2, answers=AnswerLengths(30, 12))


@given(prompt=tokens, seed=st.none() | st.integers(0, 2**63 - 1), share=st.floats(0, 1), watched=st.booleans())
def test_an_answer_that_goes_on_elsewhere_ends_at_the_same_place(
    prompt: list[int], seed: int | None, share: float, watched: bool
) -> None:
    stops = (1,) if watched else ()
    whole, reason = expected_reply(pack_tokens(prompt), Sampling(500, seed=seed), CHAT, stops)
    emitted = int(share * (len(whole) - 1))
    rest = expected_reply(
        pack_tokens([*prompt, *whole[:emitted]]), Sampling(500 - emitted, seed=seed), CHAT, stops, emitted
    )

    assert (whole[:emitted] + rest[0], rest[1]) == (whole, reason)
    assert (reason, whole[-1], whole.count(2)) == ("stop", 2, 1)


@given(prompt=tokens, chunks=st.lists(st.integers(1, 20), min_size=1, max_size=12), watched=st.booleans())
def test_an_answer_with_an_end_of_its_own_is_the_same_in_pieces(
    prompt: list[int], chunks: list[int], watched: bool
) -> None:
    stops = (1,) if watched else ()
    stream = GeneratedTokens(CHAT, pack_tokens(prompt), Sampling(500), stops)
    for count in [sum(chunks[: at + 1]) for at in range(len(chunks))] + [500]:
        stream.generate_to(count)

    whole, reason = expected_reply(pack_tokens(prompt), Sampling(500), CHAT)
    assert (unpack_tokens(bytes(stream.output)), stream.finish_reason) == (whole, reason)
    assert stream.final == len(whole)


def test_an_answer_ends_by_itself_unless_told_otherwise() -> None:
    prompt = pack_tokens([1])
    end = len(expected_output(prompt, Sampling(500), CHAT))

    assert expected_reply(prompt, Sampling(end - 1), CHAT)[1] == "length"
    assert expected_reply(prompt, Sampling(end), CHAT)[1] == "stop"
    assert len(expected_output(prompt, Sampling(500, ignore_eos=True), CHAT)) == 500
    late = expected_output(prompt, Sampling(500, min_tokens=end + 20), CHAT)
    assert (len(late), late[-1]) == (end + 21, 2)
    moved, _ = expected_reply(
        prompt + pack_tokens(late[:40]), Sampling(460, min_tokens=end + 20 - 40), CHAT, emitted=40
    )
    assert late[:40] + moved == late


def test_words_are_all_that_is_generated_and_each_comes_about_as_often() -> None:
    words = (11, 13, 17, 19)
    output = expected_output(pack_tokens([5]), Sampling(4000), Vocabulary(1000, 10, words=words))

    assert set(output) == set(words)
    assert all(850 < output.count(word) < 1150 for word in words)


def test_a_stop_token_of_the_request_ends_the_output() -> None:
    free = expected_output(pack_tokens([1]), Sampling(max_tokens=20), VOCABULARY)
    stopped, reason = expected_reply(pack_tokens([1]), Sampling(max_tokens=20), VOCABULARY, (free[7],))

    assert stopped == free[: free.index(free[7]) + 1]
    assert reason == "stop"


@pytest.mark.parametrize("alternatives", [0, 1, 5])
def test_log_probabilities_are_those_of_a_distribution_led_by_the_chosen_token(alternatives: int) -> None:
    def stream() -> GeneratedTokens:
        made = GeneratedTokens(VOCABULARY, pack_tokens([1, 2]), Sampling(max_tokens=6, logprobs=alternatives))
        made.generate_to(6)
        return made

    report = stream().logprobs(2, 5, alternatives)

    assert [entry.token_id for entry in report] == list(unpack_tokens(bytes(stream().output)))[2:5]
    for entry in report:
        assert len(entry.alternatives) == alternatives
        assert len({token_id for token_id, _ in entry.alternatives}) == alternatives
        assert sum(math.exp(logprob) for _, logprob in entry.alternatives) <= 1.0
        assert [(entry.token_id, entry.logprob)][:alternatives] == list(entry.alternatives)[:1]
    assert report == stream().logprobs(2, 5, alternatives)


@pytest.mark.parametrize("words", [(), tuple(range(10, 1000, 3))])
def test_a_prompt_that_the_engine_would_have_written_is_as_likely_as_when_it_did(words: tuple[int, ...]) -> None:
    vocabulary = Vocabulary(1000, 10, words=words)
    stream = GeneratedTokens(vocabulary, pack_tokens([1, 2]), Sampling(max_tokens=6, seed=3, logprobs=4))
    stream.generate_to(6)

    report = prompt_logprobs(vocabulary, b"", pack_tokens([1, 2]) + bytes(stream.output), 3, 4)

    assert report[1:] == stream.logprobs(0, 6, 4)
    assert len(report) == 7


@pytest.mark.parametrize("words", [(), (10, 12, 14, 16, 18)])
def test_log_probabilities_of_all_that_could_follow_a_prompt_are_those_of_a_distribution(
    words: tuple[int, ...],
) -> None:
    vocabulary = Vocabulary(20, 10, words=words)
    found = {
        token_id: prompt_logprobs(vocabulary, b"media", pack_tokens([7, token_id]), None, 2)[0]
        for token_id in range(20)
    }

    best = max(found, key=lambda token_id: found[token_id].logprob)
    assert [entry.token_id for entry in found.values()] == list(found)
    assert {entry.alternatives for entry in found.values()} == {found[best].alternatives}
    assert found[best].alternatives[0] == (best, found[best].logprob)
    for token_id, logprob in found[best].alternatives:
        assert found[token_id].logprob == pytest.approx(logprob)
    assert 0.5 < sum(math.exp(entry.logprob) for entry in found.values()) <= 1.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"size": 5, "first_token_id": 3, "words": (4, 5)}, "words are token ids 4 to 5, allowed are 0 to 4"),
        ({"size": 5, "first_token_id": 5}, "first_token_id is 5"),
        ({"eos_probability": 1.5}, "eos_probability is 1.5"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_an_impossible_vocabulary_is_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Vocabulary(**fields)  # type: ignore[arg-type]


def test_an_answer_is_tokenized_to_the_very_tokens_that_it_was() -> None:
    model = PromptModel.load(TINY_MODEL_PATH)
    vocabulary = Vocabulary(model.vocab_size, 3, 2, words=read_words(TINY_MODEL_PATH).words)

    for prompt in range(20):
        answer = expected_output(pack_tokens([prompt]), Sampling(500), vocabulary)
        text = model.decode(pack_tokens(answer))
        assert unpack_tokens(model.encode(text)) == answer
        assert "\ufffd" not in text
        assert text.isascii()


def test_it_does_not_matter_whether_the_directory_or_its_file_is_named() -> None:
    words = read_words(TINY_MODEL_PATH).words

    assert words == read_words(TINY_MODEL_PATH / "tokenizer.json").words
    assert len(words) > 1000
    assert list(words) == sorted(words)


def saved(tokenizer: Tokenizer, path: Path) -> Path:
    file = path / "tokenizer.json"
    file.write_text(tokenizer.to_str())
    return file


def test_words_that_are_written_in_another_way_are_left_out(tmp_path: Path) -> None:
    """With SentencePiece's spaces, and a vocabulary that has no merges to come back to one of its words."""
    letters = {letter: at for at, letter in enumerate("\u2581abcdef")}
    vocabulary = {**letters, "ab": 7, "\u2581ab": 8, "cd": 9, "\u2581cd": 10, "\u2581ef": 11}
    merges = [("a", "b"), ("c", "d"), ("\u2581", "ab"), ("\u2581", "cd")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()

    words = read_words(saved(tokenizer, tmp_path)).words

    assert words == (8, 10)
    text = [random.Random(1).choice(words) for _ in range(50)]
    assert tokenizer.encode(tokenizer.decode(text)).ids == text


def test_a_tokenizer_without_such_words_is_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(models.WordLevel({" one": 0, " two": 1, "?": 2}, "?"))
    tokenizer.normalizer = normalizers.Strip()

    with caplog.at_level(logging.WARNING):
        assert read_words(saved(tokenizer, tmp_path)).words == ()
        assert read_words(tmp_path / "nothing.json").words == ()

    assert "has no words that survive encoding" in caplog.text
    assert "nothing.json cannot be used" in caplog.text


def test_a_worker_has_as_many_token_ids_as_its_tokenizer_unless_it_is_told() -> None:
    async def said(**changes: object) -> int:
        async with running_worker(**{"vocabulary_size": None, **changes}) as worker:
            return worker.journal.cards[0].vocabulary_size

    tokens = PromptModel.load(TINY_MODEL_PATH).tokenizer.get_vocab_size()
    assert asyncio.run(said()) == 32_000
    assert asyncio.run(said(model_path=str(TINY_MODEL_PATH))) == tokens
    assert asyncio.run(said(model_path=str(TINY_MODEL_PATH), vocabulary_size=99)) == 99
    assert asyncio.run(said(model_path=str(TINY_MODEL_PATH), role="encode", modality="multimodal")) == tokens
