"""Every launch script starts its whole chain on the contract fake, answers, and leaves nothing behind."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.e2e.processes import READY_TIMEOUT_S, WAIT_TIMEOUT_S, eventually, metric, pool_is_quiet
from tests.installed import needs_parsers

pytestmark = pytest.mark.e2e

LAUNCH = Path(__file__).parents[2] / "launch"

WORKERS = {
    "agg": 1,
    "agg_router": 2,
    "disagg_router": 3,
    "gpt_oss_disagg": 2,
    "agg_multimodal": 1,
    "epd_multimodal_image_and_embeddings": 3,
}
EPD = "epd_multimodal_image_and_embeddings"
PLANNED_ONLY = ("disagg", "disagg_multimodal", "epd_disagg", "epd_multimodal_image")
"""Scripts that start what another one does, which takes six seconds of CPU: their plans are compared."""
MULTIMODAL = [name for name in WORKERS if "multimodal" in name]
TOKENS = 64
FIXED = {"seed": 7, "temperature": 0, "ignore_eos": True}
WORDS = " ".join(f"word{number}" for number in range(300))


def script_environment(log_dir: Path, **more: str) -> dict[str, str]:
    ours = {"ENGINE": "fake", "PORT": "0", "LOG_LEVEL": "warning", "SERVED_MODEL_NAME": "m", "LOG_DIR": str(log_dir)}
    return {**os.environ, **ours, "POOLGRID": f"{sys.executable} -m poolgrid", **more}


def planned(name: str, log_dir: Path, **environment: str) -> list[dict[str, Any]]:
    """Return the parts that a script would start."""
    command = [str(LAUNCH / f"{name}.sh"), "--dry-run", "--json"]
    done = subprocess.run(
        command, env=script_environment(log_dir, **environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    parts: list[dict[str, Any]] = json.loads(done.stdout)["parts"]
    return parts


class Script:
    """One running launch script."""

    def __init__(self, name: str, **environment: str) -> None:
        self.name = name
        self.log_dir = Path(tempfile.mkdtemp(prefix="poolgrid-test-"))
        # A parent that ignores SIGINT (a shell's background job does) hands that on, and bash cannot trap a signal that
        # was ignored when it began.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._process = self._begin(environment)
        finally:
            signal.signal(signal.SIGINT, before)
        self.url = ""

    def _begin(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(LAUNCH / f"{self.name}.sh")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=script_environment(self.log_dir, **environment),
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], 2 * READY_TIMEOUT_S)
        line = self._process.stdout.readline().decode().split() if readable else []
        assert line[:1] == ["ready"], f"{self.name} did not become ready: {self.stop()}"
        self.url = line[1]
        eventually("all workers are ready", partial(self._has_workers, WORKERS[self.name]))

    def _has_workers(self, count: int) -> bool:
        rows = httpx.get(f"{self.url}/v1/workers").json()["data"]
        return {row["state"] for row in rows} == {"ready"} and len({row["worker_id"] for row in rows}) == count

    def is_settled(self, silent: tuple[str, ...]) -> bool:
        """Whether all that was asked is over, and the router knows what of it is cached, to the last block.

        Events come after the answer. That some blocks are known says nothing: each worker has had a request of its own
        at the start.
        """
        return pool_is_quiet(self.url) and indexes_are_true(self.url, silent)

    def parts(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def commands(self) -> list[list[str]]:
        """The command lines of its parts; some are over before they can be asked."""
        lines = []
        for part in self.parts():
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(part.cmdline())
        return lines

    def chat(self, content: object, max_tokens: int = TOKENS, **more: object) -> httpx.Response:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            **FIXED,
            **more,
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=WAIT_TIMEOUT_S)

    def wait(self) -> int:
        return self._process.wait(WAIT_TIMEOUT_S)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; the exit status and what was said on standard error."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=WAIT_TIMEOUT_S)
        return self._process.returncode, errors.decode()

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for part in self.parts():
                with contextlib.suppress(psutil.NoSuchProcess):
                    part.kill()
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self.log_dir, ignore_errors=True)


@contextlib.contextmanager
def running(name: str, **environment: str) -> Iterator[Script]:
    script = Script(name, **environment)
    try:
        script.wait_ready()
        yield script
    finally:
        script.kill()


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
    return f"{message.get('reasoning_content') or ''}{message.get('content') or ''}"


def indexes_are_true(url: str, silent: tuple[str, ...] = ("encode",)) -> bool:
    """Compare what the router believes of each worker with what the fake engine itself says it holds.

    ``silent`` are roles that publish nothing.
    """
    for row in httpx.get(f"{url}/v1/workers").json()["data"]:
        rank = f"?dp_rank={row['dp_rank']}"
        believed = httpx.get(f"{url}/v1/workers/{row['worker_id']}/blocks{rank}").text
        if row["role"] not in silent and believed != httpx.get(f"{row['http_endpoint']}/blocks{rank}").text:
            return False
    return True


def assert_ends_cleanly(script: Script) -> None:
    parts = script.parts()
    assert len(parts) > WORKERS[script.name], "router and workers"
    status, errors = script.stop()
    assert status == 0, errors
    assert "killing it" not in errors
    assert not [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]


def assert_ends_when_a_part_is_lost(script: Script) -> None:
    """A worker that dies whenever it is started again ends everything, with a line that names it and its log."""
    parts = script.parts()
    assert sum(part.name() == "sleep" for part in parts) == 2, "each engine has a process of its own"

    def has_ended() -> bool:
        found = script.parts()
        parts.extend(found)
        for part in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "--worker-id=worker-1" in part.cmdline():
                    part.kill()
        return script.has_ended

    eventually("the worker is given up", has_ended, 3 * READY_TIMEOUT_S)  # it starts again several times
    status, errors = script.stop()
    assert status == 1
    assert "worker-1 has ended with status -9" in errors
    assert "worker-1.log" in errors
    assert not [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def aggregated_text() -> str:
    """The answer of one aggregated worker, which every other chain must give too."""
    # More words than a pipe holds, before it is ready and at its end.
    with running("agg", TRTLLM_FAKE=json.dumps({"stdout_lines": 2000})) as script:
        text = text_of(script.chat(WORDS))
        eventually("the index is what the engine holds", partial(indexes_are_true, script.url))
        assert_ends_cleanly(script)
        log = (script.log_dir / "worker-0.log").read_text()
        assert log.count("loading a shard") == 2000
        assert log.count("a worker process has ended") == 2000
        return text


def test_every_script_has_a_test() -> None:
    scripts = {path.stem for path in LAUNCH.glob("*.sh")}
    assert scripts - {"lib", "epd"} == {*WORKERS, *PLANNED_ONLY}


@needs_parsers
@pytest.mark.parametrize("name", ["agg_router", "disagg_router", "gpt_oss_disagg"])
def test_a_chain_answers_as_one_worker_does_token_for_token(name: str, aggregated_text: str) -> None:
    with running(name, TRTLLM_FAKE=json.dumps({"leaves_process": name == "agg_router"})) as script:
        assert text_of(script.chat(WORDS)) == aggregated_text
        silent = ("decode",) if name == "disagg_router" else ()
        if "router" in name:
            eventually("the router knows what is cached", partial(script.is_settled, silent))
        again = script.chat(WORDS)
        assert text_of(again) == aggregated_text
        asks_what_agents_ask(script.url)
        if "router" in name:
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        health = httpx.get(f"{script.url}/health").json()
        assert {row["role"] for row in health["served"]} == (
            {"prefill", "decode"} if "disagg" in name else {"aggregated"}
        )
        eventually("the index is what the engines hold", partial(indexes_are_true, script.url, silent))
        if name == "agg_router":
            assert_ends_when_a_part_is_lost(script)
        else:
            assert_ends_cleanly(script)


def asks_what_agents_ask(url: str) -> None:
    """See that the fields work that agents and the documents' clients send on first contact."""
    properties = {"at": {"type": "boolean"}}
    at = {"type": "object", "properties": properties, "required": ["at"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": at}}
    (model,) = (each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"])

    def answer_of(**fields: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, **fields}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, (fields, answer.text)
        return answer.json()

    guided = answer_of(response_format={"type": "json_object"})["choices"][0]["message"]["content"]
    assert isinstance(json.loads(guided), dict)
    assert re.fullmatch("[ab]{3}", answer_of(guided_regex="[ab]{3}")["choices"][0]["message"]["content"])
    required = answer_of(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = required["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) in ({"at": True}, {"at": False})
    ignoring = {"nvext": {"ignore_eos": True}, "chat_template_args": {"reasoning_effort": "low"}, "max_tokens": 9}
    for fields in (
        {"seed": 3, "temperature": 0.7, "max_tokens": 9},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "max_tokens": 9},
        ignoring,
    ):
        assert answer_of(**fields)["usage"]["completion_tokens"] == 9
    health = httpx.get(f"{url}/health").text
    assert '"status":"healthy"' in health
    assert re.search(r'"endpoints":\[[^]]*"dyn://dynamo\.tensorrt_llm\.generate"', health)


def png(color: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(data, "PNG")
    return data.getvalue()


def picture(color: str) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(png(color)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


TEMPLATE = LAUNCH.parent / "engine_configs" / "llava-v1.6-mistral-7b-hf" / "template.jinja"
LOOK = [{"type": "text", "text": WORDS}, picture("red")]


@pytest.fixture(scope="module")
def aggregated_description() -> str:
    """What one aggregated worker says of a picture, which every other chain must say too."""
    with running("agg_multimodal", CUSTOM_TEMPLATE=str(TEMPLATE)) as script:
        text = text_of(script.chat(LOOK))
        assert text_of(script.chat([LOOK[0], picture("blue")])) != text, "what is seen is what was sent"
        assert_ends_cleanly(script)
        return text


def encoded(script: Script) -> float:
    return metric(script.url, "poolgrid_router_legs_total", stage="encode")


@pytest.mark.parametrize("name", [name for name in MULTIMODAL if name != "agg_multimodal"])
def test_a_chain_sees_the_same_picture_as_one_worker(
    name: str, aggregated_description: str, aggregated_text: str, tmp_path: Path
) -> None:
    (tmp_path / "inside.png").write_bytes(png("red"))
    allowed = {"ALLOWED_LOCAL_MEDIA_PATH": str(tmp_path)}
    with running(name, CUSTOM_TEMPLATE=str(TEMPLATE), **allowed) as script:
        assert text_of(script.chat(LOOK)) == aggregated_description
        assert encoded(script) == (1 if name.startswith("epd") else 0)
        local = script.chat([LOOK[0], {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/inside.png"}}])
        assert text_of(local) == aggregated_description
        assert_ends_cleanly(script)


def test_other_scripts_plan_chains_that_are_started_here(tmp_path: Path) -> None:
    template, allowed = {"CUSTOM_TEMPLATE": str(TEMPLATE)}, {"ALLOWED_LOCAL_MEDIA_PATH": str(tmp_path)}
    epd = commands_of(EPD, tmp_path, **template, **allowed)
    local_files = f"--allowed-local-media-path={tmp_path}"
    assert local_files in epd["router"]

    assert commands_of("epd_disagg", tmp_path, **template, **allowed) == epd

    # It has the template by default, and takes no local files, whatever the environment says.
    only_images = commands_of("epd_multimodal_image", tmp_path, **allowed)
    assert only_images == {name: words - {local_files} for name, words in epd.items()}

    # The same without the stage that encodes; both have their template from the script.
    without_encoding = commands_of("disagg_multimodal", tmp_path, **allowed)
    assert differences(without_encoding, epd) == {
        "encode-0": {"only in one"},
        "prefill-0": {"--encode-endpoint=poolgrid.encode.generate"},
    }

    # One prefill worker less, no events, and a router that does not look at caches.
    assert differences(commands_of("disagg", tmp_path), commands_of("disagg_router", tmp_path)) == {
        "router": {"least-loaded", "kv"},
        "prefill-1": {"only in one"},
        "decode-0": {"--no-publish-events-and-metrics"},
    }


def commands_of(name: str, log_dir: Path, **environment: str) -> dict[str, frozenset[str]]:
    """Return the words of each part that a script would start, paths without links and ``..``."""

    def resolved(word: str) -> str:
        option, _, value = word.partition("=")
        return f"{option}={Path(value).resolve()}" if value.startswith("/") else word

    return {part["name"]: frozenset(map(resolved, part["command"])) for part in planned(name, log_dir, **environment)}


def differences(one: dict[str, frozenset[str]], other: dict[str, frozenset[str]]) -> dict[str, set[str]]:
    """Return the words that only one of two plans has, by part."""
    found = {}
    for name in one.keys() | other.keys():
        words = one[name] ^ other[name] if name in one and name in other else {"only in one"}
        if words:
            found[name] = set(words)
    return found


def test_a_script_that_is_interrupted_while_it_starts_leaves_nothing_behind() -> None:
    script = Script("disagg", TRTLLM_FAKE=json.dumps({}))
    try:
        eventually("a part has started", lambda: any("router" in line for line in script.commands()))
        parts = script.parts()
        assert script.stop(signal.SIGINT)[0] == 0
        assert not [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]
    finally:
        script.kill()


@pytest.mark.parametrize(
    ("name", "environment", "status", "word"),
    [
        ("agg", {"ENGINE": "vllm"}, 1, "ENGINE is 'vllm', allowed are trtllm and fake"),
        ("agg", {"ENGINE": "trtllm", "MODEL_PATH": ""}, 1, "MODEL_PATH is not set"),
        ("agg", {"POOLGRID": "no-such-command"}, 1, "no-such-command is not found"),
        ("agg", {"AGG_ENGINE_ARGS": "/nowhere.yaml"}, 2, "/nowhere.yaml: No such file"),
        ("gpt_oss_disagg", {"GPUS": "0,1,2,3"}, 2, "8 GPUs are needed (prefill-0: 4 = TP 4 x PP 1, decode-0: 4"),
        (EPD, {}, 1, "ALLOWED_LOCAL_MEDIA_PATH is not set"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_left(
    name: str, environment: dict[str, str], status: int, word: str
) -> None:
    script = Script(name, **environment)
    try:
        assert script.wait() == status
        assert word in script.stop()[1]
    finally:
        script.kill()
