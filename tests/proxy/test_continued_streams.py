"""A stream whose server dies equals the undisturbed one, or ends with an error that gives the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest
from tokenizers import Tokenizer

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import becomes, metric
from tests.forwarding.answer_streams import DONE, FORMS, Unit, chat, event, folded, renamed
from tests.proxy.pool import ScriptedPool
from tests.proxy.raw_client import CHAT, Answer, chat_body
from tests.proxy.scripted_server import (
    ANSWER,
    LAST_CHUNK,
    PATIENCE_S,
    Call,
    Script,
    chunk,
    serve_plainly,
    stream_head,
    whole,
)

pytestmark = pytest.mark.e2e

PATHS = {"chat": CHAT, "completion": "/v1/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
UNITS: list[Unit] = [
    *(("reasoning", each) for each in ("Let", " me", " think\n")),
    *(("content", each) for each in ("Hel", "lo 안녕", ' "wor', "ld\\", "\n")),
    *(("call0", each) for each in ('{"a', '": 1', "}")),
]
ALIKE: dict[str, Any] = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}


def in_turn(pool: ScriptedPool, *scripts: Script) -> list[Call]:
    """Have calls answered by these scripts one after another, the last one for all further ones; return the calls."""
    calls: list[Call] = []

    def script(call: Call) -> None:
        calls.append(call)
        scripts[min(len(calls), len(scripts)) - 1](call)

    pool.on(script)
    return calls


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


PROMPTS: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}


def body_of(path: str, **more: Any) -> bytes:
    return chat_body(**PROMPTS.get(path, {}), **{**ALIKE, **more})


def ask(pool: ScriptedPool, path: str = CHAT, **more: Any) -> Answer:
    return pool.post(path, body_of(path, **more))


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


WHOLE_ABORTS = {
    CHAT: b'{"id":"a","choices":[{"index":0,"message":{"content":"Hel"},"finish_reason":"abort"}]}',
    "/v1/completions": b'{"id":"a","choices":[{"index":0,"text":"Hel","finish_reason":"abort"}]}',
    "/v1/messages": b'{"id":"a","type":"message","content":[{"type":"text","text":"Hel"}],"stop_reason":null}',
}


@pytest.mark.parametrize(("path", "body"), WHOLE_ABORTS.items())
def test_whole_answer_that_its_server_aborts_is_another_servers_or_does_not_look_whole(
    pool: ScriptedPool, path: str, body: bytes
) -> None:
    def aborts_in_parts(call: Call) -> None:
        data = whole(body)
        call.send(data[:-10])
        assert came.wait(PATIENCE_S)
        call.send(data[-10:])

    in_turn(pool, lambda call: call.send(whole(body)), serve_plainly)
    answer = ask(pool, path, stream=False)
    assert (answer.body, answer.is_whole) == (ANSWER, True)

    came = Event()
    pool.on(aborts_in_parts)
    with pool.client() as client:
        client.ask("POST", path, body_of(path, stream=False))
        answer = client.head()
        came.set()
        assert len(client.rest()) < len(body)


def test_stream_that_each_server_aborts_has_no_clean_end(pool: ScriptedPool) -> None:
    pool.on(serves([*chat(UNITS, [1], 1)[:4], *ABORTS["chat"]]))

    answer = ask(pool)

    # A pool's router ends its own answer, which is the reason in the error of a global router.
    assert ("closed the connection within its answer" if pool.is_global else "aborted") in error_of(answer)
    assert b'"abort"' not in answer.body


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

    moves_max = 4 + pool.is_global  # the last server of a pool's router ends the answer of one of its moves
    assert len(pool.calls) == min(moves_max, deaths + 1)
    if deaths < moves_max:
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


TOKENIZER = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
TEXT = [("content", each) for each in ("Hel", "lo", " wor", "ld")]
"""What the first server samples."""
OTHER_TEXT = [("content", each) for each in ("Hi", " there")]
"""What another one does."""
REST = [("content", each) for each in (" all", "\n", "of", " you")]


def samples(call: Call) -> None:
    """A server that continues a text where it is asked to, and else samples another."""
    body = json.loads(call.body)
    continues = body.get("continue_final_message") or str(body.get("prompt", "")).startswith("hiHel")
    write = FORMS["chat" if call.target == CHAT else "completion"][1]
    serves(write(REST if continues else OTHER_TEXT, [1], 2))(call)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 1, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("name", ["chat", "completion"])
def test_sampled_text_is_continued_from_its_last_character(
    pool: ScriptedPool, name: str, sampling: dict[str, Any]
) -> None:
    path, write = PATHS[name], FORMS[name][1]
    had = write(TEXT, [1], 1)[: 3 if name == "chat" else 2]
    calls = in_turn(pool, dies_after(had), samples)

    asked = {"temperature": None, "max_tokens": 50, **sampling}
    answer = ask(pool, path, **asked)

    whole = write([*TEXT[:2], *REST], [1], 1)
    assert answer.is_whole
    assert folded_text(answer.body) == folded_text(b"".join(whole))
    first, repeated, sent = (json.loads(call.body) for call in calls)
    assert first == repeated
    assert repeated == json.loads(body_of(path, **asked))
    tokens = len(TOKENIZER.encode("Hello", add_special_tokens=False).ids)
    assert sent["max_tokens"] == 50 - tokens
    if name == "chat":
        assert sent["messages"] == [*repeated["messages"], {"role": "assistant", "content": "Hello"}]
        assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
        (usage,) = folded(answer.body)["usage"]
        counts = {"prompt_tokens": 7 - tokens, "completion_tokens": len(REST) + tokens, "total_tokens": 7 + len(REST)}
        assert usage == counts
    else:
        assert sent["prompt"] == "hiHello"


def folded_text(stream: bytes) -> dict[str, Any]:
    """What a client puts together, without the counts."""
    found = folded(renamed(stream))
    return {name: found.get(name) for name in ("content", "text", "role", "finish", "ends", "ids")}


SAMPLED: dict[str, Any] = {"temperature": 1}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NO_TEXT: dict[str, tuple[list[Unit], dict[str, Any], str]] = {
    "tools": (TEXT, {"tools": TOOLS}, "tools"),
    "a stop string": (TEXT, {"stop": ["x"]}, "stop"),
    "log probabilities": (TEXT, {"logprobs": True}, "logprobs"),
    "a penalty": (TEXT, {"frequency_penalty": 0.5}, "frequency_penalty"),
    "a grammar": (TEXT, {"response_format": {"type": "json_object"}}, "response_format"),
    "reasoning": ([("reasoning", "a"), ("reasoning", "b")], {}, "reasoning"),
    "white space": ([("content", " "), ("content", "\n")], {}, "template"),
    "a thought": ([("content", "<think>"), ("content", "a")], {}, "template"),
}


@pytest.mark.parametrize("case", NO_TEXT.values(), ids=NO_TEXT.keys())
def test_sampled_stream_that_is_more_than_text_ends_with_an_error(
    pool: ScriptedPool, case: tuple[list[Unit], dict[str, Any], str]
) -> None:
    units, more, why = case
    had = chat(units, [1], 1)[:3]
    in_turn(pool, dies_after(had), samples)

    answer = ask(pool, **SAMPLED, **more)

    assert why in error_of(answer)
    assert answer.body.startswith(b"".join(had))
    assert len(pool.calls) == 2 + pool.is_global  # the router of the pool asks once more, and so does the global one


@pytest.mark.parametrize("count", [0, 1])
def test_sampled_stream_without_text_begins_on_another_server(pool: ScriptedPool, count: int) -> None:
    in_turn(pool, dies_after(chat(TEXT, [1], 1)[:count]), samples)

    answer = ask(pool, **SAMPLED)

    assert folded(renamed(answer.body)) == folded(b"".join(chat(OTHER_TEXT, [1], 1)))
    assert answer.is_whole


def test_sampled_stream_that_another_server_samples_alike_is_continued_by_it(pool: ScriptedPool) -> None:
    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:7]), serves(chat(UNITS, [1], 2)))

    assert folded(renamed(ask(pool, **SAMPLED).body)) == folded(b"".join(chat(UNITS, [1], 1)))
    assert len(pool.calls) == 2


def test_sampled_text_outlives_the_death_of_the_server_that_continues_it(pool: ScriptedPool) -> None:
    def dies_while_it_continues(call: Call) -> None:
        is_text = b"continue_final_message" in call.body
        dies_after(chat(REST, [1], 2)[:2])(call) if is_text else samples(call)

    had = chat(TEXT, [1], 1)[:3]
    in_turn(pool, dies_after(had), dies_while_it_continues, dies_while_it_continues, samples)

    answer = ask(pool, **SAMPLED)

    assert folded(renamed(answer.body))["content"] == "Hello all" + " all\nof you"
    assert answer.is_whole


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


@pytest.mark.parametrize("is_streamed", [True, False])
def test_request_at_a_server_that_has_left_and_is_silent_is_taken_over(pool: ScriptedPool, is_streamed: bool) -> None:
    """So does vLLM on SIGTERM: it takes no connections, and keeps those of its requests open without a byte."""
    undisturbed = chat(UNITS, [1], 1)
    hung: list[Call] = []

    def hangs(call: Call) -> None:
        if is_streamed:
            call.send(stream_head() + b"".join(map(chunk, undisturbed[:4])))
        call.server.stop_listening(call)
        hung.append(call)
        call.wait_until_left()

    second = serves(chat(UNITS, [2], 2)) if is_streamed else serve_plainly
    in_turn(pool, hangs, second)
    try:
        answer = ask(pool, stream=is_streamed)
    finally:
        hung[0].server.listen_again()

    assert answer.is_whole
    if is_streamed:
        assert folded(renamed(answer.body)) == folded(b"".join(undisturbed))
    else:
        assert answer.body == ANSWER
    assert len(pool.calls) == 2


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
    before = sum(metric(url, moves) for url in pool.routers)
    in_turn(pool, dies_after(chat(UNITS, [1], 1)[:4]), serves(chat(UNITS, [1], 2)))

    assert ask(pool).is_whole
    assert sum(metric(url, moves) for url in pool.routers) == before + 1


def test_only_generated_text_is_continued(pool: ScriptedPool) -> None:
    in_turn(pool, dies_after([event({"any": 1})]), serves([event({"any": 1})]))

    assert "generated text" in error_of(ask(pool, "/v1/odd/stream"))
