"""What the simulated engine must answer: known in advance, so that every response of a run can be checked."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.plugins.bench.command import TOKEN_ID_MAX, TOKEN_ID_MIN
from poolgrid.plugins.bench.prompt import PlannedRequest, PromptMaker
from poolgrid.plugins.simulated.core.next_token import Vocabulary, expected_output
from poolgrid.plugins.simulated.opening import read_words
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel

MODEL = PromptModel.load(TINY_MODEL_PATH)
PLAIN = Vocabulary(size=MODEL.vocab_size, first_token_id=3, eos_token_id=2)
"""Of workers that were not given the tokenizer."""
SPOKEN = replace(PLAIN, words=read_words(TINY_MODEL_PATH).words)
"""Of workers that were, as all of ``poolgrid up`` are."""


def expected_text(prompt: bytes, max_tokens: int, seed: int | None = None, vocabulary: Vocabulary = SPOKEN) -> str:
    """Return the text that must follow a prompt, of an answer that does not end by itself before."""
    return "".join(pieces_of(expected_output(prompt, Sampling(max_tokens, seed=seed, ignore_eos=True), vocabulary)))


def pieces_of(tokens: Sequence[int]) -> list[str]:
    """Return the text that comes with each token; a character that does not end within the answer is left out."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(MODEL.token_bytes(token)) for token in tokens]


class Verifier:
    """Checks every response of a bench run."""

    def __init__(self, vocabulary: Vocabulary = SPOKEN) -> None:
        self._vocabulary = vocabulary
        self._prompts = PromptMaker(TOKEN_ID_MIN, TOKEN_ID_MAX)
        self.checked = 0
        self.wrong: list[int] = []

    def __call__(self, request: PlannedRequest, text: str) -> bool:
        self.checked += 1
        prompt = pack_tokens(self._prompts.token_ids(request))
        right = text == expected_text(prompt, request.osl, vocabulary=self._vocabulary)
        if not right:
            self.wrong.append(request.index)
        return right
