"""The words of the simulated engine become the same tokens again when a client tokenizes what it read."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.wire.requests import Sampling
from poolgrid.workers.engines.simulated.core.next_token import Vocabulary, expected_output
from poolgrid.workers.engines.simulated.opening import surviving_words
from tests.workers.running import running_worker


def test_an_answer_is_tokenized_to_the_very_tokens_that_it_was() -> None:
    model = PromptModel.load(TINY_MODEL_PATH)
    vocabulary = Vocabulary(model.vocab_size, 3, 2, words=surviving_words(TINY_MODEL_PATH))

    for prompt in range(20):
        answer = expected_output(pack_tokens([prompt]), Sampling(500), vocabulary)
        text = model.decode(pack_tokens(answer))
        assert unpack_tokens(model.encode(text)) == answer
        assert "\ufffd" not in text
        assert text.isascii()


def test_it_does_not_matter_whether_the_directory_or_its_file_is_named() -> None:
    words = surviving_words(TINY_MODEL_PATH)

    assert words == surviving_words(TINY_MODEL_PATH / "tokenizer.json")
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

    words = surviving_words(saved(tokenizer, tmp_path))

    assert words == (8, 10)
    text = [random.Random(1).choice(words) for _ in range(50)]
    assert tokenizer.encode(tokenizer.decode(text)).ids == text


def test_a_tokenizer_without_such_words_is_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(models.WordLevel({" one": 0, " two": 1, "?": 2}, "?"))
    tokenizer.normalizer = normalizers.Strip()

    with caplog.at_level(logging.WARNING):
        assert surviving_words(saved(tokenizer, tmp_path)) == ()
        assert surviving_words(tmp_path / "nothing.json") == ()

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
