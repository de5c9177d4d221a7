"""Fields that a Responses body shares with chat."""

from __future__ import annotations

from poolgrid.plugins.responses_api.conversation import chat_body
from poolgrid.plugins.responses_api.schema import ResponsesBody
from poolgrid.server.frontend.schema import ChatBody, refusals_of

MADE_OTHERWISE = {"tools", "tool_choice", "stream"}
"""Fields of a Responses body that mean something else, or more, in chat."""


def test_a_field_that_responses_and_chat_both_have_arrives_in_chat() -> None:
    shared = set(ResponsesBody.__struct_fields__) & set(ChatBody.__struct_fields__)
    passed = shared - MADE_OTHERWISE - refusals_of(ResponsesBody).keys()
    marks = {name: object() for name in passed}

    made = chat_body(ResponsesBody(input="hi", **marks))  # type: ignore[arg-type]

    assert [name for name in sorted(passed) if getattr(made, name) is not marks[name]] == []
