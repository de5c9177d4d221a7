"""Several processes behind one port: together they are one router, also in what they allow a tenant."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from poolgrid.frontend.access import key_file
from poolgrid.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e.fleet_stream import follow_until
from tests.e2e.processes import Process, eventually, metric

pytestmark = pytest.mark.e2e


PER_MINUTE = 20

OPERATOR = {"authorization": "Bearer pg-operator"}

CLIENT = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
"""Sends each request over a connection of its own, which the kernel gives to either process."""


def ask(url: str, key: str = "pg-operator", name: str = "") -> int:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}", **({"x-request-id": name} if name else {})}
    return CLIENT.post(f"{url}/v1/completions", json=body, headers=headers).status_code


def chat_length(url: str, text: str) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    return int(CLIENT.post(f"{url}/tokenize", json=body, headers={"x-api-key": "pg-operator"}).json()["count"])


def completion_length(url: str, text: str) -> int:
    body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
    return int(CLIENT.post(f"{url}/tokenize", json=body, headers={"x-api-key": "pg-operator"}).json()["count"])


def answered(url: str, **more: str) -> str:
    """Return the id of a response that is kept."""
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 2, **more}
    answer = CLIENT.post(f"{url}/v1/responses", json=body, headers={"x-api-key": "pg-operator"})
    return str(answer.raise_for_status().json()["id"])


def shown(url: str, response_id: str) -> int:
    return CLIENT.get(f"{url}/v1/responses/{response_id}", headers={"x-api-key": "pg-operator"}).status_code


def key_document(per_minute: int) -> KeyDocument:
    def keys(key: str) -> tuple[Key, ...]:
        return (Key(key_file.hash_key(key)),)

    limited = Tenant(keys=keys("pg-limited"), requests_per_minute=per_minute, concurrent_requests=50)
    return KeyDocument(1, "5" * 64, {"limited": limited, "ops": Tenant(keys=keys("pg-operator"), operator=True)})


def http_processes(router: Process) -> list[psutil.Process]:
    found = []
    for child in router.descendants():
        # One that was killed is a zombie until its parent has seen it, and then is gone.
        with contextlib.suppress(psutil.Error):
            if "router" in child.cmdline():
                found.append(child)
    return found


def workers_of(url: str) -> list[str]:
    rows = CLIENT.get(f"{url}/v1/workers", headers={"x-api-key": "pg-operator"}).json()["data"]
    return [row["worker_id"] for row in rows if row["state"] == "ready"]


def test_processes_share_a_port_and_limits_answer_for_all_and_are_replaced_when_they_die(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key_file.write(keys, key_document(PER_MINUTE))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    with Process("router", "--port", "0", "--http-workers", "2", "--api-keys", str(keys)) as router:
        router.wait_ready()
        url = router.url
        with Process(
            *("worker", "--worker-id", "w", "--model", "tiny", "--consolidator", router.word("ingest")),
            *("--speedup", "50", "--vocabulary-size", "4096", "--chat-template", str(template)),
        ) as worker:
            worker.wait_ready()
            # Each look is a new connection, which the kernel gives to either process.
            eventually("both processes reach the worker", lambda: all(workers_of(url) == ["w"] for _ in range(12)))
            assert [ask(url, name=f"page-{at}") for at in range(12)] == [200] * 12
            lengths = {chat_length(url, "eighteen letters.!") for _ in range(12)}
            assert lengths == {completion_length(url, "eighteen letters.!")}, "each uses the template of the worker"
            assert metric(url, "poolgrid_router_http_workers") == 2
            assert metric(url, "poolgrid_frontend_requests_total", status="200") == 12
            assert metric(url, "poolgrid_frontend_output_sequence_tokens_count") == 12
            assert metric(url, "poolgrid_router_workers", state="ready") == 1, "a fact of the pool is not counted twice"

            for _ in range(3):  # the page of either process
                follow_until(url, OPERATOR, "the requests of both", lambda _, requests: len(requests) >= 12)
            kept = [CLIENT.get(f"{url}/v1/fleet/requests/page-{at}", headers=OPERATOR) for at in range(12)]
            assert [answer.status_code for answer in kept] == [200] * 12, "what one process keeps, each opens"
            assert all(answer.json()["legs"] for answer in kept)
            about = [CLIENT.get(f"{url}/v1/decisions/page-{at}", headers=OPERATOR) for at in range(12)]
            assert [answer.status_code for answer in about] == [200] * 12, "why each went where it went, too"
            listed = [CLIENT.get(f"{url}/v1/decisions?limit=10", headers=OPERATOR).json()["data"] for _ in range(3)]
            assert all(rows == listed[0] and len(rows) == 10 for rows in listed)
            assert CLIENT.get(f"{url}/v1/decisions/nobody", headers=OPERATOR).status_code == 404

            began = time.monotonic()
            granted = [ask(url, "pg-limited") for _ in range(2 * PER_MINUTE)].count(200)
            assert granted >= PER_MINUTE
            assert granted <= PER_MINUTE + 1 + (time.monotonic() - began) / 60 * PER_MINUTE, "each gave the whole rate"
            refused = metric(url, "poolgrid_frontend_tenant_refusals_total", tenant="limited", code="rate_limited")
            assert refused == 2 * PER_MINUTE - granted

            conversation = [answered(url)]
            for _ in range(8):
                conversation.append(answered(url, previous_response_id=conversation[-1]))
            assert [shown(url, each) for each in conversation] == [200] * 9, "what one process keeps, each finds"

            processes = http_processes(router)
            assert len(processes) == 2
            processes[0].send_signal(signal.SIGKILL)

            def replaced() -> bool:
                others = {child.pid for child in http_processes(router)}
                return len(others) == 2 and processes[0].pid not in others

            eventually("a new process takes its place", replaced)
            eventually("all are ready", lambda: all(CLIENT.get(f"{url}/ready").status_code == 200 for _ in range(12)))
            eventually("all reach the worker", lambda: all(workers_of(url) == ["w"] for _ in range(12)))
            assert [ask(url) for _ in range(8)] == [200] * 8
            granted += [ask(url, "pg-limited") for _ in range(PER_MINUTE)].count(200)
            allowed = PER_MINUTE + 1 + (time.monotonic() - began) / 60 * PER_MINUTE
            assert granted <= allowed, "the new process began with a full bucket"

            key_file.write(keys, key_document(3 * PER_MINUTE))
            eventually(
                "both have read the new limits",
                lambda: metric(url, "poolgrid_frontend_api_key_reloads_total", outcome="loaded") == 2,
            )
            more = [ask(url, "pg-limited") for _ in range(3 * PER_MINUTE)].count(200)
            assert more >= 2 * PER_MINUTE, "what the limit was raised by is there"
            assert granted + more <= 3 * PER_MINUTE + 1 + (time.monotonic() - began) / 20 * PER_MINUTE

            worker.stop()
        below = router.descendants()
        status, errors = router.stop()
        assert status == 0, errors
        assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
