"""The token ids of one prompt: how its server gets them, what they withhold of the answer, and what became of them."""

from __future__ import annotations

from typing import Final

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.server.forwarding.event_filter import AnswerNotes, TakenIds
from poolgrid.server.forwarding.headers import is_event_stream
from poolgrid.server.forwarding.prompt_ids import Sending
from poolgrid.server.proxy.ports import ForwardBackend, ServerPlace
from poolgrid.server.proxy.prompt_record import IdUse, PromptRecord
from poolgrid.server.proxy.server_connection import HeaderList
from poolgrid.server.proxy.withheld_answer import Withheld

REFUSAL_STATUSES: Final = frozenset((400, 413, 422))
"""By which servers refuse what is in a body."""


class SentIds:
    """The ids of a prompt whose server may take them."""

    __slots__ = ("asked", "outcome", "refused_status", "use")

    def __init__(self, use: IdUse, asked: TakenIds) -> None:
        self.use = use
        self.asked = asked
        """What is asked of the server that is not for the client."""
        self.refused_status = 0
        """Status with which the server refused them."""
        self.outcome = "none"
        """What became of them, as the metric has it."""

    def refuse(self, status: int) -> None:
        """Take note that the server refused them: from now on the request goes as text."""
        self.refused_status, self.asked = status, TakenIds.NONE

    def withholds(self, status: int, headers: HeaderList) -> Withheld | None:
        """Return why an answer is withheld for them; ``None`` for one that passes."""
        if self.use.sending is Sending.IDS and status in REFUSAL_STATUSES and not self.refused_status:
            return Withheld.REFUSED
        is_cut = self.asked is not TakenIds.NONE and status == 200 and not is_event_stream(headers)
        return Withheld.CUT if is_cut else None

    def learn(
        self,
        prompts: PromptRecord,
        backend: ForwardBackend,
        request: InferenceRequest,
        place: ServerPlace,
        notes: AnswerNotes,
        promised_tokens: int,
    ) -> None:
        """Take note of what the answer of a server shows of them; ``promised_tokens`` is what it was to reuse."""
        if self.refused_status:
            if place.url != self.use.kind.url:
                return  # the one that refused them has not answered the text
            prompts.refused(self.use, request, self.refused_status)
            self.outcome = "refused"
        elif self.use.sending is Sending.CHECKED:
            is_followed = promised_tokens > 0 and backend.follows(place.worker)
            self.outcome = prompts.answered(self.use, request, notes, promised_tokens if is_followed else 0)
        else:
            self.outcome = "sent"
