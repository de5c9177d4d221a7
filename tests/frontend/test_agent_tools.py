"""Tools and items that coding agents send: namespaces, custom and hosted tools, calls of earlier turns."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.server.frontend.answer_pieces import AnswerPiece, PieceKind, joined_pieces
from poolgrid.server.frontend.custom_calls import CustomCalls
from poolgrid.server.frontend.schema import CUSTOM_ARGUMENT
from poolgrid.server.frontend.tools import custom_arguments, custom_text
from tests.examples import examples
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.server import FrontEnd, application, front_end, served_in_thread
from tests.installed import needs_parsers

RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: MARKGRAMMAR"},
}
DEMO = {
    "type": "namespace",
    "name": "mcp__demo",
    "description": "MARKSERVER",
    "tools": [{"type": "function", "name": "add", "description": "Adds.", "strict": False, "parameters": {}}],
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "mcp", "server_label": "d", "server_url": "https://mcp.example"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "tool_search"},
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as opened:
        yield opened


def respond(front: FrontEnd, answered: str = "Fine.", path: str = RESPONSES, **body: Any) -> tuple[httpx.Response, str]:
    """Return the answer and the prompt that the model was shown."""
    backend = FakeBackend(lambda _: speak(answered))
    body = {"messages": [{"role": "user", "content": "hi"}]} | body if path == CHAT else {"input": "hi"} | body
    answer = front.post(backend, path, json={"model": "tiny", **body})
    tokens = list(memoryview(backend.requests[0].token_ids).cast("I")) if backend.requests else []
    return answer, TINY.tokenizer.decode(tokens, skip_special_tokens=False)


def items_of(stream: str) -> list[dict[str, Any]]:
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


@pytest.mark.parametrize("path", [RESPONSES, CHAT])
def test_hosted_tools_are_left_out_and_named(front: FrontEnd, path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    function: dict[str, Any] = {"name": "f", "parameters": {}}
    tools = [
        *HOSTED,
        {"type": "function", **function} if path == RESPONSES else {"type": "function", "function": function},
    ]
    for stream in (False, True):
        answer, prompt = respond(front, path=path, tools=tools, stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-poolgrid-tools-left-out"] == (
            "web_search, image_generation, mcp, code_interpreter, tool_search"
        )
        assert '"f"' in prompt
        assert "web_search" not in prompt
    (line,) = [record.getMessage() for record in caplog.records if " web_search " in record.getMessage()]
    assert "cannot run here" in line


@needs_parsers
@pytest.mark.parametrize(
    ("tool", "name", "written", "item"),
    [
        (
            DEMO,
            "mcp__demo__add",
            '{"a": 1}',
            {"type": "function_call", "name": "add", "namespace": "mcp__demo", "arguments": '{"a": 1}'},
        ),
        (
            PATCH,
            "apply_patch",
            '{"input": "a\\n\\"b"}',
            {"type": "custom_tool_call", "name": "apply_patch", "input": 'a\n"b'},
        ),
        (
            PATCH,
            "apply_patch",
            '{"patch": 1}',
            {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch": 1}'},
        ),
        (
            {"type": "local_shell"},
            "local_shell",
            '{"command": ["ls"], "timeout_ms": 9}',
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "timeout_ms": 9, "env": {}}},
        ),
        (
            SEARCH,
            "tool_search",
            '{"query": "x"}',
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}},
        ),
    ],
)
def test_a_call_is_answered_in_the_form_of_the_clients_tool(
    front: FrontEnd, tool: dict[str, Any], name: str, written: str, item: dict[str, Any]
) -> None:
    text = call(name, written) + call(name, written)
    whole = respond(front, text, tools=[tool])[0].json()["output"]
    streamed = items_of(respond(front, text, tools=[tool], stream=True)[0].text)
    for given_items in (whole, streamed):
        calls = [each for each in given_items if each["type"] != "message"]
        assert len(calls) == 2
        for each in calls:
            assert item.items() <= each.items()
            assert each["call_id"]
            assert each["status"] == "completed"
    assert len({each["call_id"] for each in whole}) == len(whole)


def test_namespaces_and_grammars_are_shown_to_the_model(front: FrontEnd) -> None:
    prompt = respond(front, tools=[DEMO, PATCH])[1]
    for mark in ("MARKSERVER", "mcp__demo__add", "MARKGRAMMAR", "apply_patch"):
        assert mark in prompt


@needs_parsers
@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"type": "function", "name": "add", "namespace": "mcp__demo"}, True),
        ({"type": "function", "name": "add"}, True),
        ({"type": "custom", "name": "apply_patch"}, True),
        ({"type": "custom", "custom": {"name": "apply_patch"}}, True),
        ({"type": "tool_search"}, True),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ("none", False),
    ],
)  # fmt: skip
def test_forms_of_tool_choice(front: FrontEnd, choice: Any, named: bool) -> None:
    backend = FakeBackend(lambda _: speak("{}"))
    body = {"model": "tiny", "input": "hi", "tools": [DEMO, PATCH, SEARCH, *HOSTED[:1]], "tool_choice": choice}
    assert front.post(backend, RESPONSES, json=body).status_code == 200
    assert (backend.requests[0].sampling.guided_json is not None) is named


@needs_parsers
def test_a_conversation_of_an_agent_is_shown_to_the_model(front: FrontEnd) -> None:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "MARKDEVELOPER"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "MARKUSER"}], "id": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "function_call", "call_id": "c1", "namespace": "mcp__demo", "name": "add",
         "arguments": '{"a":"MARKFUNCTION"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "MARKSUM"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "MARKPATCH"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "MARKPATCHED"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c3", "status": "completed",
         "action": {"type": "exec", "command": ["MARKCOMMAND"], "timeout_ms": None, "env": {}}},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "MARKLISTING"},
        {"type": "tool_search_call", "call_id": "c4", "execution": "client", "arguments": {"query": "MARKQUERY"}},
        {"type": "tool_search_output", "call_id": "c4", "execution": "client", "tools": [DEMO, DEMO]},
        {"type": "shell_call", "call_id": "c5", "action": {"commands": ["MARKSHELL"]}},
        {"type": "shell_call_output", "call_id": "c5", "output": [{"stdout": "MARKSTDOUT"}]},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "m", "arguments": "{}", "output": "MARKMCP"},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
        {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "MARKAGENT"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "MARKANSWER"}]},
        {"role": "user", "content": "MARKNEXT"},
    ]  # fmt: skip
    answer, prompt = respond(front, call("mcp__demo__add", "{}"), input=items, tools=[SEARCH])
    assert answer.status_code == 200, answer.text
    marks = re.findall(r"MARK[A-Z]+", json.dumps(items))
    assert len(marks) > 16
    assert [mark for mark in marks if mark not in prompt] == []
    assert "gAAAA" not in prompt
    (found,) = answer.json()["output"]
    assert (found["name"], found["namespace"]) == ("add", "mcp__demo"), "tools that a search found can be called"


@pytest.mark.parametrize("path", [RESPONSES, CHAT])
def test_an_image_that_a_tool_returned_does_not_end_the_session_of_a_text_model(front: FrontEnd, path: str) -> None:
    image = "data:image/png;base64,aGk="
    items: dict[str, Any] = {
        "input": [
            {"type": "function_call", "id": "fc_1", "name": "view_image", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "fc_1",
                "output": [{"type": "input_image", "image_url": image}],
            },
        ]
    }
    messages: dict[str, Any] = {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "view_image", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": image}}]},
        ]
    }
    answer, prompt = respond(front, path=path, **(items if path == RESPONSES else messages))
    assert answer.status_code == 200
    assert "this model takes text only" in prompt


def test_an_encrypted_conversation_alone_is_refused_by_name(front: FrontEnd) -> None:
    answer, _ = respond(front, input=[{"type": "compaction", "encrypted_content": "x"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    "body",
    [
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources", "code_interpreter_call.outputs"]},
        {"truncation": "auto"},
        {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}},
        {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "client_metadata": {"a": "b"}},
        {"stream_options": {"include_obfuscation": False}, "max_tool_calls": 3},
        {"input": [{"role": "user", "content": None}, {"role": "user", "content": "hi"}]},
    ],
)
def test_what_asks_for_nothing_here_is_ignored(front: FrontEnd, body: dict[str, Any]) -> None:
    assert respond(front, **body)[0].status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prediction": {"type": "content", "content": "x"}, "verbosity": "low", "store": True, "metadata": {"a": "b"}},
        {"service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "reasoning_effort": "high"},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}, "stream": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}}},
        {"response_format": {"type": None}, "modalities": []},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                      {"role": "user", "content": [{"type": "output_text", "text": "u"}]}]},
        {"tools": [{"type": "function", "name": "flat", "parameters": {}}], "tool_choice": {"type": "auto"}},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "d"}]},
                      {"role": "user", "content": "u"}]},
        {"messages": [{"role": "user", "content": "u"},
                      {"role": "assistant", "content": None, "tool_calls": [
                          {"id": "c", "type": "function", "function": {"name": "f", "arguments": None}}]},
                      {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "t"}]}]},
    ],
)  # fmt: skip
def test_what_agents_send_to_chat_is_accepted(front: FrontEnd, body: dict[str, Any]) -> None:
    answer, _ = respond(front, path=CHAT, **body)
    assert answer.status_code == 200, answer.text


@needs_parsers
def test_custom_tools_of_chat_through_the_official_client() -> None:
    tool: Any = {"type": "custom", "custom": {"name": "apply_patch", "description": "d"}}
    backend = FakeBackend(lambda _: speak("Now." + call("apply_patch", '{"input": "a b"}')))
    with (
        served_in_thread(application(backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        create: Any = client.chat.completions.create
        hi = {"role": "user", "content": "hi"}
        message = create(model="tiny", messages=[hi], tools=[tool]).choices[0].message
        (made,) = message.tool_calls
        assert (made.type, made.custom.name, made.custom.input) == ("custom", "apply_patch", "a b")
        chunks = list(create(model="tiny", messages=[hi], tools=[tool], stream=True))
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        written = [each.to_dict() for each in deltas]
        assert (written[0]["type"], written[0]["custom"]) == ("custom", {"name": "apply_patch", "input": ""})
        assert "".join(each["custom"]["input"] for each in written) == "a b"
        result = {"role": "tool", "tool_call_id": made.id, "content": "done"}
        create(model="tiny", messages=[hi, message.to_dict(), result], tools=[tool])
    prompt = TINY.tokenizer.decode(
        list(memoryview(backend.requests[-1].token_ids).cast("I")), skip_special_tokens=False
    )
    assert "a b" in prompt


def test_an_earlier_call_without_a_function_is_refused_by_name(front: FrontEnd) -> None:
    answer, _ = respond(front, path=CHAT, messages=[{"role": "assistant", "tool_calls": [{"id": "c"}]}])
    assert answer.json()["error"]["param"] == "messages[0].tool_calls[0].function"


def test_input_tokens_are_counted_as_the_prompt_has_them(front: FrontEnd) -> None:
    body: dict[str, Any] = {"input": "How many?", "instructions": "Be brief.", "tools": [DEMO]}
    counted = front.post(FakeBackend(), f"{RESPONSES}/input_tokens", json={"model": "tiny", **body})
    assert counted.status_code == 200
    answer, _ = respond(front, **body)
    tokens = answer.json()["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": tokens}


def test_compacting_is_not_found_in_words_that_say_what_to_do(front: FrontEnd) -> None:
    answer = front.post(FakeBackend(), f"{RESPONSES}/compact", json={"model": "tiny", "input": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "summary" in answer.json()["error"]["message"]


@given(st.text())
def test_the_text_of_a_custom_tool_survives_its_function(text: str) -> None:
    assert custom_text(custom_arguments(text)) == text


WORDS = ["type", "name", "tools", "function", "custom", "namespace", "tool_search", "execution", "client", "parameters",
         "format", "mode", "auto", "required", "allowed_tools", "call_id", "output", "input", "arguments", "action",
         "content", "role", "user", "message", "function_call", "custom_tool_call", "local_shell_call", "mcp_call",
         "tool_search_output", "shell_call_output", "id", "text", "input_text", "reasoning", "summary"]  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "f", *WORDS])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
        st.builds(lambda kind, rest: {**rest, "type": kind, "name": "f"}, st.sampled_from(WORDS),
                  st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    ),
    max_leaves=12,
)  # fmt: skip
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(ANYTHING, max_size=3),
        "tool_choice": ANYTHING,
        "input": st.lists(ANYTHING, max_size=4),
        "text": ANYTHING,
        "include": ANYTHING,
    },
)


@settings(max_examples=examples(60))
@given(BODIES)
def test_whatever_tools_and_items_are_they_are_served_or_refused_by_name(front: FrontEnd, body: dict[str, Any]) -> None:
    for path in (RESPONSES, CHAT):
        answer, _ = respond(front, path=path, **body)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"]


class _Scripted:
    """Yields prepared pieces, one for each character fed."""

    def __init__(self, pieces: list[AnswerPiece]) -> None:
        self._pieces = pieces

    def feed(self, text: str) -> list[AnswerPiece]:
        given_now, self._pieces = self._pieces[: len(text)], self._pieces[len(text) :]
        return given_now

    def finish(self) -> list[AnswerPiece]:
        return self._pieces


_TURNS = st.lists(
    st.one_of(
        st.text(max_size=3).map(lambda text: [AnswerPiece(PieceKind.CONTENT, text)]),
        st.tuples(st.sampled_from(["custom", "other"]), st.text(max_size=8), st.integers(1, 3)).map(
            lambda made: [
                AnswerPiece(PieceKind.CALL, made[0]),
                *(
                    AnswerPiece(PieceKind.ARGUMENTS, custom_arguments(made[1])[at : at + made[2]])
                    for at in range(0, len(custom_arguments(made[1])), made[2])
                ),
            ]
        ),
    ),
    max_size=4,
)


@given(_TURNS, st.integers(1, 5))
def test_custom_calls_are_the_same_however_the_answer_is_cut(turns: list[list[AnswerPiece]], step: int) -> None:
    pieces = [piece for turn in turns for piece in turn]
    parser = CustomCalls(_Scripted(list(pieces)), {"custom"}, CUSTOM_ARGUMENT, custom_text)
    found = [piece for _ in range(0, len(pieces), step) for piece in parser.feed("x" * step)]
    expected: list[AnswerPiece] = []
    for turn in turns:
        if turn[0] == AnswerPiece(PieceKind.CALL, "custom"):
            expected += [
                turn[0],
                AnswerPiece(PieceKind.ARGUMENTS, custom_text("".join(piece.text for piece in turn[1:]))),
            ]
        else:
            expected += turn
    assert joined_pieces([*found, *parser.finish()]) == joined_pieces(expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\" \\ud83d\\ude00é"}', 'a\n"b" 😀é'),
        ('{"input": "half \\ud83d of \\ud83d\\u0041 two"}', "half \ufffd of \ufffdA two"),
        ('{ "input" : "a", "more": 1}', "a"),
        ('{"input": "cut he', "cut he"),
        ('{"input": "cut\\u00', "cut"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"input": 1}', '{"input": 1}'),
        ("[1", "[1"),
    ],
)
def test_the_text_of_a_custom_call_comes_as_it_is_written(arguments: str, text: str) -> None:
    pieces = [AnswerPiece(PieceKind.CALL, "custom"), *(AnswerPiece(PieceKind.ARGUMENTS, each) for each in arguments)]
    parser = CustomCalls(_Scripted(list(pieces)), {"custom"}, CUSTOM_ARGUMENT, custom_text)
    streamed = "".join(piece.text for _ in pieces for piece in parser.feed("x") if piece.kind is PieceKind.ARGUMENTS)
    rest = "".join(piece.text for piece in parser.finish())
    assert streamed + rest == text
    assert bool(rest) == (not arguments.replace(" ", "").startswith('{"input":"'))
