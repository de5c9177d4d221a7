"""Engines get the token ids of long prompts once theirs were equal, and clients see none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.server.forwarding.prompt_ids import IDS_MIN, PROOFS
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.proxy.withheld_answer import CUT_BYTES_MAX
from tests.e2e.processes import PATIENT, Process, becomes, metric, ready_workers
from tests.proxy.id_engine import IdEngine, answer_of, packed, prompt_of
from tests.proxy.raw_client import CHAT, Answer, RawClient
from tests.proxy.scripted_server import LAST_CHUNK, Call, Script, ScriptedServer, chunk, whole

pytestmark = pytest.mark.e2e

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
LONG = "A cache holds what was computed before. " * (IDS_MIN // 4)
PROMPTS = "poolgrid_frontend_forwarded_prompts_total"


class IdPool:
    """A router in front of one such engine."""

    def __init__(self, up: Process, engine: IdEngine, server: ScriptedServer) -> None:
        self.url, self.engine, self.server = up.url, engine, server

    def post(self, target: str, body: bytes) -> Answer:
        with RawClient(self.url) as client:
            client.ask("POST", target, body)
            return client.answer()

    def prove(self, target: str, body: bytes) -> None:
        """Send what is needed until the next request of the kind goes with ids."""
        for _ in range(PROOFS):
            assert self.post(target, body).status == 200
        self.engine.sent.clear()
        self.server.calls.clear()

    def findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/v1/doctor").json()["models"]
        return found

    def outcomes(self, outcome: str) -> float:
        return metric(self.url, PROMPTS, known_by="tokens", ids=outcome)


@contextmanager
def pool_at(directory: Path, more: Sequence[ScriptedServer] = ()) -> Iterator[IdPool]:
    engine, server = IdEngine(), ScriptedServer(str(TINY_MODEL_PATH))
    servers = [server, *more]
    for each in servers:
        each.script = engine
    fronts = [word for each in servers for word in ("--engine-url", each.url)]
    options = ("--port", "0", "--model-path", str(TINY_MODEL_PATH), *PATIENT)
    try:
        with Process("up", *fronts, *options, log=directory / "log") as up:
            up.wait_ready()
            becomes(lambda: len(ready_workers(up.url)), len(servers))
            yield IdPool(up, engine, server)
            status, errors = up.stop()
            assert status == 0, errors
            assert "this is a bug" not in errors
        assert [error for each in servers for error in each.failures] == []
    finally:
        for each in servers:
            each.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[IdPool]:
    with pool_at(tmp_path) as opened:
        yield opened


def body_of(target: str, **more: Any) -> bytes:
    """Return a body with a long prompt, and spacing and numbers of its own."""
    prompt = {"prompt": LONG} if target == COMPLETIONS else {"messages": [{"role": "user", "content": LONG}]}
    rest = json.dumps({**prompt, "max_tokens": 2, **more})[1:]
    return b'{ "model" :"tiny", "top_p":1.0,  ' + rest.encode()


def without_ids(target: str, sent: bytes) -> bytes:
    """Return a body as it was before ids were cut into it; they are the router's if nothing else is left."""
    ids = packed(prompt_of(json.loads(body_of(target))))
    if target == COMPLETIONS:
        assert sent.count(ids) == 1
        return sent.replace(ids, json.dumps(LONG).encode())
    cut = b'"kv_transfer_params":{"prompt_token_ids":' + ids + b"},"
    assert sent.count(cut) == 1
    return sent.replace(cut, b"")


def test_ids_go_along_once_the_engine_has_made_the_same_and_answers_stay_equal(pool: IdPool) -> None:
    for target in (CHAT, COMPLETIONS):
        for is_streamed in (False, True):
            more = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
            body = body_of(target, **more)
            pool.engine.sent.clear()
            pool.server.calls.clear()
            ids = prompt_of(json.loads(body))
            assert len(ids) >= IDS_MIN
            _, _, plain = answer_of(target, json.loads(body), ids, shows_ids=False).partition(b"\r\n\r\n")

            answers = [pool.post(target, body) for _ in range(PROOFS + 2)]

            assert pool.engine.kinds() == ["checked"] * PROOFS + ["ids"] * 2
            for answer in answers:
                framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body) if is_streamed else answer.body
                assert framed == plain
                assert answer.header("content-length") == (None if is_streamed else str(len(plain)))
            assert without_ids(target, pool.server.calls[-1].body) == body
            (asked,) = {call.body for call in pool.server.calls[:PROOFS]}
            assert asked.replace(b'"return_token_ids":true,', b"") == body
    assert pool.outcomes("equal") == 4 * PROOFS
    assert pool.outcomes("sent") == 8
    assert pool.findings() == []


def test_usage_and_ids_that_were_both_asked_for_are_out_of_a_stream(pool: IdPool) -> None:
    body = body_of(CHAT, stream=True)
    ids = prompt_of(json.loads(body))
    _, _, plain = answer_of(CHAT, json.loads(body), ids, shows_ids=False).partition(b"\r\n\r\n")

    for _ in range(PROOFS + 1):
        answer = pool.post(CHAT, body)
        assert b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body) == plain
    assert pool.engine.kinds() == ["checked"] * PROOFS + ["ids"]


def test_one_difference_ends_it_for_the_model_and_the_doctor_names_it(pool: IdPool) -> None:
    pool.engine.other_ids = True

    assert pool.post(CHAT, body_of(CHAT)).status == 200
    for target in (CHAT, COMPLETIONS):
        assert pool.post(target, body_of(target)).status == 200

    assert pool.engine.kinds() == ["checked", "text", "text"]
    (found,) = pool.findings()
    assert (found["model"], found["cause"], found["is_fault"]) == ("tiny", "prompt-ids-differ", True)
    assert CHAT in found["evidence"][0]
    assert "id " in found["evidence"][0]
    assert pool.outcomes("different") == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_whose_ids_are_refused_is_answered_as_text(pool: IdPool, is_streamed: bool) -> None:
    body = body_of(CHAT, stream=is_streamed)
    pool.prove(CHAT, body)
    pool.engine.refuses_ids = True

    answer = pool.post(CHAT, body)

    assert (answer.status, answer.is_whole) == (200, True)
    assert b"error" not in answer.body
    assert b"Hi" in answer.body or is_streamed
    assert pool.engine.kinds() == ["ids", "text"]
    assert pool.post(CHAT, body).status == 200
    assert pool.engine.kinds() == ["ids", "text", "text"]
    (found,) = pool.findings()
    assert found["cause"] == "prompt-ids-refused"
    assert "status 400" in found["evidence"][0]
    assert pool.outcomes("refused") == 1


def test_a_request_that_is_refused_as_text_too_gets_that_refusal_and_proves_nothing(pool: IdPool) -> None:
    body = body_of(COMPLETIONS)
    pool.prove(COMPLETIONS, body)
    pool.engine.refuses_all = True

    answer = pool.post(COMPLETIONS, body)

    assert (answer.status, answer.json()["error"]["message"]) == (400, "text")
    pool.engine.refuses_all = False
    assert pool.post(COMPLETIONS, body).status == 200
    assert pool.engine.kinds() == ["ids", "text", "ids"]
    assert pool.findings() == []


CHUNKED = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
BROKEN = [
    pytest.param(lambda call: call.cut(whole(b"{}", 400)[:-1]), id="cut"),
    pytest.param(lambda call: call.send(whole(b"x" * 100_000, 422)), id="long"),
    pytest.param(lambda call: call.send(whole(b"", 413)), id="empty"),
    pytest.param(lambda call: call.send(CHUNKED + chunk(b"x" * 100_000) + LAST_CHUNK), id="long-in-chunks"),
    pytest.param(lambda call: call.cut(CHUNKED + chunk(b"{")), id="cut-in-chunks"),
    pytest.param(lambda call: call.send(CHUNKED + chunk(b"{}") + LAST_CHUNK), id="in-chunks"),
]


@pytest.mark.parametrize("refuse", BROKEN)
def test_a_refusal_of_ids_may_end_in_any_way(refuse: Script, pool: IdPool) -> None:
    body = body_of(CHAT)
    pool.prove(CHAT, body)
    pool.server.script = lambda call: refuse(call) if b"prompt_token_ids" in call.body else pool.engine(call)

    answer = pool.post(CHAT, body)

    assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "Hi")
    assert [b"prompt_token_ids" in call.body for call in pool.server.calls] == [True, False]
    assert [each["cause"] for each in pool.findings()] == ["prompt-ids-refused"]


def test_a_server_that_dies_after_its_refusal_says_nothing_of_ids(tmp_path: Path) -> None:
    other = ScriptedServer(str(TINY_MODEL_PATH))
    with pool_at(tmp_path, [other]) as pool:
        body = body_of(CHAT)
        pool.prove(CHAT, body)
        refusing: list[ScriptedServer] = []

        def script(call: Call) -> None:
            if b"prompt_token_ids" in call.body:
                refusing.append(call.server)
                call.send(whole(b"{}", 400))
            elif call.server in refusing:
                call.cut()
            else:
                pool.engine(call)

        pool.server.script = other.script = script

        answer = pool.post(CHAT, body)

        assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "Hi")
        assert (len(refusing), pool.engine.kinds()) == (1, ["text"])
        assert pool.findings() == []


def test_a_compared_answer_that_its_server_aborts_is_no_answer(tmp_path: Path) -> None:
    other = ScriptedServer(str(TINY_MODEL_PATH))
    with pool_at(tmp_path, [other]) as pool:
        aborting: list[ScriptedServer] = []
        choice = {"index": 0, "message": {"role": "assistant", "content": "H"}, "finish_reason": "abort"}

        def script(call: Call) -> None:
            if not aborting:
                aborting.append(call.server)
                call.send(whole(packed({"id": "c", "choices": [choice], "prompt_token_ids": [1]})))
            else:
                pool.engine(call)

        pool.server.script = other.script = script

        answer = pool.post(CHAT, body_of(CHAT))

        assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "Hi")
        assert pool.engine.kinds() == ["checked"]


def test_an_answer_with_ids_that_breaks_off_is_no_answer(pool: IdPool) -> None:
    pool.server.script = lambda call: call.cut(whole(b'{"prompt_token_ids":[1],"choices":[]}')[:-5])

    answer = pool.post(CHAT, body_of(CHAT))

    assert answer.status in (502, 503)
    assert b"prompt_token_ids" not in answer.body


def test_an_answer_beyond_the_bound_reaches_its_client_whole(pool: IdPool) -> None:
    said = packed({"choices": [{"text": "x" * (CUT_BYTES_MAX + 100_000)}]})
    pool.server.script = lambda call: call.send(whole(said))

    answer = pool.post(COMPLETIONS, body_of(COMPLETIONS))

    assert (answer.status, answer.is_whole, answer.body == said) == (200, True, True)


def test_requests_that_cannot_be_proven_or_need_their_text_go_as_they_are(pool: IdPool) -> None:
    bodies = [
        (CHAT, body_of(CHAT, echo=True)),
        (CHAT, body_of(CHAT, kv_transfer_params={})),
        (CHAT, body_of(CHAT, return_token_ids=False)),
        (CHAT, body_of(CHAT, tools=[], tool_choice="none")),
        (CHAT, body_of(CHAT, x_vendor=1)),
        (COMPLETIONS, body_of(COMPLETIONS, prompt=[LONG, LONG])),
        (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"short"}]}'),
        (MESSAGES, body_of(MESSAGES)),  # no cache events show what the engine made of it
    ]
    for target, body in bodies:
        for _ in range(PROOFS + 1):
            pool.server.calls.clear()
            pool.post(target, body)
            assert [call.body for call in pool.server.calls] == [body]
