"""`poolgrid up --engine-url`: what is asked of servers, and what becomes a pool."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from poolgrid.server.cli import front
from poolgrid.server.cli.fleet import pools_in_front
from poolgrid.server.cli.front import (
    FrontPlan,
    FrontProblem,
    FrontServer,
    ask_all,
    entries_of,
    make_plan,
    settings_later,
)
from poolgrid.server.cli.local_pool import UpSettings
from poolgrid.server.cli.main import app
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.settings import NO_TOKENIZER
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.workers.engines.server.core.server_facts import ServerFacts
from tests.e2e.processes import Process, eventually, metric
from tests.fakes.engine_server.openai import OpenAiServer
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options
from tests.global_router.documents import aggregated
from tests.installed import needs


def server(url: str, **facts: Any) -> FrontServer:
    known: dict[str, Any] = {"kind": "vllm", "model": "m", "model_path": str(TINY_MODEL_PATH), "block_size": 16}
    return FrontServer(url, ServerFacts(**{**known, **facts}))


def planned(*servers: FrontServer, **settings: Any) -> FrontPlan:
    return make_plan(UpSettings(engine_url=tuple(each.url for each in servers), **settings), servers)


def test_servers_of_one_model_become_a_pool_that_the_consolidator_follows() -> None:
    plan = planned(server("http://a"), server("http://b", kind="sglang"), served_model_name="m")

    assert plan.workers == []
    assert plan.arguments == ["--engine-url=http://a", "--engine-url=http://b", "--served-model-name=m"]
    assert (plan.settings.model_path, plan.settings.model_name, plan.what, plan.answered) == (
        TINY_MODEL_PATH,
        "m",
        "1 vLLM server and 1 SGLang server",
        2,
    )
    assert (plan.settings.policy, plan.note) == ("kv", "")


def test_servers_that_may_serve_other_models_later_are_not_bound_to_the_first_ones() -> None:
    plan = planned(server("http://a"))
    assert plan.settings.served_model_name == "m", "the router's tokenizer is that model's"
    assert plan.arguments == ["--engine-url=http://a"]


def test_prompt_and_output_may_have_servers_of_their_own_whose_tokens_pass_no_consolidator() -> None:
    settings = UpSettings(engine_url=("prefill=http://a", "decode=http://b"))
    plan = make_plan(settings, [server("http://a"), server("http://b")])

    (process,) = plan.workers
    urls = [word for word in process.arguments if word.startswith("--engine-url=")]
    assert (process.name, process.count, urls) == (
        "servers",
        2,
        ["--engine-url=prefill=http://a", "--engine-url=decode=http://b"],
    )
    assert process.arguments[:3] == ("worker", "--engine", "server")
    assert plan.arguments == []


def test_roles_with_options_of_their_own_have_processes_of_their_own() -> None:
    settings = UpSettings(engine_url=("prefill=http://a", "decode=http://b"), part_option=("prefill.max-batch-size=8",))
    plan = make_plan(settings, [server("http://a"), server("http://b")])

    assert [process.name for process in plan.workers] == ["servers", "servers-1"]
    decode, prefill = (process.arguments for process in plan.workers)
    assert {"--engine-url=prefill=http://a", "--max-batch-size=8"} <= set(prefill)
    assert "--engine-url=decode=http://b" in decode
    assert "--max-batch-size=8" not in decode


def test_with_events_on_nats_servers_are_followed_by_a_process_of_their_own(tmp_path: Path) -> None:
    nats = {"event_plane": "nats", "nats_url": ("nats://127.0.0.1:4222",)}
    for given in ({"engine_url": ("http://a",)}, {"engine_urls_file": tmp_path / "servers"}):
        plan = make_plan(UpSettings(**given, **nats), [])
        assert plan.arguments == []
        (process,) = plan.workers
        assert any(word.startswith("--engine-url") for word in process.arguments)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ((server("http://a"), server("http://b", model="other")), "differ in their model"),
        (
            (server("http://a"), server("http://b", kind="sglang", block_size=32)),
            "differ in their block size (http://a: 16; http://b: 32); a router's index has one: start them with the "
            "same, vLLM: --block-size N; SGLang: --page-size N",
        ),
    ],
)
def test_what_cannot_be_one_pool_is_refused_with_what_to_do(servers: tuple[FrontServer, ...], words: str) -> None:
    with pytest.raises(FrontProblem) as caught:
        planned(*servers)
    assert words in str(caught.value)


def test_servers_that_report_no_block_size_go_with_any_other() -> None:
    assert planned(server("http://a", kind="openai", block_size=None), server("http://b")).answered == 2


def test_without_any_events_the_router_goes_by_its_own_choices_and_the_line_says_what_makes_it_exact() -> None:
    silent = [server(f"http://{name}", events_missing="it publishes none: set X") for name in "ab"]

    plan = planned(*silent)
    assert plan.settings.policy == "approximate"
    assert "\n" not in plan.note
    assert "--kv-events-config" in plan.note
    assert "--enable-prompt-tokens-details" in plan.note
    assert "--model-path" not in plan.note
    assert planned(*silent, policy="round-robin").settings.policy == "round-robin"
    told = tuple(f"worker.kv-events-endpoint=tcp://{name}:5557" for name in "ab")
    exact = planned(*silent, part_option=told)
    assert (exact.settings.policy, exact.note) == ("kv", "")
    assert exact.arguments[-2:] == [each.replace("worker.", "--") for each in told]
    # One server that publishes is routed to by its events; the other is found out.
    assert planned(silent[0], server("http://c")).settings.policy == "kv"


def test_without_a_tokenizer_the_router_goes_by_text_and_the_line_names_the_option() -> None:
    plan = planned(server("http://a", model_path="/models/elsewhere"))
    assert plan.settings.model_path == NO_TOKENIZER
    assert "text of prompts" in plan.note
    assert "--model-path" in plan.note
    assert "--kv-events-config" not in plan.note, "its events are followed"
    given = planned(server("http://a", model_path="/models/elsewhere"), model_path=TINY_MODEL_PATH)
    assert (given.settings.model_path, given.note) == (TINY_MODEL_PATH, "")
    other = planned(server("http://a", kind="openai", model_path="", events_missing="it reports nothing"))
    assert "start" not in other.note, "no flag makes such a server publish"


def test_a_hub_name_is_looked_for_on_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)

    plan = planned(server("http://a", model_path="Qwen/Qwen3-8B"))
    assert (plan.settings.model_path, plan.settings.served_model_name, plan.note) == (snapshot, "m", "")
    assert planned(server("http://a", model_path="Qwen/Other")).settings.model_path == NO_TOKENIZER


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_url": ("http://a",), "workers": 2},
        {"engine_url": ("http://a",), "engine": "trtllm", "model_path": TINY_MODEL_PATH},
        {"engine_url": ("http://a",), "kv_block_size": 16},
        {"engine_url": ("prefill=http://a",)},
        {"engine_urls_file": Path("servers"), "decode": 1},
    ],
)
def test_options_of_workers_of_ours_do_not_go_with_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"with engine_url|no decode=URL"):
        UpSettings(**wrong)


THREE_POOLS = load_document(json.dumps(aggregated())).document


def test_each_pool_of_a_fleet_gets_its_own_servers_and_clients_come_to_the_global_router(tmp_path: Path) -> None:
    urls = ("a=http://a:1", "b=http://b:1", "c=prefill=http://c:1", "c=decode=http://c:2", "a=dns+http://a:2")
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    common: dict[str, Any] = {"pools": tmp_path / "keys.json", "engine_url": urls, "host": "0.0.0.0", "port": 8000}

    for given, host in (({}, "0.0.0.0"), ({"api_keys": keys, "data_dir": tmp_path}, "127.0.0.1")):
        own = pools_in_front(UpSettings(**common, **given), THREE_POOLS)

        assert list(own) == ["a", "b", "c"]
        assert own["a"].engine_url == ("http://a:1", "dns+http://a:2")
        assert own["c"].backends() == {"aggregated": [], "prefill": ["http://c:1"], "decode": ["http://c:2"]}
        for name, each in own.items():
            assert (each.pools, each.port, each.api_keys, each.host) == (None, 0, None, host)
            assert each.data_dir == (tmp_path / name if given else None)


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (("a=http://a:1", "b=http://b:1"), "engine_url has none of c"),
        (("a=http://a:1", "b=http://b:1", "c=http://c:1", "d=http://d:1"), "engine_url names d"),
    ],
)
def test_every_pool_of_a_fleet_and_no_other_needs_a_server(tmp_path: Path, urls: tuple[str, ...], said: str) -> None:
    (tmp_path / "pools.json").write_text("{}")
    settings = UpSettings(pools=tmp_path / "pools.json", engine_url=urls)

    with pytest.raises(ValueError, match=f"{said}.*for each pool of the document: a, b, c"):
        pools_in_front(settings, THREE_POOLS)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engine_url": ("http://a:1",)}, "name its pool, as POOL=URL"),
        ({"engine_url": ("a=gpu1:8000",)}, "allowed are http://HOST"),
        ({"engine_url": ("a=prefill=http://a:1", "b=decode=http://b:1")}, "no decode=URL"),
        ({"engine_url": ("a=encode=http://a:1",)}, "has encode=URL"),
        ({"engine_url": ("a=http://a:1",), "engine_urls_file": Path("servers")}, "as engine_url POOL=URL"),
        ({"engine_url": ("a=http://a:1",), "workers": 2}, "with engine_url"),
    ],
)
def test_servers_of_a_fleet_are_named_with_their_pool(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    (tmp_path / "pools.json").write_text("{}")

    with pytest.raises(ValidationError, match=said):
        UpSettings(pools=tmp_path / "pools.json", **wrong)


def test_a_url_that_is_none_is_refused_and_a_server_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "ANSWER_WAIT_S", 0.1)
    with pytest.raises(ValidationError, match="allowed are http://HOST"):
        UpSettings(engine_url=("gpu1:8000",))
    nowhere = UpSettings(engine_url=("http://127.0.0.1:9",))
    assert asyncio.run(ask_all(nowhere)) == []
    plan = make_plan(nowhere, [])
    assert (plan.answered, plan.settings.model_path, plan.note) == (0, NO_TOKENIZER, "")
    assert plan.arguments == ["--engine-url=http://127.0.0.1:9"]


def test_servers_of_a_file_are_asked_too_and_names_stand_for_nobody_yet(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    settings = UpSettings(engine_url=("http://a:1", "dns+http://b:1"), engine_urls_file=file)
    assert [each.url for each in entries_of(settings)] == ["http://a:1"]
    file.write_text("http://c:1 # third")
    assert [each.url for each in entries_of(settings)] == ["http://a:1", "http://c:1"]
    assert make_plan(settings, []).arguments[-1] == f"--engine-urls-file={file}"


def test_the_first_server_that_answers_later_settles_what_the_router_goes_by() -> None:
    with servers_in_thread(Options(block_size=16, root=str(TINY_MODEL_PATH), publishes=False)) as running:
        settings = UpSettings(engine_url=(running.servers[0].url,))
        later = asyncio.run(settings_later(settings, make_plan(settings, [])))
        assert later is not None
        assert (later.model_path, later.policy, later.served_model_name) == (TINY_MODEL_PATH, "approximate", "tiny")
        answered = make_plan(settings, asyncio.run(ask_all(settings)))
        assert asyncio.run(settings_later(settings, answered)) is None


def test_a_problem_of_the_first_server_is_reported_once_and_what_it_reports_later_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front, "ASK_AGAIN_S", 0.01)
    settings = UpSettings(engine_url=("http://a:1", "http://b:1"))
    found = [[], *[[server("http://a:1", model="m"), server("http://b:1", model="other")]] * 3, [server("http://a:1")]]

    async def ask(_: UpSettings) -> list[FrontServer]:
        return found.pop(0)

    monkeypatch.setattr(front, "ask_all", ask)
    later = asyncio.run(settings_later(settings, make_plan(settings, [])))

    assert (later is not None, found) == (True, [])
    assert caplog.text.count("the servers differ in their model") == 1


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
            for each, worker in zip(
                servers, (each.url.removeprefix("http://").replace(":", "-") for each in servers), strict=True
            ):
                for dp_rank, cache in enumerate(each.caches):
                    eventually(
                        f"the index of {worker}/{dp_rank} is its cache",
                        lambda name=worker, rank=dp_rank, of=cache: held(url, name, rank) == of.names(),  # type: ignore[misc]
                    )
            status, errors = up.stop()
            assert status == 0, errors


def test_a_server_of_which_nothing_is_known_and_no_tokenizer_serve_by_text_from_the_first_request(
    tmp_path: Path,
) -> None:
    """Two servers that report nothing but OpenAI's API; a file names the second while it runs."""
    file = tmp_path / "servers"
    body = {"model": "tiny", "prompt": "The quick brown fox jumps over the lazy dog. " * 20, "max_tokens": 4}
    with servers_in_thread(Options(), Options(), make=OpenAiServer) as running:
        first, second = running.servers
        file.write_text(first.url)
        with Process("up", "--engine-urls-file", str(file), "--port", "0") as up, httpx.Client(timeout=30) as client:
            url = up.wait_ready().url

            def workers() -> set[str]:
                return {row["worker_id"] for row in client.get(f"{url}/v1/workers").json()["data"]}

            def name(of: Any) -> str:
                return str(of.url.removeprefix("http://").replace(":", "-"))

            processes = {words[3] for child in up.descendants() if "poolgrid" in (words := child.cmdline())}
            assert len(up.descendants()) == 2, processes
            assert workers() == {name(first)}
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
            file.write_text(f"{first.url}\n{second.url}\n")
            eventually("the second has joined", lambda: workers() == {name(first), name(second)})
            served = [len(each.bodies) for each in (first, second)]
            for _ in range(6):
                assert client.post(f"{url}/v1/completions", json=body).status_code == 200
            assert [len(each.bodies) for each in (first, second)] == [served[0] + 6, served[1]], (
                "the text is known there"
            )

            with client.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True, "max_tokens": 40}
            ) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data:")
                file.write_text(second.url)
                eventually("the first has left", lambda: name(first) not in workers())
                assert [line for line in lines if line][-1] == "data: [DONE]", "its running stream ends normally"
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
            assert len(second.bodies) == served[1] + 1
            status, errors = up.stop()
            assert status == 0, errors
            assert errors.count("chosen by the text of prompts") == 1


def test_up_is_ready_before_any_server_answers_and_takes_what_the_first_one_reports() -> None:
    with servers_in_thread(Options(block_size=16, root=str(TINY_MODEL_PATH))) as running:
        (late,) = running.servers
        running.do(late.stop())
        with Process("up", "--engine-url", late.url, "--port", "0") as up, httpx.Client(timeout=30) as client:
            url = up.wait_ready().url
            assert client.get(f"{url}/v1/workers").json()["data"] == []
            running.do(late.start())
            body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 4}

            def goes_by_tokens() -> bool:
                return any(str(TINY_MODEL_PATH) in child.cmdline() for child in up.descendants())

            def reuses() -> bool:
                try:
                    answer = client.post(f"{url}/v1/completions", json=body)
                except httpx.TransportError:
                    return False  # the router starts again
                is_served = answer.status_code == 200
                return is_served and bool(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64)

            eventually("the router has started again", goes_by_tokens)
            eventually("it serves", reuses)
            name = late.url.removeprefix("http://").replace(":", "-")
            eventually("the index is the cache", lambda: held(url, name, 0) == late.caches[0].names() != set())
            status, errors = up.stop()
            assert status == 0, errors


@needs("/v1/messages")
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
