"""`poolgrid up --engine-url`: what is asked of servers, and what becomes a pool."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from poolgrid.cli.front import FrontPlan, FrontProblem, FrontServer, ask_all, make_plan
from poolgrid.cli.local_pool import UpSettings
from poolgrid.cli.main import app
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.workers.engines.server.core.server_facts import ServerFacts
from tests.e2e.processes import Process, eventually, metric
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options


def server(url: str, role: str = "aggregated", **facts: Any) -> FrontServer:
    known: dict[str, Any] = {"kind": "vllm", "model": "m", "model_path": str(TINY_MODEL_PATH), "block_size": 16}
    return FrontServer(url, role, ServerFacts(**{**known, **facts}))


def planned(*servers: FrontServer, **settings: Any) -> FrontPlan:
    return make_plan(UpSettings(engine_url=tuple(each.url for each in servers), **settings), servers)


def test_servers_of_one_model_become_a_pool() -> None:
    plan = planned(server("http://a"), server("http://b", kind="other"), served_model_name="m")

    assert [worker.name for worker in plan.workers] == ["vllm-0", "other-0"]
    assert plan.workers[0].arguments[:7] == (
        *("worker", "--engine", "vllm", "--worker-id", "vllm-0", "--engine-url", "http://a"),
    )
    assert (plan.settings.model_path, plan.settings.model_name, plan.what) == (
        TINY_MODEL_PATH,
        "m",
        "1 vllm server and 1 other server",
    )
    assert plan.settings.policy == "kv"
    assert plan.notes == ()


def test_prompt_and_output_may_have_servers_of_their_own() -> None:
    settings = UpSettings(engine_url=("prefill=http://a", "decode=http://b"))
    plan = make_plan(settings, [server("http://a", "prefill"), server("http://b", "decode")])

    (process,) = plan.workers
    urls = [word for word in process.arguments if word.endswith(("//a", "//b"))]
    assert (process.name, process.count, urls) == ("vllm", 2, ["prefill=http://a", "decode=http://b"])


def test_one_process_has_the_workers_of_all_servers_of_a_kind() -> None:
    plan = planned(*(server(f"http://{name}") for name in "abcd"))

    (process,) = plan.workers
    assert (process.count, process.arguments.count("--engine-url")) == (4, 4)
    assert process.arguments[process.arguments.index("--worker-id") + 1] == "vllm"


def test_roles_with_options_of_their_own_have_processes_of_their_own() -> None:
    settings = UpSettings(engine_url=("prefill=http://a", "decode=http://b"), part_option=("prefill.max-batch-size=8",))
    plan = make_plan(settings, [server("http://a", "prefill"), server("http://b", "decode")])

    assert [process.name for process in plan.workers] == ["vllm-prefill-0", "vllm-decode-0"]
    assert "--max-batch-size=8" in plan.workers[0].arguments
    assert "--max-batch-size=8" not in plan.workers[1].arguments


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ((server("http://a"), server("http://b", model="other")), "differ in their model"),
        (
            (server("http://a"), server("http://b", kind="sglang", block_size=32)),
            "differ in their block size (http://a: 16; http://b: 32); a router's index has one: start them with the "
            "same, vLLM: --block-size N; SGLang: --page-size N",
        ),
        ((server("http://a", block_size=None),), "kv-block-size=N"),
        ((server("http://a", model_path="org/model"),), "the servers loaded org/model, which is no directory"),
    ],
)
def test_what_cannot_be_one_pool_is_refused_with_what_to_do(servers: tuple[FrontServer, ...], words: str) -> None:
    with pytest.raises(FrontProblem) as caught:
        planned(*servers)
    assert words in str(caught.value)


def test_a_block_size_that_was_given_stands_in_for_one_that_is_not_told() -> None:
    plan = planned(server("http://a", block_size=None), part_option=("worker.kv-block-size=64",))

    assert plan.settings.kv_block_size == 64


def test_without_any_events_the_router_goes_by_its_own_choices() -> None:
    silent = [server(f"http://{name}", events_missing="it publishes none: set X") for name in "ab"]

    plan = planned(*silent)
    assert plan.settings.policy == "approximate"
    assert "it publishes none: set X" in plan.notes[0]
    assert planned(*silent, policy="round-robin").settings.policy == "round-robin"
    told = tuple(f"worker.kv-events-endpoint=tcp://{name}:5557" for name in "ab")
    exact = planned(*silent, part_option=told)
    assert (exact.settings.policy, exact.notes) == ("kv", ())
    assert exact.workers[0].arguments[-2:] == tuple(each.replace("worker.", "--") for each in told)
    # One server that publishes is routed to by its events; the other is found out.
    assert planned(silent[0], server("http://c")).settings.policy == "kv"


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_url": ("http://a",), "workers": 2},
        {"engine_url": ("http://a",), "engine": "trtllm", "model_path": TINY_MODEL_PATH},
        {"engine_url": ("http://a",), "kv_block_size": 16},
        {"engine_url": ("prefill=http://a",)},
    ],
)
def test_options_of_workers_of_ours_do_not_go_with_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"with engine_url|no decode=URL"):
        UpSettings(**wrong)


def test_a_server_that_does_not_answer_in_time_or_is_none_is_named() -> None:
    nowhere = UpSettings(engine_url=("http://127.0.0.1:9",), start_timeout_ms=200)
    with pytest.raises(FrontProblem, match=r"engine_url http://127.0.0.1:9: no answer within"):
        asyncio.run(ask_all(nowhere))
    with pytest.raises(FrontProblem, match="allowed are http://HOST"):
        asyncio.run(ask_all(UpSettings(engine_url=("gpu1:8000",))))


def held(url: str, worker: str, dp_rank: int) -> set[int]:
    """What the router believes of a rank."""
    lines = httpx.get(f"{url}/v1/workers/{worker}/blocks", params={"dp_rank": dp_rank}, timeout=30).text.split("\n")
    return {int(line.split()[0], 16) for line in lines if line}


def test_one_command_goes_in_front_of_what_runs_already() -> None:
    """Two servers, the second one with two ranks behind its URL."""
    with servers_in_thread(*(Options(block_size=16, ranks=ranks) for ranks in (1, 2))) as running:
        servers = running.servers
        fronts = [word for each in servers for word in ("--engine-url", each.url)]
        with Process("up", *fronts, "--port", "0", "--model-path", str(TINY_MODEL_PATH)) as up:
            url = up.wait_ready().url
            body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 4}
            texts = set()

            def reuses_all_that_it_can() -> bool:
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
                texts.add(answer["choices"][0]["text"])
                return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64)

            eventually("the events have come, and all that can be reused is", reuses_all_that_it_can)
            assert len(texts) == 1
            assert metric(url, "poolgrid_router_untrusted_workers") == 0
            ranks: set[str | None] = set()
            for number in range(60):
                other = {**body, "prompt": list(range(200 + 50 * number, 250 + 50 * number))}
                assert httpx.post(f"{url}/v1/completions", json=other, timeout=30).status_code == 200
                ranks = {each.get("x-data-parallel-rank") for each in servers[1].headers}
                if number >= 8 and ranks == {"0", "1"}:
                    break
            assert ranks == {"0", "1"}
            for each, worker in zip(servers, ("vllm-0", "vllm-1"), strict=True):
                for dp_rank, cache in enumerate(each.caches):
                    eventually(
                        f"the index of {worker}/{dp_rank} is its cache",
                        lambda name=worker, rank=dp_rank, of=cache: held(url, name, rank) == of.names(),  # type: ignore[misc]
                    )
            status, errors = up.stop()
            assert status == 0, errors


def test_second_turn_of_claude_code_reuses_what_an_engine_alone_would() -> None:
    """Its first line differs in each request; an engine's own ``/v1/messages`` leaves that line out."""
    system = "You are a coding agent. " * 20
    late = {"role": "system", "content": "The directory is /tmp."}
    first = [{"role": "user", "content": "Where is the next station?"}, late]
    second = [*first, {"role": "assistant", "content": "North."}, {"role": "user", "content": "And the one after it?"}]
    with servers_in_thread(*(Options(block_size=16) for _ in range(2))) as running:
        front, alone = running.servers
        options = ("--port", "0", "--model-path", str(TINY_MODEL_PATH))
        with Process("up", "--engine-url", front.url, *options) as up, httpx.Client(timeout=30) as client:
            url = up.wait_ready().url

            def cached(at: str, turns: list[dict[str, str]], tag: str) -> int:
                line = f"x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=cli; cch={tag};"
                blocks = [{"type": "text", "text": text} for text in (line, system)]
                body = {"model": "tiny", "max_tokens": 4, "system": blocks, "messages": turns}
                return int(client.post(f"{at}/v1/messages", json=body).json()["usage"]["cache_read_input_tokens"])

            assert cached(url, first, "36ee5") == 0
            assert cached(alone.url, first, "36ee5") == 0
            through_poolgrid = cached(url, second, "0aaa9f")
            assert through_poolgrid == cached(alone.url, second, "0aaa9f") > 100
            status, errors = up.stop()
            assert status == 0, errors


def test_a_label_that_does_not_fit_the_events_is_shown_wherever_an_operator_looks() -> None:
    """On the workers' page, in ``top``, by the doctor and on the worker's readiness, not in the log alone."""
    words = "it stores blocks of 16 tokens, and its label has 24"
    with servers_in_thread(Options(block_size=16)) as running:
        options = ("--engine-url", running.servers[0].url, "--model-path", str(TINY_MODEL_PATH))
        with Process("up", "--port", "0", *options, "--part-option", "worker.kv-block-size=24") as up:
            url = up.wait_ready().url
            body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200

            def row() -> Any:
                return httpx.get(f"{url}/v1/workers").json()["data"][0]

            eventually("the worker's row says it", lambda: words in row()["stream"]["fault"])
            ready = httpx.get(f"{row()['http_endpoint']}/ready")
            assert (ready.status_code, words in ready.json()["cache_events_fault"]) == (200, True)
            seen = CliRunner().invoke(app, ["top", "--url", url, "--once"])
            assert "events unfit" in seen.output
            found = CliRunner().invoke(app, ["doctor", "--url", url])
            assert "events-unfit" in found.output
            assert words in " ".join(found.output.split())
