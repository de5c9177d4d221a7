"""CORS without a setting of the router: what a page may do and read is the servers' decision, passed as it is."""

from __future__ import annotations

import pytest

from tests.proxy.pool import ScriptedPool
from tests.proxy.raw_client import CHAT, Answer, chat_body
from tests.proxy.scripted_server import Call, chunk, stream_head, whole

pytestmark = pytest.mark.e2e

PAGE = "https://page.example"
ORIGIN = f"origin: {PAGE}"
ASKS = ("access-control-request-method: POST", "access-control-request-headers: authorization, content-type")
CORS = (
    f"access-control-allow-origin: {PAGE}",
    "access-control-allow-credentials: true",
    "access-control-expose-headers: x-a, x-b",
    "vary: Origin, Accept-Encoding",
)


def cors_of(answer: Answer) -> list[str]:
    return [
        f"{name}: {value}" for name, value in answer.headers if name.startswith("access-control-") or name == "vary"
    ]


@pytest.mark.parametrize("target", [CHAT, "/v1/models", "/v1/audio/transcriptions", "/v1/odd?x=1"])
@pytest.mark.parametrize("status", [200, 204, 400])
def test_preflight_is_asked_of_a_server_and_answered_by_it(pool: ScriptedPool, target: str, status: int) -> None:
    pool.on(lambda call: call.send(whole(b"" if status == 204 else b"said", status, *CORS, kind="text/plain")))

    answer = pool.call("OPTIONS", target, None, ORIGIN, *ASKS)

    assert (answer.status, cors_of(answer)) == (status, list(CORS))
    call = pool.only_call()
    assert (call.method, call.target, call.header("origin")) == ("OPTIONS", target, PAGE)
    assert call.header("access-control-request-method") == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_headers_of_the_server_pass_once(pool: ScriptedPool, stream: bool) -> None:
    def script(call: Call) -> None:
        call.send(
            stream_head(*CORS) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" if stream else whole(b"{}", 200, *CORS)
        )

    pool.on(script)

    answer = pool.post(CHAT, chat_body(stream=stream), ORIGIN)

    assert (answer.status, cors_of(answer)) == (200, list(CORS))


def test_list_of_models_has_the_headers_of_a_server(pool: ScriptedPool) -> None:
    for each in pool.servers:
        each.list_headers = CORS

    try:
        answer = pool.call("GET", "/v1/models", None, ORIGIN)
    finally:
        for each in pool.servers:
            each.list_headers = ()

    assert (answer.status, cors_of(answer)) == (200, list(CORS))
    assert [any(call.header("origin") == PAGE for call in each.lists) for each in pool.servers] == [True, True]


FORMS = (
    "content-type: text/plain",
    "content-type: Multipart/Form-Data; boundary=x",
    "content-type: application/x-www-form-urlencoded",
    "content-type:",
)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("page", [(ORIGIN,), ("sec-fetch-site: cross-site",), ("origin: null",)])
def test_form_of_a_foreign_page_reaches_no_server(pool: ScriptedPool, kind: str, page: tuple[str, ...]) -> None:
    """A browser sends it without asking, so no server could forbid it."""
    answer = pool.post(CHAT, chat_body(), kind, *page)

    assert (answer.status, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert "--cors-allow-origins" in answer.json()["error"]["message"]
    assert pool.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        (ORIGIN, "content-type: application/json"),
        (ORIGIN, "content-type: text/plain", "authorization: Bearer of-a-page"),
        ("content-type: text/plain",),
        ("content-type: multipart/form-data; boundary=x", "sec-fetch-site: same-origin"),
    ],
)
def test_other_requests_reach_a_server(pool: ScriptedPool, headers: tuple[str, ...]) -> None:
    assert pool.post(CHAT, chat_body(), *headers).status == 200


def test_websocket_of_a_foreign_page_reaches_no_server(pool: ScriptedPool) -> None:
    """CORS does not hold for WebSockets."""
    upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA==")

    answer = pool.call("GET", "/v1/realtime?model=tiny", None, ORIGIN, *upgrade)

    assert answer.status == 403
    assert [each for server in pool.servers for each in server.targets if "realtime" in each] == []
