"""Why prompts are not known by their tokens, and how many are known wrongly: by model, for ``poolgrid doctor``. Pure.

A router that does not know a prompt's tokens compares its text with what servers got before. One that makes other
tokens of it than the engine looks for the wrong blocks. Both cost reuse, never a request: nothing else would show it.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from poolgrid.kernel.wire.answers import ModelFinding
from poolgrid.server.diagnosis.diagnosis import Diagnosis

WINDOW: Final = 100
"""Prompts of one model that count, as many as for verdicts on workers."""

MODELS_MAX: Final = 256
"""Models whose prompts are counted; beyond it those that were asked for first are forgotten."""

LEAST_BY_TEXT: Final = 4
"""Prompts by text from which on it is a fault."""

BY_TEXT_ABOVE: Final = 0.2
"""Share of prompts by text from which on it is a fault."""

LENGTHS_DIFFER_ABOVE: Final = 0.1
"""Share of prompts whose length the engine counts differently from which on it is a fault, as for verdicts on workers:
lengths are exact."""

EVIDENCE_CHARS_MAX: Final = 200


class TextCause(Diagnosis):
    """Why the tokens of a prompt are not known."""

    TEMPLATE = (
        "template",
        True,
        "the chat template fails in the router, or the model has none",
        "give the router the model directory and chat template of the server (--model-path)",
    )
    TOKENIZER_MISSING = (
        "tokenizer-missing",
        True,
        "no tokenizer of the model is loaded in the router",
        "start the router with --model-path DIR, a directory with tokenizer.json, or --model-path ORG/MODEL",
    )
    TOKENIZER_BUSY = (
        "tokenizer-busy",
        True,
        "more long prompts wait for the tokenizer than it takes",
        "give the router's machine more cores, or start another router",
    )
    UNKNOWN_PART = (
        "unknown-part",
        True,
        "the prompt has a part or value that the router does not know",
        "update poolgrid, and report the named field if the newest release does not know it",
    )
    MEDIA = (
        "media",
        False,
        "the prompt has images, audio or video, of which engines make tokens by their own rules",
        "nothing: such prompts are compared by their text",
    )
    KEPT_AT_SERVER = (
        "kept-at-server",
        False,
        "the request continues what its server keeps",
        "nothing: it goes to that server",
    )
    TOO_LONG = (
        "too-long",
        False,
        "the prompt is longer than the model's context, and its server refuses it",
        "nothing, or raise the context length of the servers",
    )
    OTHER_API = (
        "other-api",
        False,
        "the request is of an API whose prompts the router does not tokenize, such as embeddings",
        "nothing: such prompts are compared by their text",
    )


_OF_CODE: Final = {
    "chat_template_error": TextCause.TEMPLATE,
    "no_chat_template": TextCause.TEMPLATE,
    "no_prompt_model": TextCause.TOKENIZER_MISSING,
    "tokenizer_busy": TextCause.TOKENIZER_BUSY,
    "context_length_exceeded": TextCause.TOO_LONG,
    "media": TextCause.MEDIA,
    "another API": TextCause.OTHER_API,
    "kept": TextCause.KEPT_AT_SERVER,
}


def cause_of(code: str) -> TextCause:
    """Return the cause behind why a prompt could not be read, as ``PromptReading.why`` has it."""
    return _OF_CODE.get(code, TextCause.UNKNOWN_PART)


class _ModelHistory:
    """The last prompts of one model."""

    __slots__ = ("causes", "details", "difference", "lengths")

    def __init__(self) -> None:
        self.lengths: deque[bool] = deque(maxlen=WINDOW)
        """Whether the engine counted as many tokens of a prompt as the router made of it."""
        self.difference = ""
        """The last two lengths that differ."""
        self.causes: deque[TextCause | None] = deque(maxlen=WINDOW)
        """``None``: its tokens are known."""
        self.details: dict[TextCause, str] = {}
        """By cause: what was seen last."""


class PromptTally:
    """How the last prompts of each model were known."""

    def __init__(self) -> None:
        self._histories: dict[str, _ModelHistory] = {}

    def note(self, model: str, cause: TextCause | None, detail: str = "") -> None:
        """Count a prompt; ``detail`` is what the cause was in words, without anything of the prompt."""
        history = self._of(model)
        history.causes.append(cause)
        if cause is not None and detail:
            history.details[cause] = detail[:EVIDENCE_CHARS_MAX]

    def note_length(self, model: str, tokens: int, counted: int) -> None:
        """Compare the length of a prompt here with what its engine counted."""
        history = self._of(model)
        history.lengths.append(tokens == counted)
        if tokens != counted:
            history.difference = f"a prompt has {tokens} tokens at the router and {counted} at the engine"

    def findings(self) -> list[ModelFinding]:
        """Return why prompts of the last ``WINDOW`` were placed by text, the most frequent cause of a model first, and
        of which models lengths differ."""
        found: list[ModelFinding] = []
        for model, history in sorted(self._histories.items()):
            found += (
                _finding(model, cause, count, len(history.causes), history.details.get(cause, ""))
                for cause, count in Counter(history.causes).most_common()
                if cause is not None
            )
            if differing := history.lengths.count(False):
                found.append(_lengths(model, differing, len(history.lengths), history.difference))
        return found

    def _of(self, model: str) -> _ModelHistory:
        history = self._histories.get(model)
        if history is None:
            if len(self._histories) >= MODELS_MAX:
                del self._histories[next(iter(self._histories))]
            history = self._histories[model] = _ModelHistory()
        return history


def _lengths(model: str, differing: int, prompts: int, last: str) -> ModelFinding:
    return ModelFinding(
        model=model,
        cause="prompt-lengths-differ",
        is_fault=differing >= LEAST_BY_TEXT and differing > LENGTHS_DIFFER_ABOVE * prompts,
        meaning="the engine counts other prompt tokens than the router, so the router looks for the wrong blocks",
        evidence=[f"{differing} of the last {prompts} prompts", last],
        fix="give router and engine the same model files and chat template",
    )


def _finding(model: str, cause: TextCause, count: int, prompts: int, detail: str) -> ModelFinding:
    evidence = [f"{count} of the last {prompts} prompts were placed by their text"]
    if detail:
        evidence.append(f"last: {detail}")
    return ModelFinding(
        model=model,
        cause=f"by-text-{cause.value}",
        is_fault=cause.is_fault and count >= LEAST_BY_TEXT and count > BY_TEXT_ABOVE * prompts,
        meaning=cause.meaning,
        evidence=evidence,
        fix=cause.fix,
    )
