"""A request that loses its worker, seen from outside: one connected trace, and logs in which nothing is said of it that
only its client may know.

A global router, a pool's router, a prefill worker and two decode workers, each its own process, with all logs at their
most talkative. Routers send traces over gRPC, workers over HTTP, to a receiver of the test.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e.processes import Process, becomes, eventually, ready_workers
from tests.otlp_receiver import OtlpReceiver, Received

pytestmark = pytest.mark.e2e

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
UNSAMPLED_TRACE = "a" * 32

MARKER = "XYZZYmarkerXYZZY"
"""In every prompt and in everything else that only a client may know; in no log."""

KEY = "pg-acme" + "1f" * 32
OPERATOR = "pg-ops" + "2e" * 32
WRONG_KEY = "pg-nobody" + "3d" * 32
SALT_SECRET = "4c" * 32

DOCUMENT = {
    "version": 1,
    "mode": "disagg",
    "prefill": {
        "pools": [{"name": "pre", "url": "http://127.0.0.1:1"}],
        "isl_min": 0,
        "isl_max": 32000,
        "isl_resolution": 1,
        "ttft_min_ms": 0,
        "ttft_max_ms": 2000,
        "ttft_resolution": 1,
        "mapping": [["pre"]],
    },
    "decode": {
        "pools": [{"name": "dec", "url": "http://127.0.0.1:2"}],
        "context_length_min": 0,
        "context_length_max": 32000,
        "context_length_resolution": 1,
        "itl_min_ms": 0,
        "itl_max_ms": 60,
        "itl_resolution": 1,
        "mapping": [["dec"]],
    },
}


class Observed:
    """The processes, what they log and what they send."""

    def __init__(self, directory: Path, receiver: OtlpReceiver, stack: ExitStack) -> None:
        self.directory = directory
        self.receiver = receiver
        self._stack = stack
        self.router = self._start("router", "router", "--port", "0", "--access-log").wait_ready()
        ingest = self.router.word("ingest")
        self.workers = {
            name: self._start(
                name,
                *(
                    "worker",
                    "--worker-id",
                    name,
                    "--role",
                    role,
                    "--consolidator",
                    ingest,
                    "--served-model-name",
                    "tiny",
                ),
                *("--vocabulary-size", "4096", "--speedup", "0.5"),
            )
            for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
        }
        for worker in self.workers.values():
            worker.wait_ready()
        eventually("every worker is reachable", lambda: len(ready_workers(self.router.url)) == 3)
        document = directory / "pools.json"
        document.write_text(json.dumps(DOCUMENT))
        self.front = self._start(
            "global-router",
            *("global-router", "--port", "0", "--config", str(document), "--access-log"),
            *("--pool-url", f"pre={self.router.url}", "--pool-url", f"dec={self.router.url}"),
            *("--api-keys", str(directory / "keys.json"), "--trace-sample-ratio", "0"),
        ).wait_ready()

    def _start(self, name: str, *arguments: str) -> Process:
        endpoint = self.receiver.http_url if arguments[0] == "worker" else self.receiver.grpc_url
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "POOLGRID_LOG_FORMAT": "json",
            "POOLGRID_LOG_LEVEL": "debug",
        }
        return self._stack.enter_context(
            Process(*arguments, log=self.directory / f"{name}.log", environment=environment)
        )

    def decoding(self) -> list[str]:
        """Return the decode workers that have a request now."""
        rows = httpx.get(f"{self.router.url}/v1/workers").json()["data"]
        return [row["worker_id"] for row in rows if row["running_requests"] and row["role"] == "decode"]

    def stop(self) -> None:
        for process in (self.front, *self.workers.values(), self.router):
            process.stop()

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted(self.directory.glob("*.log"))
            for line in path.read_text().split("\n")
            if line
        ]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    directory = tmp_path_factory.mktemp("observed")
    tenants = {
        "acme": Tenant(keys=(Key(key_file.hash_key(KEY)),)),
        "ops": Tenant(keys=(Key(key_file.hash_key(OPERATOR)),), operator=True),
    }
    (directory / "keys.json").write_bytes(msgspec.json.encode(KeyDocument(1, SALT_SECRET, tenants)))
    with ExitStack() as stack:
        yield Observed(directory, stack.enter_context(OtlpReceiver()), stack)


@dataclass(frozen=True)
class Story:
    """An answer whose worker was killed amid it."""

    killed: str
    said: str


@pytest.fixture(scope="module")
def story(observed: Observed) -> Story:
    """The one request that is traced."""
    return Story(*stream_and_kill(observed))


def ask(observed: Observed, headers: dict[str, str], **body: Any) -> httpx.Response:
    wanted = {"model": "tiny", "max_tokens": 4, **body}
    path = "completions" if "prompt" in body else "chat/completions"
    key = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{observed.front.url}/v1/{path}", json=wanted, headers={**key, **headers}, timeout=60)


def stream_and_kill(observed: Observed) -> tuple[str, str]:
    """Stream a long answer whose decode worker is killed amid it; return who had the request, and the answer."""
    prompt = f"{MARKER} tells a long story. " * 120
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "the-story", **SAMPLED}
    url = f"{observed.front.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["traceresponse"].split("-")[1] == TRACE
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        said = [next(lines) for _ in range(20)]
        # They stand still while they are looked at: the answer cannot end before its worker is found.
        decoders = [observed.workers[name] for name in ("d0", "d1")]
        for worker in decoders:
            worker.signal(signal.SIGSTOP)
        eventually("it is decoded", lambda: len(observed.decoding()) == 1)
        [first] = observed.decoding()
        observed.workers[first].kill()
        for worker in decoders:
            if worker is not observed.workers[first]:
                worker.signal(signal.SIGCONT)
        said += lines
    assert said[-1] == "data: [DONE]"
    return first, "".join(said)


def connected(spans: list[Received]) -> bool:
    """Whether each span's parent, and each span that it is linked to, is one of them, or the client's."""
    known = {CALLER, *(span.span_id for span in spans)}
    return bool(spans) and all(span.parent_id in known and set(span.links) <= known for span in spans)


def outline(spans: list[Received], killed: str) -> tuple[set[tuple[str, str, str]], set[str], bool]:
    """Return who sent something and how, which spans lack their other side's, and whether they are connected."""
    senders = {(span.service, span.instance if span.service == "poolgrid-worker" else "", span.by) for span in spans}
    front = [span for span in spans if span.service == "poolgrid-global-router"]
    legs = [span for span in front if span.name.startswith("leg")]
    asked = [leg for leg in legs if leg.attributes["poolgrid.worker"] != killed]
    asked += [span for span in front if span.name == "select"]
    answered = {span.parent_id for span in spans if span.service != "poolgrid-global-router"}
    lacking = {"" if span.span_id in answered else span.name for span in asked}
    if not any(span.parent_id == CALLER for span in front):
        lacking.add("the root")
    return senders, lacking, connected(spans)


def test_a_request_that_loses_its_worker_amid_its_output_is_one_connected_trace_over_four_processes(
    observed: Observed, story: Story
) -> None:
    killed = story.killed
    other = "d1" if killed == "d0" else "d0"

    senders = {
        ("poolgrid-global-router", "", "grpc"),
        ("poolgrid-router", "", "grpc"),
        ("poolgrid-worker", "p0", "http"),
        ("poolgrid-worker", other, "http"),
    }
    # Each process sends what is its own in its own time, and what there is may be connected before the last has.
    becomes(lambda: outline(observed.receiver.spans(TRACE), killed), (senders, {""}, True))
    spans = observed.receiver.spans(TRACE)

    [root] = [span for span in spans if span.parent_id == CALLER]
    assert (root.name, root.error) == ("text_completion tiny", "")
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.usage.output_tokens"] == 300
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["gen_ai.response.id"] == "the-story"
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < 60
    assert [name for name, _ in root.events] == ["moved"]
    assert root.events[0][1]["poolgrid.worker"] == killed

    of_front = [span for span in spans if span.parent_id == root.span_id]
    assert {"receive", "render and tokenize", "select", "first token", "stream"} <= {span.name for span in of_front}
    legs = [span for span in of_front if span.name.startswith("leg")]
    assert [(leg.name, leg.attributes["poolgrid.worker"], leg.error) for leg in legs] == [
        ("leg prefill", "p0", ""),
        ("leg decode", killed, "worker lost"),
        ("leg prefill", "p0", ""),
        ("leg decode", other, ""),
    ]
    assert legs[2].links == (legs[1].span_id,)

    questions = [span for span in of_front if span.name == "select"]
    choices = [span for span in spans if span.service == "poolgrid-router"]
    assert [span.parent_id for span in choices] == [span.span_id for span in questions]
    for choice in choices:
        assert choice.name == "select"
        assert any(name.startswith("poolgrid.cost.") for name in choice.attributes)
        others = [attributes["poolgrid.worker"] for name, attributes in choice.events if name == "other candidate"]
        assert len(others) == choice.attributes["poolgrid.candidates"] - 1
        assert choice.attributes["poolgrid.worker"] not in others

    works = {span.name for span in spans if span.service == "poolgrid-worker"}
    assert works == {"worker prefill", "prefill", "worker decode", "transfer", "decode"}
    by_leg = {span.parent_id: span for span in spans if span.name.startswith("worker ")}
    assert set(by_leg) == {leg.span_id for leg in legs if leg.attributes["poolgrid.worker"] != killed}
    last = by_leg[legs[3].span_id]
    [transfer] = [span for span in spans if span.name == "transfer" and span.parent_id == last.span_id]
    assert transfer.attributes["poolgrid.kv.moved_bytes"] > 0
    assert all(span.start_ns <= span.end_ns for span in spans)
    assert MARKER not in str(spans)
    assert story.said.count('"finish_reason":"length"') == 1


@pytest.mark.usefixtures("story")
def test_what_nobody_traces_leaves_no_span_and_no_header(observed: Observed) -> None:
    becomes(observed.receiver.trace_ids, {TRACE})
    for headers in ({}, {"traceparent": f"00-{UNSAMPLED_TRACE}-{CALLER}-00"}):
        answer = ask(observed, headers, prompt="short")
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
    assert observed.receiver.trace_ids() == {TRACE}


@pytest.mark.usefixtures("story")
def test_a_bucket_of_a_histogram_names_a_trace_that_fell_into_it(observed: Observed) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0", "authorization": f"Bearer {OPERATOR}"}
    text = httpx.get(f"{observed.front.url}/metrics", headers=accept).text
    found = {
        sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        if family.name == "poolgrid_frontend_time_to_first_token_seconds"
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert found == {TRACE}


@pytest.mark.usefixtures("story")
def test_logs_say_who_and_where_and_nothing_that_only_the_client_may_know(observed: Observed) -> None:
    """Last of the module: it ends the processes, so that all that they say is there."""
    user = {"role": "user", "content": MARKER}
    picture = {"type": "image_url", "image_url": {"url": f"data:{MARKER}"}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": MARKER}}}
    bodies: list[dict[str, Any]] = [
        {"messages": [user], "temperature": MARKER},
        {"messages": [{"role": MARKER, "content": MARKER}]},
        {"messages": [{"role": "user", "content": [picture]}]},
        {"messages": [{"role": "system", "content": MARKER}, user], "stop": [MARKER]},
        {"messages": [user], "tools": [{"type": MARKER}]},
        {"messages": [user], "response_format": schema},
        {"prompt": MARKER, "logit_bias": {MARKER: 1}},
        {"prompt": MARKER * 20_000},
        {"prompt": MARKER, "max_tokens": 10**9},
    ]
    for body in bodies:
        ask(observed, {"x-request-id": "odd"}, **body)
    key = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    httpx.post(f"{observed.front.url}/v1/completions", content=f'{{"prompt": "{MARKER}', headers=key)
    wrong = {"authorization": f"Bearer {WRONG_KEY}", "content-type": "application/json"}
    httpx.post(f"{observed.front.url}/v1/completions", content="{}", headers=wrong)
    httpx.get(f"{observed.front.url}/v1/models?key={KEY}")
    observed.stop()

    lines = observed.lines()
    told = json.dumps(lines)
    for secret in (MARKER, KEY, WRONG_KEY, OPERATOR, SALT_SECRET):
        assert secret not in told
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert {line["process"] for line in lines} == {"router", "global-router", "p0", "d0", "d1"}
    assert {line["worker"] for line in lines if line["process"] == "p0"} == {"p0"}
    [story] = [line for line in lines if line.get("request_id") == "the-story"]
    assert story["logger"] == "poolgrid.server.frontend.traffic"
    assert (story["trace_id"], story["status"], story["osl"], story["tenant"]) == (TRACE, 200, 300, "acme")
    assert any(line.get("pool") == "pre" for line in lines)
