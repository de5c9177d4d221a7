"""Anthropic's Messages API, through the official client and by hand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest, Refused, ServedModel, StreamDelta
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.frontend.fake_backend import FakeBackend, Step, speak
from tests.frontend.server import application, in_process, post_to_shared, prompt_of, served_in_thread
from tests.installed import needs_parsers

ARGUMENTS = '{"city": "Pärïs\u2028"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
ANSWER = f"<think>\nLook it up.\n</think>\n\nLet me look.\n{CALL}"
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
HI: Any = [{"role": "user", "content": "hi"}]


def script(request: InferenceRequest) -> list[Step]:
    sampling = request.sampling
    if sampling.guided_json is not None:
        guided = json.loads(sampling.guided_json)
        return speak(
            '[{"name": "get_weather", "parameters": {"city": "Rome"}}]' if "items" in guided else '{"city": "Rome"}'
        )
    if sampling.max_tokens == 7:
        return speak("Once upon", finish_reason="length")
    return speak(ANSWER, cached_tokens=2)


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    app = application(FakeBackend(script), reasoning_parser="qwen3")
    with served_in_thread(app) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def post(backend: FakeBackend, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 100}
    return post_to_shared(backend, path, json={"model": "tiny", "messages": HI, **limit, **body})


@needs_parsers
def test_the_client_gets_thinking_text_and_tool_uses_as_blocks(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="tiny", max_tokens=100, messages=HI, tools=[TOOL], system="Be brief.")

    thinking, text, call = message.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("Look it up.", "")
    assert text.type == "text"
    assert text.text == "Let me look."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", json.loads(ARGUMENTS))
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.input_tokens > 2
    assert message._request_id
    assert message.id == f"msg_{message._request_id}"


@needs_parsers
def test_the_clients_streaming_helper_comes_to_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="tiny", max_tokens=100, messages=HI, tools=[TOOL])
    with client.messages.stream(model="tiny", max_tokens=100, messages=HI, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_message()

    def content(message: anthropic.types.Message) -> list[Any]:
        return [{**block.to_dict(), "id": ""} for block in message.content]

    assert content(final) == content(whole)
    usage = whole.usage.to_dict()
    del usage["cache_creation"]  # not known when the stream begins, and not taken from its end
    assert final.usage.to_dict() == usage
    assert (final.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    deltas = [event.partial_json for event in events if event.type == "input_json"]
    assert "".join(deltas) == ARGUMENTS
    assert len([delta for delta in deltas if delta]) > 3, "arguments come while they are written"


@needs_parsers
@pytest.mark.parametrize(
    ("choice", "calls"), [({"type": "any"}, 1), ({"type": "tool", "name": "get_weather"}, 1), ({"type": "none"}, 0)]
)
def test_a_tool_choice_is_kept_to(client: anthropic.Anthropic, choice: Any, calls: int) -> None:
    message = client.messages.create(model="tiny", max_tokens=100, messages=HI, tools=[TOOL], tool_choice=choice)
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [use.input for use in uses] == [{"city": "Rome"}] * calls


@needs_parsers
def test_a_stop_sequence_and_the_limit_are_reasons_to_stop(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(model="tiny", max_tokens=100, messages=HI, stop_sequences=["zzz", "me lo"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "me lo")
    assert [block.text for block in stopped.content if block.type == "text"] == ["Let "]
    with client.messages.stream(model="tiny", max_tokens=100, messages=HI, stop_sequences=["me lo"]) as stream:
        assert stream.get_final_message().stop_sequence == "me lo"
    assert client.messages.create(model="tiny", max_tokens=7, messages=HI).stop_reason == "max_tokens"
    assert client.messages.create(model="tiny", max_tokens=100, messages=HI).stop_reason == "end_turn"


@needs_parsers
def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.Anthropic) -> None:
    body: Any = {"model": "tiny", "messages": HI, "system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**body)
    usage = client.messages.create(**body, max_tokens=100).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_conversation_of_blocks_becomes_messages() -> None:
    backend = FakeBackend(lambda _: speak("Fine."))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Moment."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "c2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "c3", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]
    response = post(backend, messages=messages, system=system, tools=[TOOL])
    assert response.json()["content"] == [{"type": "text", "text": "Fine."}]
    turns = prompt_of(backend).split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == [
        *("system", "user", "assistant", "tool", "tool", "tool", "user", "assistant")
    ]
    assert turns[0].startswith("system\nBe brief.")
    assert turns[2].count("<tool_call>") == 2
    assert "Moment." in turns[2]


def test_an_answer_goes_on_with_what_the_assistant_has_said_last() -> None:
    backend = FakeBackend(lambda _: speak(" 42"))
    response = post(backend, messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert response.status_code == 200
    assert prompt_of(backend).endswith("The answer is")


@needs_parsers
def test_structured_output_becomes_a_guide_also_beside_tools() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "integer"}}
    for body in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        backend = FakeBackend(lambda _: speak("3"))
        assert post(backend, **body).status_code == 200
        assert backend.requests[0].sampling.guided_json == b'{"type":"integer"}'
    backend = FakeBackend(lambda _: speak("3"))
    assert post(backend, output_config={"format": wanted}, tools=[TOOL]).status_code == 200
    assert backend.requests[0].sampling.structural_tag is not None


@needs_parsers
def test_thinking_switches_the_templates_variable_and_may_be_left_out_of_the_answer() -> None:
    def shown(**body: Any) -> list[str]:
        backend = FakeBackend(lambda _: speak("<think>Hm.</think>Yes."))

        async def go() -> httpx.Response:
            async with in_process(application(backend, reasoning_parser="qwen3")) as http:
                return await http.post("/v1/messages", json={"model": "tiny", "messages": HI, "max_tokens": 9, **body})

        return [block.get("thinking", block.get("text")) for block in asyncio.run(go()).json()["content"]]

    assert shown(thinking={"type": "enabled", "budget_tokens": 1024}) == ["Hm.", "Yes."]
    assert shown(thinking={"type": "adaptive", "display": "omitted"}) == ["", "Yes."]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10_000_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/" + "x" * 2_000_000}}}},
         "output_config.format.schema"),
        ({"mcp_servers": "x"}, "mcp_servers"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"min_tokens": 200}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_the_words_of_the_client(body: dict[str, Any], param: str) -> None:
    backend = FakeBackend(script)
    response = post(backend, **body)
    assert response.status_code == 400
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert "max_completion_tokens" not in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert not backend.requests


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"max_tokens": 1, "messages": [{"role": "user", "content": "long " * 64}]},
            r"prompt is too long: \d+ tokens > 63 maximum",
        ),
        ({"max_tokens": 100}, r"input length and `max_tokens` exceed context limit: \d+ \+ 100 > 64, decrease"),
    ],
)
def test_what_does_not_fit_into_the_context_is_said_as_anthropic_does(body: dict[str, Any], said: str) -> None:
    error = post(FakeBackend(script, served=[ServedModel("tiny", 0, 64)]), **body).json()["error"]

    assert error["code"] == "context_length_exceeded"
    assert re.match(said, error["message"]), error["message"]


def test_the_client_raises_the_exceptions_that_it_has_for_errors(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    acme = Tenant(keys=(Key(key_file.hash_key("pg-acme")),), models=("other",))
    beta = Tenant(keys=(Key(key_file.hash_key("pg-beta")),))
    key_file.write(keys, KeyDocument(1, "5" * 64, {"acme": acme, "beta": beta}))
    backend = FakeBackend(refusal=Refused(429, "busy", "full", 3.0), refuse_from=1)
    with served_in_thread(application(backend, api_keys=keys)) as url:

        def ask(key: str, **more: Any) -> anthropic.types.Message:
            with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as made:
                body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI, **more}
                message: anthropic.types.Message = made.messages.create(**body)
                return message

        assert ask("pg-beta").stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError) as wrong_key:
            ask("pg-nobody")
        assert wrong_key.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with pytest.raises(anthropic.PermissionDeniedError):
            ask("pg-acme")
        with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
            ask("pg-beta", model="nothing")
        with pytest.raises(anthropic.RateLimitError) as busy:
            ask("pg-beta")
        assert busy.value.response.headers["retry-after"] == "3"
        with anthropic.Anthropic(base_url=url, api_key="pg-nobody", max_retries=0) as made, \
             pytest.raises(anthropic.AuthenticationError):  # fmt: skip
            made.messages.count_tokens(model="tiny", messages=HI)


def test_what_fails_after_a_stream_began_is_an_error_event() -> None:
    first, *_ = speak("Hello")
    broken: list[Step] = [first, [StreamDelta(b"", finish_reason="error", error="the engine broke")]]
    backend = FakeBackend(lambda _: list(broken))
    with (
        served_in_thread(application(backend)) as url,
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as made,
        pytest.raises(anthropic.APIStatusError, match="the engine broke"),
    ):
        list(made.messages.create(model="tiny", max_tokens=9, messages=HI, stream=True))


def test_unknown_paths_and_methods_below_messages_answer_in_the_same_shape() -> None:
    async def go() -> list[httpx.Response]:
        async with in_process(application(FakeBackend())) as http:
            return [await http.get("/v1/messages"), await http.post("/v1/messages/batches", json={})]

    for response, kind in zip(asyncio.run(go()), ("invalid_request_error", "not_found_error"), strict=True):
        assert (response.json()["type"], response.json()["error"]["type"]) == ("error", kind)
        assert response.json()["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


LINE = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=cli; cch={};"
MARK = {"type": "text", "text": "MARKTEXT"}
USE: Any = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": None}


def shown(system: Any = None, messages: Any = HI, **body: Any) -> str:
    """Return the prompt that the model is shown."""
    backend = FakeBackend(script)
    response = post(backend, system=system, messages=messages, **body)
    assert response.status_code == 200, response.text
    return prompt_of(backend)


@pytest.mark.parametrize(
    "system",
    [
        lambda line: [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}],
        lambda line: [{"type": "text", "text": f"{line}\n"}, {"type": "text", "text": "Be brief."}],
        lambda line: [{"type": "text", "text": "Be brief."}, {"type": "text", "text": line}],
        lambda line: [{"type": "text", "text": f"{line}\n\nBe brief."}],
        lambda line: f"{line}\nBe brief.",
        lambda line: f"{line}\r\n{line}\nBe brief.",
        lambda line: f" {line.upper()}\nBe brief.",
    ],
)
def test_billing_lines_do_not_reach_the_prompt(system: Any) -> None:
    lines = [LINE.format(tag) for tag in ("36ee5", "0aaa9f")]
    assert [shown(system(line)) for line in lines] == [shown("Be brief.")] * 2
    turns = [[*HI, {"role": "system", "content": system(line)}] for line in lines]
    assert [shown("S", turn) for turn in turns] == [shown("S", [*HI, {"role": "system", "content": "Be brief."}])] * 2


def test_a_billing_line_inside_a_text_is_text() -> None:
    text = f"Explain this line:\n{LINE.format('36ee5')}\nNow."
    assert text in shown(text)


def test_system_turns_stay_where_they_are() -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "MARKSYSTEM"}]}
    late = shown("First.", [*HI, {"role": "assistant", "content": "MARKREPLY"}, system, *HI])
    assert late.index("First.") < late.index("MARKREPLY") < late.index("MARKSYSTEM")
    assert "MARKSYSTEM" in shown("First.", [*HI, system])
    assert "MARKSYSTEM" in shown(None, [system, *HI])


@pytest.mark.parametrize(
    ("block", "texts"),
    [
        ({"type": "tool_reference", "tool_name": "MARKGONE"}, []),
        ({"type": "document", "title": "MARKTITLE", "context": None, "source": {"type": "text", "data": "MARKTEXT"}},
         ["MARKTITLE", "MARKTEXT"]),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "MARKTEXT"}]}},
         ["MARKTEXT"]),
        ({"type": "document", "source": {"type": "content", "content": "MARKTEXT"}}, ["MARKTEXT"]),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "MARKGONE"}},
         ["application/pdf"]),
        ({"type": "search_result", "source": "MARKURL", "title": "MARKTITLE", "content": [MARK]},
         ["MARKTITLE", "MARKURL", "MARKTEXT"]),
        ({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "MARKGONE"}}, []),
        ({"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}, []),
        ({"type": "web_search_tool_result", "tool_use_id": "s1", "content": [
            {"type": "web_search_result", "title": "MARKTITLE", "url": "MARKURL", "encrypted_content": "MARKGONE"}]},
         ["MARKTITLE", "MARKURL"]),
        ({"type": "web_search_tool_result", "tool_use_id": "s1",
          "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"}}, []),
        ({"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": {
          "type": "web_fetch_result", "url": "MARKURL",
          "content": {"type": "document", "source": {"type": "text", "data": "MARKTEXT"}}}}, ["MARKURL", "MARKTEXT"]),
        ({"type": "bash_code_execution_tool_result", "tool_use_id": "s1", "content": {
            "type": "bash_code_execution_result", "stdout": "MARKOUT", "stderr": "MARKERR", "return_code": 0}},
         ["MARKOUT", "MARKERR"]),
        ({"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}}, []),
        ({"type": "mcp_tool_result", "tool_use_id": "m", "content": [MARK]}, ["MARKTEXT"]),
        ({"type": "compaction", "content": "MARKTEXT"}, ["MARKTEXT"]),
        ({"type": "redacted_thinking", "data": "MARKGONE"}, []),
        ({"type": "container_upload", "file_id": "f"}, []),
        ({"type": "of_tomorrow"}, []),
    ],
)  # fmt: skip
def test_blocks_of_a_history_are_shown_or_skipped(block: Any, texts: list[str]) -> None:
    answer = {"type": "text", "text": "MARKANSWER"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block], "is_error": None}
    places = {
        "user": [{"role": "user", "content": [block, {"type": "text", "text": "hi", "citations": None}]}],
        "alone": [{"role": "user", "content": [block]}],
        "assistant": [*HI, {"role": "assistant", "content": [block, answer]}, *HI],
        "result": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}],
    }
    for place, messages in places.items():
        prompt = shown("System.", messages, tools=[TOOL])
        found = [prompt.find(text) for text in texts]
        assert -1 not in found, (place, prompt)
        assert found == sorted(found)
        assert "MARKGONE" not in prompt
        assert ("MARKANSWER" in prompt) == (place == "assistant")


def test_blocks_nested_without_end_are_read_to_a_depth() -> None:
    block: dict[str, Any] = {"type": "text", "text": "MARKDEEP"}
    for _ in range(100):
        block = {"type": "document", "content": [block]}
    assert "MARKDEEP" not in shown(None, [{"role": "user", "content": [block]}])


def test_tools_that_run_at_anthropic_are_left_out_and_named() -> None:
    backend = FakeBackend(script)
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "mcp_toolset", "mcp_server_name": "MARKGONE"},
    ]
    servers = [{"type": "url", "url": "https://mcp.example", "name": "MARKGONE"}]
    response = post(backend, tools=[TOOL, *hosted], mcp_servers=servers)
    assert response.status_code == 200
    assert response.headers["x-poolgrid-tools-left-out"] == "web_search_20250305, mcp_toolset, mcp_server"
    assert "get_weather" in prompt_of(backend)
    assert "web_search" not in prompt_of(backend)
    assert "MARKGONE" not in prompt_of(backend)
    assert shown(tools=hosted) == shown()


@pytest.mark.parametrize(
    "body",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens"}}]}},
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"thinking": {"type": "adaptive", "budget_tokens": None, "display": None}},
        {"thinking": {"type": "adaptive", "display": "updates"}},
        {"output_config": {"effort": None, "format": None}, "output_format": None},
        {"metadata": {"user_id": None}, "betas": ["x"], "speed": "fast", "service_tier": "auto", "inference_geo": "us"},
        {"container": {"id": None, "skills": []}, "mcp_servers": []},
        {"tools": [{**TOOL, "type": None, "strict": None, "defer_loading": True, "eager_input_streaming": True}]},
        {"tools": None, "tool_choice": None, "stop_sequences": None, "temperature": None, "stream": None},
        {"messages": [*HI, {"role": "assistant", "content": None}, *HI]},
        {"messages": [*HI, {"role": "assistant", "content": []}, *HI]},
    ],
)
def test_fields_that_ask_for_nothing_here_are_accepted(body: dict[str, Any]) -> None:
    for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"):
        response = post(FakeBackend(script), path, **body)
        assert response.status_code == 200, response.text


@needs_parsers
def test_models_are_listed_as_anthropic_does_for_its_clients(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    model = page.data[0]
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.created_at is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", page.data[-1].id)
    assert client.models.retrieve("tiny") == model
