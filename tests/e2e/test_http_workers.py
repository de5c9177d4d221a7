"""Several processes behind one port: each answers for itself at its admin port."""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e.processes import Process, becomes, eventually, metric
from tests.installed import needs

pytestmark = pytest.mark.e2e


PER_MINUTE = 20

OPERATOR = {"authorization": "Bearer pg-operator"}

CLIENT = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
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


def admin_urls(router: Process) -> list[str]:
    return router.word("admin").split(",")


def total(router: Process, name: str, **labels: str) -> float:
    """Return the sum of a metric over the processes."""
    return sum(metric(url, name, **labels) for url in admin_urls(router))


@needs("/v1/responses")
def test_processes_share_a_port_divide_limits_and_are_replaced_when_they_die(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key_file.write(keys, key_document(PER_MINUTE))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    with Process("router", "--port", "0", "--http-workers", "2", "--api-keys", str(keys)) as router:
        router.wait_ready()
        url = router.url
        with Process(
            *("worker", "--worker-id", "w", "--served-model-name", "tiny", "--consolidator", router.word("ingest")),
            *("--speedup", "50", "--vocabulary-size", "4096", "--chat-template", str(template)),
        ) as worker:
            worker.wait_ready()
            admins = admin_urls(router)
            assert len({url, *admins}) == 3
            eventually("both processes reach the worker", lambda: all(workers_of(each) == ["w"] for each in admins))
            assert [ask(url, name=f"page-{at}") for at in range(12)] == [200] * 12
            lengths = {chat_length(each, "eighteen letters.!") for each in admins}
            assert lengths == {completion_length(url, "eighteen letters.!")}, "each uses the template of the worker"
            becomes(lambda: total(router, "poolgrid_frontend_requests_total", status="200"), 12)  # after the answer
            assert [metric(each, "poolgrid_router_workers", state="ready") for each in admins] == [1, 1]

            for at in range(12):
                known = [CLIENT.get(f"{each}/v1/decisions/page-{at}", headers=OPERATOR).status_code for each in admins]
                assert sorted(known) == [200, 404], "the process that decided explains it"

            began = time.monotonic()
            granted = [ask(url, "pg-limited") for _ in range(4 * PER_MINUTE)].count(200)
            allowed = PER_MINUTE + 2 + (time.monotonic() - began) / 60 * PER_MINUTE
            assert PER_MINUTE / 2 <= granted <= allowed, "each gave more than its part of the rate"
            refusals = partial(total, router, "poolgrid_frontend_tenant_refusals_total", tenant="limited")
            becomes(lambda: refusals(code="rate_limited"), 4 * PER_MINUTE - granted)

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

            def answers(admin: str) -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return CLIENT.get(f"{admin}/ready").status_code == 200
                return False

            eventually("a new process takes its place", replaced)
            eventually("all are ready, at the ports they had", lambda: all(map(answers, admins)))
            eventually("all reach the worker", lambda: all(workers_of(each) == ["w"] for each in admins))
            assert [ask(url) for _ in range(8)] == [200] * 8
            worker.stop()
        below = router.descendants()
        status, errors = router.stop()
        assert status == 0, errors
        assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
