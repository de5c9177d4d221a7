"""Where an answer ends.

Stop strings end what the client reads as the answer: not what the model thinks, and not a call's arguments. Half a
character at the end is left out.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import StreamDelta
from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.frontend.answers import PATHS, Answer, body_for, read
from tests.frontend.fake_backend import TINY, FakeBackend, Step, speak
from tests.frontend.server import post_to_shared

APIS = pytest.mark.parametrize("api", sorted(PATHS))
STREAMS = pytest.mark.parametrize("stream", [False, True])
STRIDES = pytest.mark.parametrize("stride", [1, 1000])
"""Tokens that arrive together."""

THOUGHT = "The task says Question: how many. Six."
SAID = "It is 6.\n"
REST = "Question: next"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


@cache
def opening(opener: str = "", closer: str = "") -> PromptModel:
    """Return a model whose template opens the reasoning, or shows its marks and leaves them to the model."""
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}assistant\n" + opener + "{# " + closer + " #}"
    return PromptModel(
        name="tiny",
        tokenizer=TINY.tokenizer,
        vocab_size=TINY.vocab_size,
        max_position_embeddings=4096,
        template=ChatTemplate(source),
        byte_table=TINY.byte_table,
    )


def asked(
    api: str, text: str, *, stride: int = 1, model: PromptModel | None = None, parser: str = "auto", **fields: Any
) -> Answer:
    """Return what a client gets of a model that would write ``text``."""
    backend = FakeBackend(lambda _: speak(text, tokens_per_delta=stride))
    settings: dict[str, Any] = {"reasoning_parser": parser, "models": None if model is None else {"tiny": model}}
    return read(api, post_to_shared(backend, PATHS[api], settings, json=body_for(api, **fields)))


def tokens_until(text: str, end: str) -> int:
    """Return after how many tokens of ``text`` what is written contains ``end``."""
    token_ids = list(memoryview(TINY.encode(text)).cast("I"))
    return next(count for count in range(len(token_ids)) if end in TINY.tokenizer.decode(token_ids[:count]))


@APIS
@STREAMS
@STRIDES
@pytest.mark.parametrize(
    ("parser", "opener", "text"),
    [
        ("auto", "<think>\n", f"{THOUGHT}</think>\n\n{SAID}{REST}"),
        ("qwen3", "", f"<think>\n{THOUGHT}\n</think>\n\n{SAID}{REST}"),
        ("deepseek_r1", "", f"{THOUGHT}</think>{SAID}{REST}"),
        ("mistral", "", f"[THINK]{THOUGHT}[/THINK]{SAID}{REST}"),
        ("granite", "", f"Here is my thought process: {THOUGHT} Here is my response: {SAID}{REST}"),
        (
            "harmony",
            "",
            f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{SAID}{REST}",
        ),
    ],
)
def test_stop_string_in_reasoning_ends_nothing_and_in_the_answer_ends_it(
    api: str, stream: bool, stride: int, parser: str, opener: str, text: str
) -> None:
    model = opening(opener, "</think>") if opener else None
    answer = asked(api, text, stride=stride, model=model, parser=parser, stop=["Question:"], stream=stream)

    assert (answer.reasoning, answer.content, answer.finish) == (THOUGHT, SAID, "stop")
    assert answer.stop == ("Question:" if api == "messages" else None)
    assert answer.output_tokens == tokens_until(text, f"{SAID}Question:")


@APIS
@STREAMS
def test_stop_string_in_reasoning_that_never_ends_stops_nothing(api: str, stream: bool) -> None:
    answer = asked(api, f"<think>{THOUGHT}", parser="qwen3", stop=["Question:"], stream=stream)

    assert (answer.reasoning, answer.content, answer.stop) == (THOUGHT, "", None)


@STREAMS
@pytest.mark.parametrize("stop", ["\n\n", "</think>", "\n"])
def test_white_space_and_marks_between_reasoning_and_answer_are_no_stop_strings(stream: bool, stop: str) -> None:
    """Evaluation harnesses send line breaks as stop strings."""
    answer = asked("chat", f"<think>\n{THOUGHT}\n</think>\n\nSix.", parser="qwen3", stop=[stop], stream=stream)

    assert (answer.reasoning, answer.content) == (THOUGHT, "Six.")


@STREAMS
def test_stop_string_in_later_reasoning_ends_nothing(stream: bool) -> None:
    text = "<think>one</think>First.<think>Question: two</think>Second. Question: three"
    answer = asked("chat", text, parser="qwen3", stop=["Question:"], stream=stream)

    assert (answer.reasoning, answer.content) == ("oneQuestion: two", "First.Second. ")


@STREAMS
def test_stop_string_that_reasoning_begins_and_the_answer_ends_is_none(stream: bool) -> None:
    answer = asked("chat", "<think>ab</think>cd", parser="qwen3", stop=["bc"], stream=stream)

    assert (answer.reasoning, answer.content) == ("ab", "cd")


@APIS
@STREAMS
@STRIDES
def test_stop_string_in_the_arguments_of_a_call_leaves_the_call_whole(api: str, stream: bool, stride: int) -> None:
    arguments = {"text": "Question: what?"}
    call = f"<tool_call>{json.dumps({'name': 'write', 'arguments': arguments})}</tool_call>"
    answer = asked(
        api, f"I write.\n{call}\nDone. Question: next", stride=stride, stop=["Question:"], stream=stream, tools=[TOOL]
    )

    assert [(name, json.loads(given)) for name, given in answer.calls] == [("write", arguments)]
    assert answer.content == "I write.Done. "


@STREAMS
def test_stop_string_before_a_call_ends_the_answer_before_it(stream: bool) -> None:
    call = '<tool_call>{"name": "write", "arguments": {}}</tool_call>'
    answer = asked("chat", f"I write. Stop.\n{call}", stop=["Stop."], stream=stream, tools=[TOOL])

    assert (answer.content, answer.calls, answer.finish) == ("I write. ", [], "stop")


@STREAMS
def test_stop_string_counts_only_after_min_tokens_in_parsed_answers_too(stream: bool) -> None:
    text = "<think>x</think>a stop b stop c"
    minimum = tokens_until(text, "a stop b")
    answer = asked("chat", text, parser="qwen3", stop=["stop"], min_tokens=minimum, stream=stream)

    assert (answer.reasoning, answer.content) == ("x", "a stop b ")


@STREAMS
def test_answers_without_a_parser_are_searched_from_their_first_character(stream: bool) -> None:
    answer = asked("chat", f"<think>{THOUGHT}</think>Six.", parser="none", stop=["Question:"], stream=stream)

    assert (answer.reasoning, answer.content) == ("", "<think>The task says ")


@STREAMS
def test_choices_of_one_request_stop_by_themselves(stream: bool) -> None:
    backend = FakeBackend(lambda _: speak(f"<think>{THOUGHT}</think>{SAID}{REST}"))
    body = body_for("chat", n=2, stop=["Question:"], stream=stream)
    response = post_to_shared(backend, PATHS["chat"], {"reasoning_parser": "qwen3"}, json=body)

    assert response.status_code == 200
    assert response.text.count("next") == 0
    assert [stream.cancels for stream in backend.streams] == [1, 1]


HALF = TINY.encode("\U0001f9a9")[:-4]
"""A character without its last token."""


@APIS
@STREAMS
@STRIDES
@pytest.mark.parametrize("before", ["", "A flamingo: ", "<think>A flamingo: ", "<think>x</think>A flamingo: "])
@pytest.mark.parametrize("stop", [None, "never"])
def test_half_a_character_at_the_end_of_an_answer_is_left_out(
    api: str, stream: bool, stride: int, before: str, stop: str | None
) -> None:
    packed = TINY.encode(before) + HALF
    size = 4 * stride
    steps: list[Step] = [[StreamDelta(packed[at : at + size])] for at in range(0, len(packed), size)]
    assert isinstance(steps[-1], list)
    steps[-1][0].finish_reason = "length"
    fields: dict[str, Any] = {} if stop is None else {"stop": [stop]}
    response = post_to_shared(
        FakeBackend(lambda _: list(steps)),
        PATHS[api],
        {"reasoning_parser": "qwen3"},
        json=body_for(api, stream=stream, **fields),
    )
    answer = read(api, response)

    shown = f"{answer.reasoning}{answer.content}".strip()
    assert shown == before.replace("<think>", "").replace("</think>", "").strip()
    assert (answer.finish, answer.output_tokens) == ("length", len(packed) // 4)


def test_half_a_character_within_an_answer_is_shown_as_the_replacement_character() -> None:
    packed = HALF + TINY.encode(" and on")
    backend = FakeBackend(lambda _: [[StreamDelta(packed, "stop")]])
    answer = read("chat", post_to_shared(backend, PATHS["chat"], json=body_for("chat")))

    assert answer.content == "\ufffd and on"
