"""Prompts of Messages requests that go to engines unchanged."""

from __future__ import annotations

from tests.endpoint_picker.prompt_reading import CHAT, read, text_of


def test_messages_become_the_prompt_that_the_same_chat_has() -> None:
    chat = read("/v1/chat/completions", CHAT)
    assert chat.request is not None
    messages = {**CHAT, "max_tokens": 5, "stop_sequences": ["x"]}
    same = read("/v1/messages", messages)
    assert same.request is not None
    assert same.request.token_ids == chat.request.token_ids
    line = "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
    turns = [*CHAT["messages"], {"role": "system", "content": "MARKSYSTEM"}]
    agent = read("/v1/messages", {**messages, "messages": turns, "system": blocks})
    chat = read("/v1/chat/completions", {**CHAT, "messages": [{"role": "system", "content": "Be brief."}, *turns]})
    assert text_of(agent) == text_of(chat)
