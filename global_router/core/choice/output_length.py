"""How long an answer is expected to be: the client's word, else what traffic taught, else the document's default.

Rules
    1. A request's own ``osl`` is used as it is, except that no answer is longer than the request's own limit.
    2. A model's length is the mean over its finished requests; after ``memory_requests`` of them the mean forgets: each
       new length has the weight ``1/memory_requests``. It is used from ``learn_after_requests`` on.
    3. At most ``MODELS_MAX`` models are remembered; the one that was seen longest ago is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from poolgrid.global_router.core.document.grid_document import TOKENS_MAX, OutputLengthSettings

MODELS_MAX = 1024
"""Served models and adapters of a large fleet; a client that invents names cannot take more memory."""


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """Tokens that an answer is expected to have, and where the number came from."""

    tokens: int
    source: str


@dataclass(slots=True)
class _Mean:
    requests: int = 0
    tokens: float = 0.0


class OutputLengths:
    """Expected output lengths, learned per model."""

    def __init__(self, settings: OutputLengthSettings, models_max: int = MODELS_MAX) -> None:
        self._settings = settings
        self._models_max = models_max
        self._means: OrderedDict[str, _Mean] = OrderedDict()

    def finished(self, model: str, output_tokens: int) -> None:
        """Learn from a request that ran to its end; cancelled and failed ones teach nothing and are not told."""
        if not self._settings.learn or output_tokens < 0:
            return
        mean = self._means.setdefault(model, _Mean())
        self._means.move_to_end(model)
        mean.requests += 1
        weight = 1.0 / min(mean.requests, self._settings.memory_requests)
        mean.tokens += weight * (min(output_tokens, TOKENS_MAX) - mean.tokens)
        while len(self._means) > self._models_max:
            self._means.popitem(last=False)

    def expected(self, model: str, osl: int | None = None, max_tokens: int | None = None) -> ExpectedOutput:
        """Return the expected length of an answer of ``model`` to a request with these hints; changes nothing."""
        mean = self._means.get(model)
        if osl is not None:
            made = ExpectedOutput(osl, "nvext.agent_hints.osl")
        elif mean is not None and mean.requests >= self._settings.learn_after_requests:
            made = ExpectedOutput(round(mean.tokens), f"mean of {model}")
        else:
            made = ExpectedOutput(self._settings.default_tokens, "default of the document")
        if max_tokens is not None and max_tokens < made.tokens:
            return ExpectedOutput(max(0, max_tokens), "the request's own limit")
        return made

    def __len__(self) -> int:
        return len(self._means)
