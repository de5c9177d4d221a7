"""What is served where the plug-in that reads formats is deleted: plain text, and a message that names it."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import ServedModel
from poolgrid.kernel.wire.card import ChatSpec
from poolgrid.server.process.plugins import PARSERS, installed_plugins
from tests.frontend.answers import PATHS, body_for, read
from tests.frontend.fake_backend import FakeBackend, speak
from tests.frontend.server import post_once

TEXT = '<think>Hmm.</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def _deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    for point in installed_plugins(PARSERS):
        monkeypatch.setitem(sys.modules, point.module, None)


def says(**chat: str) -> FakeBackend:
    served = ServedModel("tiny", 1_700_000_000, 262_144, chat=ChatSpec(**chat))
    return FakeBackend(lambda _: speak(TEXT), served=[served])


@pytest.mark.parametrize("stream", [False, True])
def test_own_workers_answer_plain_text_with_tools_too(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer = read("chat", post_once(says(), PATHS["chat"], json=body_for("chat", stream=stream, tools=[TOOL])))

    assert (answer.content, answer.reasoning, answer.calls) == (TEXT, "", [])
    assert (
        "model 'tiny': its chat template has tool_calls, which stay content: the plug-in 'model' of poolgrid.parsers "
        "is not installed" in caplog.text
    )


def test_a_format_that_workers_name_is_reported_with_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    assert post_once(says(reasoning_parser="qwen3"), PATHS["chat"], json=body_for("chat")).is_success

    assert "that its workers were given are not used: loading the plug-in 'model' of poolgrid.parsers" in caplog.text


def test_a_forced_call_is_refused_by_name() -> None:
    body = {**body_for("chat"), "tools": [TOOL], "tool_choice": "required"}
    answer = post_once(FakeBackend(), PATHS["chat"], json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert "the plug-in 'model' of poolgrid.parsers is not installed" in answer.json()["error"]["message"]
