"""What a prompt costs grows with its text, and hardly with its messages: calls are counted, not timed."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.preparation import Preparation
from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.prompts import look_up, tokenize
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.inference.inference_request import EVERYBODY, InferenceRequest
from poolgrid.inference.ports import ServedModel

SANDBOX = "poolgrid.frontend.template_sandbox"
MODEL = PromptModel.load(TINY_MODEL_PATH, "tiny")


class Backend:
    def models(self) -> list[ServedModel]:
        return [ServedModel("tiny", 0, 4096)]

    async def submit(self, request: InferenceRequest) -> Any:
        raise AssertionError("nothing is sent")


def job_of(messages: list[dict[str, Any]]) -> PreparedRequest:
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    job = Preparation(Backend(), {"tiny": MODEL}, FrontendSettings()).chat(body)
    job.domain = EVERYBODY
    return job


def conversation(messages: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": f"{at} {'words ' * 100}"} for at in range(messages)]


def calls_of_look_up(messages: list[dict[str, Any]]) -> list[str]:
    """Return the front end's functions, but what the template calls, for the prompt of a conversation that goes on."""
    tokenize(job_of(messages[:-2]))
    job = job_of(messages)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event == "call" and name.startswith("poolgrid.frontend") and name != SANDBOX:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        left = look_up(job, 60_000.0)
    finally:
        sys.setprofile(None)
    assert left is not None
    assert left < 2000, "only what is new is left for the tokenizer"
    return called


def test_a_later_turn_takes_as_many_calls_however_many_messages_came_before() -> None:
    assert calls_of_look_up(conversation(12)) == calls_of_look_up(conversation(52))


def test_a_message_of_words_alone_is_shown_to_its_template_as_one_with_an_empty_list_of_calls_is() -> None:
    plain = conversation(4)
    further = [{**message, "tool_calls": []} for message in plain]

    [one], [other] = tokenize(job_of(plain)), tokenize(job_of(further))
    assert (one.token_ids, one.text, one.end) == (other.token_ids, other.text, other.end)
