"""Tools that agents load while they work, and tools of a vendor's form that the client runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest
from tests.frontend.answers import PATHS
from tests.frontend.fake_backend import FakeBackend, Step, speak
from tests.frontend.server import application, in_process, post_to_shared, prompt_of
from tests.installed import needs_parsers

HI = {"role": "user", "content": "hi"}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"name": name, "description": f"word-{name}", "input_schema": schema, **fields}


BASE = [tool("Agent"), tool("ToolSearch"), tool("Write")]
DEFERRED = tool("CronCreate", defer_loading=True)
FOUND = {"type": "tool_reference", "tool_name": "CronCreate"}


def searched(*results: Any) -> list[dict[str, Any]]:
    """Return a conversation in which a search for tools gave these results."""
    call = {"type": "tool_use", "id": "call_1", "name": "ToolSearch", "input": {"x": "cron"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": list(results)}
    return [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def messages(
    tools: Sequence[dict[str, Any]], conversation: Sequence[dict[str, Any]] = (HI,), text: str = "Hello", **fields: Any
) -> tuple[httpx.Response, str]:
    backend = FakeBackend(lambda _: speak(text))
    body = {"model": "tiny", "max_tokens": 500, "messages": [*conversation], "tools": [*tools], **fields}
    response = post_to_shared(backend, PATHS["messages"], json=body)
    assert response.status_code == 200, response.text
    return response, prompt_of(backend)


def call_of(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_deferred_tool_is_not_in_the_prompt_before_it_is_found_and_its_definition_stands_where_it_is() -> None:
    _, without = messages(BASE, searched({"type": "text", "text": "No matching tools"}))
    _, unfound = messages([BASE[0], DEFERRED, *BASE[1:]], searched({"type": "text", "text": "No matching tools"}))
    assert unfound == without

    _, found = messages([BASE[0], DEFERRED, *BASE[1:]], searched(FOUND))
    head = without.index("No matching tools")
    assert found[:head] == without[:head], "the beginning of the prompt stays, and its cache with it"
    assert found.count("word-CronCreate") == 1
    assert json.loads(found[head:].splitlines()[0].partition("<")[0].strip()) == {
        "type": "function",
        "function": {
            "name": "CronCreate",
            "description": "word-CronCreate",
            "parameters": DEFERRED["input_schema"],
        },
    }


def test_deferred_tools_do_not_count_before_they_are_found() -> None:
    def count(tools: list[dict[str, Any]]) -> int:
        body = {"model": "tiny", "messages": [HI], "tools": tools}
        tokens: int = post_to_shared(None, "/v1/messages/count_tokens", json=body).json()["input_tokens"]
        return tokens

    assert count([*BASE, DEFERRED]) == count(BASE) < count([*BASE, tool("CronCreate")])


@needs_parsers
@pytest.mark.parametrize("conversation", [[HI], searched(FOUND)], ids=["not found", "found"])
def test_deferred_tool_can_be_called(conversation: list[dict[str, Any]]) -> None:
    response, _ = messages([*BASE, DEFERRED], conversation, text=call_of("CronCreate", {"x": "1"}))
    [block] = response.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "CronCreate", {"x": "1"})


def test_deferred_tools_are_shown_where_only_anthropic_could_search_for_them() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    response, text = messages([*BASE, search, DEFERRED])
    assert "word-CronCreate" in text
    assert response.headers["x-poolgrid-tools-left-out"] == "tool_search_tool_regex_20251119"


def test_references_to_other_tools_and_results_beside_them_stay() -> None:
    results = ({"type": "text", "text": "two found"}, FOUND, {"type": "tool_reference", "tool_name": "Agent"})
    _, text = messages([*BASE, DEFERRED], searched(*results))
    assert text.index("two found") < text.index("word-CronCreate")
    assert text.count("word-Agent") == 1


@needs_parsers
def test_all_tools_may_be_deferred() -> None:
    response, text = messages([DEFERRED], text=call_of("CronCreate", {"x": "1"}))
    assert "word-CronCreate" not in text
    assert response.json()["stop_reason"] == "tool_use"


def responses(tools: list[dict[str, Any]], items: Any = "hi", text: str = "Hello", **fields: Any) -> tuple[Any, str]:
    backend = FakeBackend(lambda _: speak(text))
    body = {"model": "tiny", "input": items, "tools": tools, **fields}
    response = post_to_shared(backend, PATHS["responses"], json=body)
    assert response.status_code == 200, response.text
    return response.json(), prompt_of(backend)


def custom_tool(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "apply_patch", "description": "word-apply_patch", **fields}


@needs_parsers
@pytest.mark.parametrize("namespace", [False, True])
def test_deferred_custom_tool_is_not_in_the_prompt_and_can_be_called(namespace: bool) -> None:
    def placed(*tools: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "namespace", "name": "files", "tools": [*tools]}] if namespace else [*tools]

    other = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
    name = "files__apply_patch" if namespace else "apply_patch"
    text = call_of(name, {"input": "*** Begin"})
    answered, prompt = responses(placed(other, custom_tool(defer_loading=True)), text=text)
    assert prompt == responses(placed(other))[1]
    assert "word-apply_patch" in responses(placed(other, custom_tool(defer_loading=False)))[1]
    [item] = answered["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")


def test_deferred_custom_tool_is_shown_where_only_a_vendor_could_search_for_it() -> None:
    _, prompt = responses([{"type": "tool_search"}, custom_tool(defer_loading=True)])
    assert "word-apply_patch" in prompt


@needs_parsers
def test_tools_that_a_client_search_found_leave_the_beginning_of_the_prompt_as_it_was() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}}
    found = {"type": "function", "name": "cron", "description": "word-cron", "parameters": {"type": "object"}}
    call = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "x"}}

    def items(tools: list[Any]) -> list[Any]:
        output = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": tools}
        return [{"role": "user", "content": "hi"}, call, output]

    _, nothing = responses([search], items([]))
    answer, text = responses([search], items([found]), text=call_of("cron", {}))
    head = nothing.index("[]", nothing.index("query"))
    assert text[:head] == nothing[:head]
    assert text.count("word-cron") == 1
    assert (answer["output"][0]["type"], answer["output"][0]["name"]) == ("function_call", "cron")


ANTHROPIC_TOOLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}),
    ({"type": "bash_20241022", "name": "bash"}, {"restart": True}),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
    ),
    (
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"},
    ),
    ({"type": "memory_20250818", "name": "memory"}, {"command": "rename", "old_path": "/a", "new_path": "/b"}),
    (
        {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
        {"action": "left_click", "coordinate": [1, 2]},
    ),
]


@needs_parsers
@pytest.mark.parametrize(("given", "arguments"), ANTHROPIC_TOOLS, ids=[given["type"] for given, _ in ANTHROPIC_TOOLS])
def test_tool_of_anthropic_that_the_client_runs_is_shown_and_its_call_comes_by_its_name(
    given: dict[str, Any], arguments: dict[str, Any]
) -> None:
    response, text = messages([given], text=call_of(given["name"], arguments))
    assert "x-poolgrid-tools-left-out" not in response.headers
    assert all(word in text for word in (given["name"], *arguments))
    [block] = response.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", given["name"], arguments)
    assert ("800 x 600" in text) is (given["type"] == "computer_20250124")


@needs_parsers
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "bash"}], ids=["any", "named"])
def test_choice_that_requires_a_tool_may_be_of_one_that_the_client_runs(choice: dict[str, Any]) -> None:
    def script(request: InferenceRequest) -> list[Step]:
        assert request.sampling.guided_json is not None
        listed = b"items" in request.sampling.guided_json
        return speak('[{"name": "bash", "parameters": {"command": "ls"}}]' if listed else '{"command": "ls"}')

    body = {
        "model": "tiny",
        "max_tokens": 100,
        "messages": [HI],
        "tools": [ANTHROPIC_TOOLS[0][0]],
        "tool_choice": choice,
    }
    answer = post_to_shared(FakeBackend(script), PATHS["messages"], json=body).json()
    assert [(block["name"], block["input"]) for block in answer["content"]] == [("bash", {"command": "ls"})]


@pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20250522", "bash_2025", "bash"])
def test_tools_that_run_at_the_vendor_or_are_unknown_are_left_out_as_before(kind: str) -> None:
    response, _ = messages([*BASE, {"type": kind, "name": "x"}])
    assert response.headers["x-poolgrid-tools-left-out"] == kind


SHELL = {"commands": ["ls", "pwd"], "timeout_ms": 5, "max_output_length": 100}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}


@needs_parsers
@pytest.mark.parametrize(
    ("given", "name", "arguments", "item_type", "field"),
    [
        ({"type": "shell"}, "shell", SHELL, "shell_call", "action"),
        ({"type": "shell", "environment": {"type": "local"}}, "shell", SHELL, "shell_call", "action"),
        ({"type": "apply_patch"}, "apply_patch", PATCH, "apply_patch_call", "operation"),
        ({"type": "apply_patch"}, "apply_patch", {"type": "delete_file", "path": "a"}, "apply_patch_call", "operation"),
    ],
)
def test_tool_of_openai_that_the_client_runs_is_shown_answered_and_read_again(
    given: dict[str, Any], name: str, arguments: dict[str, Any], item_type: str, field: str
) -> None:
    answer, text = responses([given], text=call_of(name, arguments))
    assert all(word in text for word in (name, *arguments))
    [item] = answer["output"]
    assert (item["type"], item[field], item["status"]) == (item_type, arguments, "completed")

    output = {"type": f"{item_type}_output", "call_id": item["call_id"], "status": "completed", "output": "MARKDONE"}
    _, again = responses([given], [{"role": "user", "content": "hi"}, item, output])
    assert again.index(json.dumps(arguments)[:20]) < again.index("MARKDONE")


def test_shell_that_runs_at_openai_is_left_out() -> None:
    body = {"model": "tiny", "input": "hi", "tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}
    response = post_to_shared(None, PATHS["responses"], json=body)
    assert response.headers["x-poolgrid-tools-left-out"] == "shell"


ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/models/no", 404, "not_found_error"),
        ("GET", "/v1/files", 404, "not_found_error"),
        ("POST", "/v1/skills", 404, "not_found_error"),
        ("DELETE", "/v1/models", 405, "invalid_request_error"),
        ("POST", "/tokenize", 400, "invalid_request_error"),
    ],
)
def test_errors_of_shared_paths_are_anthropics_for_its_clients(method: str, path: str, status: int, kind: str) -> None:
    for headers in (ANTHROPIC, {}):
        response = ask(method, path, headers)
        body = response.json()
        assert response.status_code == status
        assert ("type" in body) is bool(headers)
        if headers:
            assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert body["request_id"] == response.headers["request-id"]


def test_errors_of_openais_own_paths_are_its_own_whatever_else_a_client_sends() -> None:
    response = ask("POST", PATHS["chat"], ANTHROPIC)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}


def test_model_of_anthropics_clients_has_its_limits() -> None:
    for path in ("/v1/models/tiny", "/v1/models"):
        body = ask("GET", path, ANTHROPIC).json()
        model = body["data"][0] if "data" in body else body
        assert (model["type"], model["max_input_tokens"], model["max_tokens"]) == ("model", 262_144, 262_144)
    assert "max_input_tokens" not in ask("GET", "/v1/models/tiny", {}).json()


def ask(method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    async def go() -> httpx.Response:
        async with in_process(application(FakeBackend())) as client:
            return await client.request(method, path, headers=headers, json=None if method == "GET" else {})

    return asyncio.run(go())
