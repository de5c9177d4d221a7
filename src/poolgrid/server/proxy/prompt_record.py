"""What a router learns of prompts while it forwards: why it knows some by their text alone, and whether its engines
make the same token ids. One for each router; only its event loop uses it."""

from __future__ import annotations

import logging

from msgspec import Struct

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.answers import ModelFinding
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.server.forwarding.event_filter import AnswerNotes
from poolgrid.server.forwarding.prompt_ids import IDS_MAX, IDS_MIN, IdForm, IdKind, IdProofs, Sending, compare, id_form
from poolgrid.server.forwarding.prompt_tally import PromptTally, cause_of
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.proxy.ports import ServerPlace
from poolgrid.server.proxy.prompt_reading import PromptReading

log = logging.getLogger(__name__)


class IdUse(Struct, frozen=True):
    """How a server gets a prompt whose ids it may take."""

    kind: IdKind
    form: IdForm
    sending: Sending


class PromptRecord:
    """The prompts of one router."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._tally = PromptTally()
        self._proofs = IdProofs()
        self._prompts = metrics.forwarded_prompts

    def note(self, reading: PromptReading, counted_tokens: int | None, ids: str) -> None:
        """Count how a prompt was known that its server has answered: of what it refuses, nothing need be known.

        ``counted_tokens`` is its length as the server reported it, where that is comparable; ``ids`` is what became of
        its ids.
        """
        cause = cause_of(reading.why) if reading.why else None
        self._prompts.labels("tokens" if cause is None else cause.value, ids).value += 1
        if reading.model:
            self._tally.note(reading.model, cause, reading.detail)
            if counted_tokens is not None:
                self._tally.note_length(reading.model, reading.isl, counted_tokens)

    def use_of(
        self, request: InferenceRequest, place: ServerPlace, path: str, members: frozenset[str], after_tool: bool
    ) -> IdUse | None:
        """Return how a server gets the ids of a prompt that has no more than they say; ``None``: it takes none."""
        if request.by_text or request.lora_name or not IDS_MIN <= len(request.token_ids) // TOKEN_BYTES <= IDS_MAX:
            return None
        form = id_form(place.kind, place.version, path)
        if form is None:
            return None
        kind = IdKind(request.model, place.url, place.version, path, members, after_tool)
        sending = self._proofs.sending(kind)
        return None if sending is Sending.TEXT else IdUse(kind, form, sending)

    def answered(self, use: IdUse, request: InferenceRequest, notes: AnswerNotes, promised_tokens: int) -> str:
        """Compare what the answer to a prompt that went as text reports, and return what became of its ids.

        ``promised_tokens`` is what its server was to reuse by its own cache events, 0 where those are not followed.
        """
        verdict = compare(use.form, request.token_ids, notes, promised_tokens)
        if verdict.is_equal is None:
            if use.form.asked:
                self._proofs.silent(use.kind)
            return "unshown"
        if verdict.is_equal:
            self._proofs.equal(use.kind)
            return "equal"
        log.warning(
            "request %s: the engine at %s makes other token ids of a prompt than the router (%s); it gets prompts of "
            "model %s as text alone from now on",
            request.request_id,
            use.kind.url,
            verdict.why,
            use.kind.model,
            extra=request.named(),
        )
        self._proofs.differ(use.kind, verdict.why)
        return "different"

    def refused(self, use: IdUse, request: InferenceRequest, status: int) -> None:
        """Take note that a server answered a prompt which it had refused with its ids."""
        log.warning(
            "request %s: the engine at %s answered %d to a prompt's token ids and takes its text: prompts of model %s "
            "go there as text from now on",
            request.request_id,
            use.kind.url,
            status,
            use.kind.model,
            extra=request.named(),
        )
        self._proofs.refused(use.kind, status)

    def findings(self) -> list[ModelFinding]:
        """Return what was found of models, for ``poolgrid doctor``."""
        return [*self._proofs.findings(), *self._tally.findings()]
