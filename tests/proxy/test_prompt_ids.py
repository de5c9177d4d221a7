"""Engines get the token ids of long prompts once theirs were equal, and clients see none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
import pytest

from poolgrid.server.forwarding.prompt_ids import IDS_MIN, PROOFS
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.proxy.withheld_answer import CUT_BYTES_MAX
from tests.e2e.processes import PATIENCE_MS, Process, becomes, metric, ready_workers
from tests.proxy.id_engine import IdEngine, answer_of, packed, prompt_of
from tests.proxy.raw_client import CHAT, Answer, RawClient
from tests.proxy.scripted_server import LAST_CHUNK, MODEL, Call, Script, ScriptedServer, chunk, whole

pytestmark = pytest.mark.e2e

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
LONG = "A cache holds what was computed before. " * (IDS_MIN // 4)
PROMPTS = "poolgrid_frontend_forwarded_prompts_total"


class IdPool:
    """A router in front of one such engine."""

    def __init__(self, router: Process, servers: list[ScriptedServer]) -> None:
        self.url, self.servers, self.server = router.url, servers, servers[0]
        self.begin()

    def begin(self) -> None:
        self.engine = IdEngine()
        self.answers_by(self.engine)
        for each in self.servers:
            each.calls.clear()

    def answers_by(self, script: Script) -> None:
        for each in self.servers:
            each.script = script

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


class Engines:
    """Engine servers and their consolidator, which routers of some tests share."""

    def __init__(self, count: int) -> None:
        self.servers = [ScriptedServer(str(TINY_MODEL_PATH)) for _ in range(count)]
        urls = [word for each in self.servers for word in ("--engine-url", each.url)]
        ports = ("--ingest-port", "0", "--feed-port", "0", "--query-port", "0", "--http-port", "0")
        self.consolidator = Process("consolidator", *ports, *urls, "--lease-ms", str(PATIENCE_MS))

    def __enter__(self) -> Engines:
        self.consolidator.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.consolidator:
            ended(self.consolidator)
        for each in self.servers:
            each.close()

    @contextmanager
    def pool(self) -> Iterator[IdPool]:
        """A router in front of them, which knows nothing of ids yet."""
        endpoints = (f"--{name}-endpoint={self.consolidator.word(name)}" for name in ("feed", "query"))
        model = ("--model-path", str(TINY_MODEL_PATH), "--served-model-name", MODEL)
        others = ("--policy", "approximate", "--worker-timeout-ms", str(PATIENCE_MS))
        with Process("router", "--port", "0", *endpoints, *model, *others) as router:
            router.wait_ready()
            becomes(lambda: len(ready_workers(router.url)), len(self.servers))
            yield IdPool(router, self.servers)
            ended(router)
        assert [error for each in self.servers for error in each.failures] == []


def ended(process: Process) -> None:
    status, errors = process.stop()
    assert status == 0, errors
    assert "this is a bug" not in errors


@pytest.fixture(scope="module")
def engine() -> Iterator[Engines]:
    with Engines(1) as opened:
        yield opened


@pytest.fixture(scope="module")
def two_engines() -> Iterator[Engines]:
    with Engines(2) as opened:
        yield opened


@pytest.fixture
def pool(engine: Engines) -> Iterator[IdPool]:
    """A pool for tests after which it sends no ids."""
    with engine.pool() as opened:
        yield opened


@pytest.fixture
def pool_of_two(two_engines: Engines) -> Iterator[IdPool]:
    with two_engines.pool() as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_pool(engine: Engines) -> Iterator[IdPool]:
    with engine.pool() as opened:
        yield opened


@pytest.fixture
def lasting_pool(shared_pool: IdPool) -> IdPool:
    """The pool of tests whose requests are of a kind of their own, by the names of their members."""
    shared_pool.begin()
    return shared_pool


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


def test_ids_go_along_once_the_engine_has_made_the_same_and_answers_stay_equal(lasting_pool: IdPool) -> None:
    equal_before, sent_before = lasting_pool.outcomes("equal"), lasting_pool.outcomes("sent")
    for target in (CHAT, COMPLETIONS):
        for is_streamed in (False, True):
            more = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
            body = body_of(target, **more)
            lasting_pool.engine.sent.clear()
            lasting_pool.server.calls.clear()
            ids = prompt_of(json.loads(body))
            assert len(ids) >= IDS_MIN
            _, _, plain = answer_of(target, json.loads(body), ids, shows_ids=False).partition(b"\r\n\r\n")

            answers = [lasting_pool.post(target, body) for _ in range(PROOFS + 2)]

            assert lasting_pool.engine.kinds() == ["checked"] * PROOFS + ["ids"] * 2
            for answer in answers:
                framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body) if is_streamed else answer.body
                assert framed == plain
                assert answer.header("content-length") == (None if is_streamed else str(len(plain)))
            assert without_ids(target, lasting_pool.server.calls[-1].body) == body
            (asked,) = {call.body for call in lasting_pool.server.calls[:PROOFS]}
            assert asked.replace(b'"return_token_ids":true,', b"") == body
    assert lasting_pool.outcomes("equal") - equal_before == 4 * PROOFS
    assert lasting_pool.outcomes("sent") - sent_before == 8
    assert lasting_pool.findings() == []


def test_usage_and_ids_that_were_both_asked_for_are_out_of_a_stream(lasting_pool: IdPool) -> None:
    body = body_of(CHAT, stream=True)
    ids = prompt_of(json.loads(body))
    _, _, plain = answer_of(CHAT, json.loads(body), ids, shows_ids=False).partition(b"\r\n\r\n")

    for _ in range(PROOFS + 1):
        answer = lasting_pool.post(CHAT, body)
        assert b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body) == plain
    assert lasting_pool.engine.kinds() == ["checked"] * PROOFS + ["ids"]


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


def test_a_request_that_is_refused_as_text_too_gets_that_refusal_and_proves_nothing(lasting_pool: IdPool) -> None:
    body = body_of(COMPLETIONS)
    lasting_pool.prove(COMPLETIONS, body)
    lasting_pool.engine.refuses_all = True

    answer = lasting_pool.post(COMPLETIONS, body)

    assert (answer.status, answer.json()["error"]["message"]) == (400, "text")
    lasting_pool.engine.refuses_all = False
    assert lasting_pool.post(COMPLETIONS, body).status == 200
    assert lasting_pool.engine.kinds() == ["ids", "text", "ids"]
    assert lasting_pool.findings() == []


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


def test_a_server_that_dies_after_its_refusal_says_nothing_of_ids(pool_of_two: IdPool) -> None:
    body = body_of(CHAT)
    pool_of_two.prove(CHAT, body)
    refusing: list[ScriptedServer] = []

    def script(call: Call) -> None:
        if b"prompt_token_ids" in call.body:
            refusing.append(call.server)
            call.send(whole(b"{}", 400))
        elif call.server in refusing:
            call.cut()
        else:
            pool_of_two.engine(call)

    pool_of_two.answers_by(script)

    answer = pool_of_two.post(CHAT, body)

    assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "Hi")
    assert (len(refusing), pool_of_two.engine.kinds()) == (1, ["text"])
    assert pool_of_two.findings() == []


def test_a_compared_answer_that_its_server_aborts_is_no_answer(pool_of_two: IdPool) -> None:
    aborting: list[ScriptedServer] = []
    choice = {"index": 0, "message": {"role": "assistant", "content": "H"}, "finish_reason": "abort"}

    def script(call: Call) -> None:
        if not aborting:
            aborting.append(call.server)
            call.send(whole(packed({"id": "c", "choices": [choice], "prompt_token_ids": [1]})))
        else:
            pool_of_two.engine(call)

    pool_of_two.answers_by(script)

    answer = pool_of_two.post(CHAT, body_of(CHAT))

    assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "Hi")
    assert pool_of_two.engine.kinds() == ["checked"]


def test_an_answer_with_ids_that_breaks_off_is_no_answer(lasting_pool: IdPool) -> None:
    lasting_pool.server.script = lambda call: call.cut(whole(b'{"prompt_token_ids":[1],"choices":[]}')[:-5])

    answer = lasting_pool.post(CHAT, body_of(CHAT, metadata={}))

    assert answer.status in (502, 503)
    assert b"prompt_token_ids" not in answer.body


def test_an_answer_beyond_the_bound_reaches_its_client_whole(lasting_pool: IdPool) -> None:
    said = packed({"choices": [{"text": "x" * (CUT_BYTES_MAX + 100_000)}]})
    lasting_pool.server.script = lambda call: call.send(whole(said))

    answer = lasting_pool.post(COMPLETIONS, body_of(COMPLETIONS, metadata={}))

    assert (answer.status, answer.is_whole, answer.body == said) == (200, True, True)


def test_requests_that_cannot_be_proven_or_need_their_text_go_as_they_are(lasting_pool: IdPool) -> None:
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
            lasting_pool.server.calls.clear()
            lasting_pool.post(target, body)
            assert [call.body for call in lasting_pool.server.calls] == [body]
