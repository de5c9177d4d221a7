"""A stream whose server dies equals the undisturbed one, or ends with an error that gives the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest

from tests.e2e.processes import becomes, metric
from tests.forwarding.answer_streams import DONE, FORMS, Unit, chat, event, folded, renamed
from tests.proxy.pool import ScriptedPool
from tests.proxy.raw_client import CHAT, Answer, chat_body
from tests.proxy.scripted_server import LAST_CHUNK, PATIENCE_S, Call, Script, chunk, stream_head, whole

pytestmark = pytest.mark.e2e

PATHS = {"chat": CHAT, "completion": "/v1/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
UNITS: list[Unit] = [
    *(("reasoning", each) for each in ("Let", " me", " think\n")),
    *(("content", each) for each in ("Hel", "lo 안녕", ' "wor', "ld\\", "\n")),
    *(("call0", each) for each in ('{"a', '": 1', "}")),
]
ALIKE: dict[str, Any] = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}


def in_turn(pool: ScriptedPool, *scripts: Script) -> None:
    """Have calls answered by these scripts one after another, the last one for all further ones."""
    calls: list[Call] = []

    def script(call: Call) -> None:
        calls.append(call)
        scripts[min(len(calls), len(scripts)) - 1](call)

    pool.on(script)


def serves(events: Sequence[bytes], tail: bytes = LAST_CHUNK) -> Script:
    """A server that writes these events."""

    def script(call: Call) -> None:
        call.send(stream_head())
        for each in events:
            call.send(chunk(each))
        call.cut(tail) if tail != LAST_CHUNK else call.send(tail)

    return script


def dies_after(events: Sequence[bytes], tail: bytes = b"") -> Script:
    """A server that is killed after these events, and a part of what follows."""

    def script(call: Call) -> None:
        call.send(stream_head() + b"".join(map(chunk, events)) + tail)
        call.reset()

    return script


def ask(pool: ScriptedPool, path: str = CHAT, **more: Any) -> Answer:
    return pool.post(path, chat_body(prompt="hi", input="hi", **{**ALIKE, **more}))


def error_of(answer: Answer) -> str:
    """The message of the error that a stream ended with; it has not ended as a whole one."""
    *_, last, rest = answer.body.split(b"\n\n")
    assert (answer.status, answer.is_whole, rest) == (200, False, b"")
    assert last.startswith(b"event: error\ndata: ")
    error = json.loads(last.partition(b"data: ")[2])["error"]
    assert error["code"] == "server_lost"
    return str(error["message"])


Moment = Callable[[list[bytes]], Script]
MOMENTS: dict[str, Moment] = {
    "before its head": lambda events: lambda call: call.reset(),
    "after its head": lambda events: dies_after([]),
    "after the first event": lambda events: dies_after(events[:1]),
    "between events": lambda events: dies_after(events[: len(events) // 2]),
    "within an event": lambda events: dies_after([*events[:4], events[4][:20]]),
    "within a chunk": lambda events: dies_after(events[:4], chunk(events[4])[:30]),
    "before its last event": lambda events: dies_after(events[:-1]),
    "after its last event": dies_after,
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("name", FORMS)
def test_stream_whose_server_dies_is_the_undisturbed_one(pool: ScriptedPool, name: str, moment: Moment) -> None:
    form, write = FORMS[name]
    undisturbed = write(UNITS, [1], 1)
    in_turn(pool, moment(undisturbed), serves(write(UNITS, [2, 3, 1], 2)))

    answer = ask(pool, PATHS[name])

    assert (answer.status, answer.is_whole) == (200, True)
    assert folded(renamed(answer.body), form) == folded(b"".join(undisturbed), form)
    assert len({call.body for call in pool.calls}) == 1
    assert len(pool.calls) == (1 if moment is dies_after else 2)


ABORTS = {
    "chat": [event({"id": "a", "created": 1, "choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}), DONE],
    "completion": [event({"id": "a", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}), DONE],
    "messages": [
        event({"type": "message_delta", "delta": {"stop_reason": None}}, "message_delta"),
        event({"type": "message_stop"}, "message_stop"),
    ],
}
ERRORS = {
    "chat": [event({"error": {"message": "engine dead", "type": "InternalServerError", "code": 500}}), DONE],
    "completion": [event({"error": {"message": "engine dead", "code": 500}}), DONE],
    "messages": [event({"type": "error", "error": {"type": "internal_error", "message": "engine dead"}}, "error")],
}


@pytest.mark.parametrize("ways", [ABORTS, ERRORS], ids=["aborts", "reports an error"])
@pytest.mark.parametrize("name", ABORTS)
def test_stream_that_its_server_gives_up_in_order_is_the_undisturbed_one(
    pool: ScriptedPool, name: str, ways: dict[str, list[bytes]]
) -> None:
    form, write = FORMS[name]
    undisturbed = write(UNITS, [1], 1)
    in_turn(pool, serves([*undisturbed[:4], *ways[name]]), serves(write(UNITS, [2, 3, 1], 2)))

    answer = ask(pool, PATHS[name])

    assert answer.is_whole
    assert folded(renamed(answer.body), form) == folded(b"".join(undisturbed), form)
    assert len(pool.calls) == 2


def test_sampled_stream_that_its_server_gives_up_has_no_clean_end(pool: ScriptedPool) -> None:
    had = chat(UNITS, [1], 1)[:4]
    pool.on(serves([*had, *ABORTS["chat"]]))

    answer = ask(pool, temperature=1)

    assert "aborted" in error_of(answer)
    assert b'"abort"' not in answer.body

    pool.on(serves([*had, *ERRORS["chat"]]))

    answer = ask(pool, temperature=1)

    assert (answer.body, answer.is_whole) == (b"".join([*had, *ERRORS["chat"]]), True)


def test_stream_keeps_its_ids_and_the_client_sees_no_usage_that_it_did_not_ask_for(pool: ScriptedPool) -> None:
    undisturbed = chat(UNITS, [1], 1)
    in_turn(pool, dies_after(undisturbed[:5]), serves(chat(UNITS, [2], 2)))

    answer = ask(pool, stream_options=None)

    found = folded(answer.body)
    assert (found["ids"], found["usage"], answer.is_whole) == ({("chatcmpl-s1", 1)}, [], True)
    assert found["content"] == folded(b"".join(undisturbed))["content"]


@pytest.mark.parametrize("deaths", [2, 3, 4])
def test_stream_outlives_the_deaths_of_as_many_servers_as_a_request_may_move(pool: ScriptedPool, deaths: int) -> None:
    undisturbed = chat(UNITS, [1], 1)
    counts = (3, 5, 2, 7)[:deaths]
    in_turn(pool, *(dies_after(chat(UNITS, [1], 1)[:count]) for count in counts), serves(chat(UNITS, [3], 1)))

    answer = ask(pool)

    assert len(pool.calls) == min(4, deaths + 1)
    if deaths < 4:
        assert answer.is_whole
        assert folded(answer.body) == folded(b"".join(undisturbed))
    else:
        assert "moved 3 times" in error_of(answer)


def test_stream_that_continues_on_a_busy_server_waits_for_its_room(pool: ScriptedPool) -> None:
    undisturbed = chat(UNITS, [1], 1)
    in_turn(
        pool,
        dies_after(undisturbed[:4]),
        lambda call: call.send(whole(b"full", 503, "retry-after: 1")),
        serves(chat(UNITS, [1], 2)),
    )

    answer = ask(pool)

    assert folded(renamed(answer.body)) == folded(b"".join(undisturbed))
    assert answer.is_whole


def test_stream_of_a_client_of_http_1_0_is_continued(pool: ScriptedPool) -> None:
    undisturbed = chat(UNITS, [1], 1)
    in_turn(pool, dies_after(undisturbed[:4]), serves(chat(UNITS, [2], 2)))
    body = chat_body(**ALIKE)

    with pool.client() as client:
        client.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        client.head()
        assert folded(renamed(client.rest())) == folded(b"".join(undisturbed))


SAMPLED: dict[str, dict[str, Any]] = {
    "no temperature": {"temperature": None},
    "a temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_text_ends_with_an_error(pool: ScriptedPool, sampling: dict[str, Any]) -> None:
    undisturbed = chat(UNITS, [1], 1)
    in_turn(pool, dies_after(undisturbed[:3]), serves(chat(UNITS, [1], 2)))

    answer = ask(pool, **sampling)

    assert "sampled" in error_of(answer)
    assert answer.body.startswith(b"".join(undisturbed[:3]))
    assert len(pool.calls) == 1


@pytest.mark.parametrize("count", [0, 1])
def test_sampled_stream_without_text_begins_on_another_server(pool: ScriptedPool, count: int) -> None:
    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:count]), serves(chat(UNITS, [1], 2)))

    answer = ask(pool, temperature=1)

    assert folded(renamed(answer.body)) == folded(b"".join(chat(UNITS, [1], 1)))
    assert answer.is_whole


def test_sampled_text_with_a_seed_is_continued(pool: ScriptedPool) -> None:
    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:4]), serves(chat(UNITS, [1], 2)))

    assert folded(renamed(ask(pool, temperature=1, seed=7).body)) == folded(b"".join(chat(UNITS, [1], 1)))


UNFIT: dict[str, tuple[Script, str]] = {
    "another text": (serves(chat([("reasoning", "Lex"), *UNITS[1:]], [1], 2)), "differs"),
    "another field": (serves(chat(UNITS[3:], [1], 2)), "differs"),
    "an early end": (serves([*chat(UNITS, [1], 2)[:2], DONE]), "ends before"),
    "an early end without an event": (serves(chat(UNITS, [1], 2)[:2]), "ends before"),
    "an error event": (serves([event({"error": {"message": "x"}}), DONE]), "reports an error"),
    "no JSON": (serves([b"data: x\n\n"]), "cannot be read"),
    "a refusal": (lambda call: call.send(whole(b'{"error":"no"}', 400)), "400"),
    "a large refusal": (lambda call: call.send(whole(b"x" * 100_000, 400)), "400"),
    "an answer that is no stream": (lambda call: call.send(whole(b'{"choices":[]}')), "200"),
}


@pytest.mark.parametrize("script", UNFIT.values(), ids=UNFIT.keys())
def test_stream_ends_with_an_error_when_the_other_server_does_not_repeat_it(
    pool: ScriptedPool, script: tuple[Script, str]
) -> None:
    had = chat(UNITS, [1], 1)[:4]
    second, why = script
    in_turn(pool, dies_after(had), second)

    answer = ask(pool)

    assert why in error_of(answer)
    *_, last, _ = answer.body.split(b"\n\n")
    assert answer.body == b"".join(had) + last + b"\n\n"


def test_stream_that_no_server_continues_ends_with_an_error(pool: ScriptedPool) -> None:
    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:4]), Call.reset)

    assert error_of(ask(pool))
    assert len(pool.calls) >= 2


def test_stream_that_is_too_long_to_be_kept_ends_with_an_error(pool: ScriptedPool) -> None:
    long = [("content", "x" * 100_000)] * 45
    in_turn(pool, dies_after(chat(long, [1], 1)[:-3]), serves(chat(long, [1], 2)))

    assert "4194304 bytes" in error_of(ask(pool))
    assert len(pool.calls) == 1


def test_client_that_leaves_while_its_stream_is_continued_ends_it(pool: ScriptedPool) -> None:
    began, left = Event(), Event()

    def second(call: Call) -> None:
        call.send(stream_head() + chunk(chat(UNITS, [1], 2)[0]))
        began.set()
        call.wait_until_left()
        left.set()

    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:4]), second)
    with pool.client() as client:
        client.ask("POST", CHAT, chat_body(**ALIKE))
        assert began.wait(PATIENCE_S)

    assert left.wait(PATIENCE_S)
    becomes(pool.running, 0.0)


def test_client_that_does_not_read_holds_the_server_that_continues_back(pool: ScriptedPool) -> None:
    text = "x" * 60_000
    units: list[Unit] = [("content", text)] * 600
    events = chat(units, [1], 1)
    found: list[tuple[int, bool]] = []
    held, read = Event(), Event()

    def first(call: Call) -> None:
        call.send(stream_head())
        call.fill(b"".join(map(chunk, events[:8])), 1)
        call.reset()

    def second(call: Call) -> None:
        call.send(stream_head())
        found.append(call.fill(b"".join(map(chunk, events[:-1])), 1))
        held.set()
        assert read.wait(PATIENCE_S)
        if found[0][1]:
            call.fill_on(b"", 0)
        call.send(chunk(DONE) + LAST_CHUNK)

    in_turn(pool, first, second)
    with pool.client(receive_buffer=4096) as client:
        client.ask("POST", CHAT, chat_body(**ALIKE))
        assert held.wait(PATIENCE_S)
        assert found[0][1], "the server was never held back"
        read.set()
        answer = client.answer()

    assert answer.is_whole
    assert folded(answer.body)["content"] == text * 600


def test_continuation_counts_as_a_move_and_its_stream_as_answered(pool: ScriptedPool) -> None:
    moves = "poolgrid_router_migrations_total"
    before = metric(pool.url, moves)
    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:4]), serves(chat(UNITS, [1], 2)))

    assert ask(pool).is_whole
    assert metric(pool.url, moves) == before + 1


def test_only_generated_text_is_continued(pool: ScriptedPool) -> None:
    in_turn(pool, dies_after([event({"any": 1})]), serves([event({"any": 1})]))

    assert "generated text" in error_of(ask(pool, "/v1/odd/stream"))
