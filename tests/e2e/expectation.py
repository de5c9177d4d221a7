"""What the simulated engine must answer: known in advance, so that every response of a run can be checked."""

from __future__ import annotations

from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.loadgen.prompt import PlannedRequest, PromptMaker
from poolgrid.loadgen.settings import BenchSettings
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import Sampling
from poolgrid.workers.engines.simulated.core.next_token import Vocabulary, expected_output

MODEL = PromptModel.load(TINY_MODEL_PATH)
VOCABULARY = Vocabulary(size=MODEL.vocab_size, first_token_id=3, eos_token_id=2)


def expected_text(prompt: bytes, max_tokens: int, seed: int | None = None) -> str:
    """Return the text that must follow a prompt."""
    tokens = expected_output(prompt, Sampling(max_tokens=max_tokens, seed=seed, ignore_eos=True), VOCABULARY)
    return MODEL.decode(pack_tokens(tokens))


class Verifier:
    """Checks every response of a bench run."""

    def __init__(self, settings: BenchSettings) -> None:
        self._prompts = PromptMaker(settings.token_id_min, settings.token_id_max)
        self.checked = 0
        self.wrong: list[int] = []

    def __call__(self, request: PlannedRequest, text: str) -> bool:
        self.checked += 1
        right = text == expected_text(pack_tokens(self._prompts.token_ids(request)), request.osl)
        if not right:
            self.wrong.append(request.index)
        return right
