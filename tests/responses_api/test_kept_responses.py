"""Responses that are kept: gone on from, shown, forgotten, each tenant's by itself, within the limits of the store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from poolgrid.plugins.responses_api import response_store
from poolgrid.plugins.responses_api.response_store import ENTRY_BYTES, KeptResponse, ResponseStore
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from poolgrid.server.frontend.access.owner import Owner
from tests.clock import HandClock
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.server import application, in_process, served_in_thread
from tests.frontend.weather_tool import TOOL
from tests.installed import needs_parsers

open_database = response_store._open
ALICE = Owner("alice", 2)
BOB = Owner("bob", 2)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


def prompt_of(backend: FakeBackend, number: int = -1) -> str:
    return TINY.tokenizer.decode(
        list(memoryview(backend.requests[number].token_ids).cast("I")), skip_special_tokens=False
    )


def text_of(item: Any) -> str:
    """Return the text of a message; the client's own types allow items that do not occur."""
    return str(item.content[0].text)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(lambda request: speak(CALL if "weather" in TINY.decode(request.token_ids)[-60:] else "Fine."))


@pytest.fixture(scope="module")
def client(backend: FakeBackend) -> Iterator[openai.OpenAI]:
    with (
        served_in_thread(application(backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@needs_parsers
def test_a_conversation_goes_on_from_the_response_that_is_named(client: openai.OpenAI, backend: FakeBackend) -> None:
    first = client.responses.create(model="tiny", input="The weather", tools=[TOOL], instructions="Be brief.")
    [call] = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="tiny", input=[result], tools=[TOOL], previous_response_id=first.id)
    with client.responses.stream(model="tiny", input="And now?", previous_response_id=second.id) as stream:
        third = stream.until_done().get_final_response()
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    assert first.store  # type: ignore[attr-defined]

    turns = [turn.split("<|im_end|>")[0] for turn in prompt_of(backend).split("<|im_start|>")[1:]]
    assert [turn.split("\n")[0] for turn in turns] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert "Be brief." not in prompt_of(backend), "instructions are of one turn"
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}' in turns[1]
    assert turns[2:5] == ["tool\nrain", "assistant\nFine.", "user\nAnd now?"]

    branch = client.responses.create(model="tiny", input="Again?", previous_response_id=first.id)
    assert branch.output_text == "Fine."


@needs_parsers
def test_references_are_served_with_the_items_that_they_mean(client: openai.OpenAI, backend: FakeBackend) -> None:
    first = client.responses.create(
        model="tiny", input="The weather", tools=[TOOL], extra_headers={"x-request-id": "in_5"}
    )
    [call] = first.output
    assert call.type == "function_call"
    [question] = client.responses.input_items.list(first.id)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    conversation: list[Any] = [{"id": question.id}, {"type": "item_reference", "id": call.id}, result]
    second = client.responses.create(model="tiny", input=conversation, tools=[TOOL])

    turns = [turn.split("<|im_end|>")[0] for turn in prompt_of(backend).split("<|im_start|>")[1:]]
    assert turns[1] == "user\nThe weather"
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}' in turns[2]
    assert turns[3] == "tool\nrain"

    client.responses.delete(first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in items][:2] == [question.id, call.id], "what is kept is whole by itself"
    for missing in (call.id, "msg_1", "x", ""):
        reference: Any = {"type": "item_reference", "id": missing}
        with pytest.raises(openai.NotFoundError, match="no such item") as gone:
            client.responses.create(model="tiny", input=[result, reference])
        assert (gone.value.code, gone.value.param) == ("item_not_found", "input[1].id")


def test_a_response_that_is_kept_is_shown_listed_and_forgotten(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="Hello")
    second = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "One"}], previous_response_id=first.id
    )
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()

    pages = client.responses.input_items.list(second.id, limit=2, order="asc")
    texts = [text_of(item) for item in pages]
    assert texts == ["Hello", "Fine.", "One"], "the pages are followed"
    newest = client.responses.input_items.list(second.id).data
    assert [text_of(item) for item in newest] == texts[::-1]

    client.responses.delete(first.id)
    for missing in (first.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError, match="is kept here"):
            client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(missing)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="tiny", input="And?", previous_response_id=second.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.retrieve(second.id).id == second.id


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hello", store=False)
    assert not response.store  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_ids_cannot_be_guessed_and_two_requests_of_one_name_are_two_responses(client: openai.OpenAI) -> None:
    named = {"x-request-id": "mine"}
    ids = {client.responses.create(model="tiny", input="Hello", extra_headers=named).id for _ in range(2)}
    assert len(ids) == 2
    assert all(each.startswith("resp_mine_") and len(each) > len("resp_mine_") + 20 for each in ids)


@needs_parsers
async def test_errors_name_the_fields_that_a_responses_client_sent() -> None:
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text.format.schema"),
        ({"tools": [TOOL], "text": {"format": {"type": "regex", "regex": "a"}}}, "text.format"),
        ({"max_output_tokens": 10_000_000}, "max_output_tokens"),
        ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": some}, "tool_choice.tools[0].name"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
    ]  # fmt: skip

    async with in_process(application(FakeBackend())) as http:
        for body, param in cases:
            answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert "response_format" not in error["message"]
            assert "max_completion_tokens" not in error["message"]


async def test_tenants_find_their_own_responses_only_and_isolated_clients_without_keys_keep_none(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    tenants = {name: Tenant(keys=(Key(key_file.hash_key(f"pg-{name}")),)) for name in ("alice", "bob")}
    key_file.write(keys, KeyDocument(1, "5" * 64, tenants))

    async with in_process(application(FakeBackend(), api_keys=keys)) as http:

        async def ask(key: str, **more: Any) -> httpx.Response:
            body = {"model": "tiny", "input": "hi", **more}
            return await http.post("/v1/responses", json=body, headers={"x-api-key": key})

        response = (await ask("pg-alice")).json()
        kept, reference = response["id"], {"type": "item_reference", "id": response["output"][0]["id"]}
        for key, status in (("pg-bob", 404), ("pg-alice", 200)):
            headers = {"x-api-key": key}
            assert (await ask(key, input=[reference])).status_code == status
            for path in (f"/v1/responses/{kept}", f"/v1/responses/{kept}/input_items"):
                assert (await http.get(path, headers=headers)).status_code == status
            assert (await ask(key, previous_response_id=kept)).status_code == (200 if status == 200 else 400)
        assert (await http.delete(f"/v1/responses/{kept}", headers={"x-api-key": "pg-bob"})).status_code == 404
        assert (await http.get(f"/v1/responses/{kept}")).status_code == 401
    for settings, words in (
        ({"isolate_tenants": True}, "API keys"),
        ({"response_store_bytes": 0}, "response_store"),
    ):
        async with in_process(application(FakeBackend(), **settings)) as http:
            body = {"model": "tiny", "input": "hi"}
            plain = (await http.post("/v1/responses", json=body)).json()
            assert plain["store"] is False
            assert (await http.get(f"/v1/responses/{plain['id']}")).status_code == 404
            refused: dict[str, dict[str, Any]] = {
                "store": {"store": True},
                "previous_response_id": {"previous_response_id": "resp_x"},
                "input[0].id": {"input": [reference]},
            }
            for param, more in refused.items():
                error = (await http.post("/v1/responses", json={**body, **more})).json()["error"]
                assert (error["code"], error["param"]) == ("unsupported_parameter", param)
                assert words in error["message"]


async def test_a_conversation_that_is_too_long_to_go_on_is_refused_before_it_is_read() -> None:
    async with in_process(application(FakeBackend(), max_body_bytes=3000)) as http:
        body = {"model": "tiny", "input": "x" * 2000}
        first = (await http.post("/v1/responses", json=body)).json()["id"]
        second = (await http.post("/v1/responses", json={**body, "previous_response_id": first})).json()["id"]
        error = (await http.post("/v1/responses", json={**body, "previous_response_id": second})).json()["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "invalid_value")
        listed = await http.get(f"/v1/responses/{first}/input_items")
        reference = {"id": listed.json()["data"][0]["id"]}
        assert (await http.post("/v1/responses", json={**body, "input": [reference]})).status_code == 200
        error = (await http.post("/v1/responses", json={**body, "input": [reference] * 20})).json()["error"]
        assert (error["param"], error["code"]) == ("input[1].id", "invalid_value"), "a few bytes mean much"


def kept(name: str, previous: str | None = None, size: int = 1000) -> KeptResponse:
    return KeptResponse(name, previous, b"[]", b"[]", b"x" * (size - ENTRY_BYTES - 4))


def store(path: Path | None = None, budget_bytes: int = 10_000, ttl_s: float = 3600) -> tuple[ResponseStore, HandClock]:
    times = HandClock()
    return ResponseStore(path, budget_bytes, ttl_s, times), times


async def test_the_conversation_that_was_used_longest_ago_goes_first_and_whole() -> None:
    responses, times = store()  # 5,000 bytes for each of the two

    async def keep(name: str, previous: str | None = None, owner: Owner = ALICE) -> bool:
        times.now_ms += 1
        return await responses.keep(owner, kept(name, previous))

    async def there(*names: str) -> list[str]:
        return [name for name in names if await responses.response(ALICE, name) is not None]

    for name, previous in (("a1", None), ("b1", None), ("a2", "a1"), ("b2", "b1"), ("a3", "a2")):
        assert await keep(name, previous)
    times.now_ms += 1
    assert [entry.id for entry in await responses.conversation(ALICE, "b2") or ()] == ["b1", "b2"]
    assert await keep("c1")
    assert await there("a1", "a2", "a3", "b1", "b2", "c1") == ["b1", "b2", "c1"], "b was used after a"
    for number in range(8):
        assert await keep(f"bob{number}", owner=BOB)
    assert await there("b1", "b2", "c1") == ["b1", "b2", "c1"], "another tenant's use takes no room here"
    assert await responses.conversation(BOB, "b2") is None
    assert not await responses.keep(ALICE, kept("huge", size=6000)), "it has no room"
    assert await there("b1", "c1", "huge") == ["b1", "c1"], "and takes that of no other"
    responses.close()


async def test_what_nobody_used_for_too_long_is_forgotten_and_what_went_before_is_not_gone_on_from() -> None:
    responses, times = store(ttl_s=10)
    assert await responses.keep(ALICE, kept("a"))
    times.now_ms += 8_000
    assert await responses.conversation(ALICE, "a") is not None
    times.now_ms += 8_000
    assert await responses.keep(ALICE, kept("b"))
    assert await responses.response(ALICE, "a") is not None, "it was used in between"
    times.now_ms += 8_000
    assert await responses.keep(ALICE, kept("c"))
    assert await responses.response(ALICE, "a") is None
    assert not await responses.keep(ALICE, kept("a2", previous="a"))
    responses.close()


async def test_a_file_is_shared_survives_and_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "responses" / "responses.sqlite3"

    here, _ = store(path)
    there, _ = store(path)
    assert path.stat().st_mode & 0o777 == 0o600
    for number in range(4):
        name, before = f"r{number}", f"r{number - 1}" if number else None
        assert await (here, there)[number % 2].keep(Owner("", 1), kept(name, before))
    assert [entry.id for entry in await here.conversation(Owner("", 1), "r3") or ()] == ["r0", "r1", "r2", "r3"]
    assert await there.forget(Owner("", 1), "r3")
    here.close()
    there.close()
    again, _ = store(path)
    assert await again.response(Owner("", 1), "r2") is not None
    assert await again.response(Owner("", 1), "r3") is None
    again.close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    anew, _ = store(path)
    assert await anew.response(Owner("", 1), "r2") is None
    assert await anew.keep(Owner("", 1), kept("r9"))
    anew.close()


async def test_a_file_that_cannot_be_used_is_said_and_one_that_fails_later_loses_no_answer(tmp_path: Path) -> None:
    wrong = tmp_path / "responses.sqlite3"
    wrong.write_text("no database " * 100)
    with pytest.raises(OSError, match="opening the responses that are kept"):
        store(wrong)

    path = tmp_path / "data"
    app = application(FakeBackend())
    async with in_process(app) as http:
        assert (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).status_code == 200
    responses, _ = store(path / "responses.sqlite3")
    with sqlite3.connect(path / "responses.sqlite3") as other:
        other.execute("DROP TABLE responses")
    assert not await responses.keep(ALICE, kept("a"))
    with pytest.raises(Exception, match="cannot be read now"):
        await responses.response(ALICE, "a")
    responses.close()


def full_disk(database: sqlite3.Connection) -> sqlite3.Connection:
    """Return a database that cannot grow: SQLite answers as it does on a full disk."""
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    return database


@pytest.mark.parametrize("asked", [{}, {"store": True}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_that_cannot_be_written_is_delivered_and_says_that_it_is_not_stored(
    asked: dict[str, Any], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_open", lambda path: full_disk(open_database(path)))
    app = application(FakeBackend(lambda _: speak("Fine.")))
    body = {"model": "tiny", "input": "hi " * 10_000, "max_output_tokens": 9, "stream": streamed, **asked}
    async with in_process(app) as http:
        answer = await http.post("/v1/responses", json=body)
        if streamed:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in events].count("response.completed") == 1
            assert events[-1]["type"] == "response.completed"
            response = events[-1]["response"]
        else:
            response = answer.json()
        assert (await http.get(f"/v1/responses/{response['id']}")).status_code == 404

    assert answer.status_code == 200
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "Fine."
    assert response["store"] is False


async def test_a_response_larger_than_the_part_of_its_owner_is_not_stored_and_displaces_no_other() -> None:
    app = application(FakeBackend(lambda _: speak("Fine.")), response_store_bytes=2048)
    async with in_process(app) as http:
        stored, large = [
            (await http.post("/v1/responses", json={"model": "tiny", "input": text, "max_output_tokens": 9})).json()
            for text in ("hi", "hi " * 700)
        ]
        found = [(await http.get(f"/v1/responses/{each['id']}")).status_code for each in (stored, large)]

    assert [stored["store"], large["store"]] == [True, False]
    assert found == [200, 404]


async def test_stored_responses_are_read_and_continued_on_a_full_disk(tmp_path: Path) -> None:
    responses, _ = store(tmp_path / "responses.sqlite3")
    assert await responses.keep(ALICE, kept("a"))
    responses._database.execute("PRAGMA query_only = 1")  # a full disk takes no byte of the journal of a change

    assert not await responses.keep(ALICE, kept("b", "a"))
    assert [entry.id for entry in await responses.conversation(ALICE, "a") or ()] == ["a"]
    assert await responses.items(ALICE, "a", "input") == kept("a").input
    assert await responses.response(ALICE, "a") is not None
    responses.close()


async def test_items_of_a_request_are_kept_with_ids() -> None:
    backend = FakeBackend(lambda _: speak("Fine."))

    async with in_process(application(backend)) as http:
        items: list[dict[str, Any]] = [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"role": "assistant", "content": "So."},
        ]
        body = {"model": "tiny", "input": items}
        kept_id = (await http.post("/v1/responses", json=body)).json()["id"]
        page = (await http.get(f"/v1/responses/{kept_id}/input_items", params={"order": "asc", "limit": 2})).json()
        assert page["has_more"]
        assert page["last_id"] == page["data"][1]["id"]
        rest = {"order": "asc", "after": page["last_id"]}
        last = (await http.get(f"/v1/responses/{kept_id}/input_items", params=rest)).json()
        wrong = await http.get(f"/v1/responses/{kept_id}/input_items", params={"after": "nothing"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")
        items = [*page["data"], *last["data"]]
    assert [item["type"] for item in items] == ["function_call", "function_call_output", "message"]
    assert len({item["id"] for item in items}) == 3
    assert items[2]["content"] == [{"type": "output_text", "text": "So.", "annotations": []}]
    assert json.dumps(items)
