"""The doctor names what forwarded requests show of a model's prompts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import PATIENT, Process, becomes, metric, ready_workers
from tests.proxy.id_engine import packed, prompt_of
from tests.proxy.raw_client import CHAT, RawClient
from tests.proxy.scripted_server import Call, ScriptedServer, serve_plainly, whole

pytestmark = pytest.mark.e2e

FAILS = "{%- if messages[0].content == 'fail' %}{{ raise_exception('no such conversation') }}{% endif %}"
PROMPTS = "poolgrid_frontend_forwarded_prompts_total"


class Pool:
    """A router in front of one server."""

    def __init__(self, url: str, server: ScriptedServer) -> None:
        self.url, self.server = url, server

    def chat(self, content: Any, status: int = 200) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        with RawClient(self.url) as client:
            client.ask("POST", CHAT, packed(body))
            assert client.answer().status == status

    def doctor(self) -> tuple[str, int]:
        """Return what the command prints, and its exit status."""
        command = [sys.executable, "-m", "poolgrid", "doctor", "--url", self.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout, done.returncode


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL_PATH, model)
    config = json.loads((model / "tokenizer_config.json").read_bytes())
    config["chat_template"] = FAILS + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    server = ScriptedServer(str(model))
    options = ("--port", "0", "--model-path", str(model), *PATIENT)
    try:
        with Process("up", "--engine-url", server.url, *options, log=tmp_path / "log") as up:
            up.wait_ready()
            becomes(lambda: len(ready_workers(up.url)), 1)
            yield Pool(up.url, server)
        assert server.failures == []
    finally:
        server.close()


def test_prompts_by_text_are_counted_and_named_with_their_cause_and_what_to_change(pool: Pool) -> None:
    pool.server.script = lambda call: call.send(whole(b'{"id":"c","choices":[]}'))
    for _ in range(5):
        pool.chat("hi")
        pool.chat([{"type": "text", "text": "hi"}, {"type": "vendor_part", "x": 1}])
    for _ in range(4):
        pool.chat("fail")
    pool.chat([{"type": "video_url", "video_url": {"url": "http://127.0.0.1/v.mp4"}}])

    text, status = pool.doctor()

    assert status == 1
    assert "model tiny: by-text-unknown-part" in text
    assert "5 of the last 15 prompts were placed by their text" in text
    assert "messages[0].content[1]" in text
    assert "To change: update poolgrid" in text
    assert "model tiny: by-text-template" in text
    assert "no such conversation" in text
    assert "To change: give the router the model directory" in text
    assert "model tiny: by-text-media" in text
    assert "no fault found" not in text
    assert metric(pool.url, PROMPTS, known_by="tokens") == 5
    assert metric(pool.url, PROMPTS, known_by="unknown-part") == 5
    assert metric(pool.url, PROMPTS, known_by="template") == 4


def test_prompts_that_their_server_refuses_are_no_finding(pool: Pool) -> None:
    pool.server.script = lambda call: call.send(whole(b'{"error":{"message":"no"}}', 400))
    for _ in range(5):
        pool.chat([{"type": "vendor_part"}], status=400)
    pool.server.script = serve_plainly

    text, status = pool.doctor()

    assert (status, "by-text" in text) == (0, False)


def test_prompt_lengths_that_a_server_counts_otherwise_are_named(pool: Pool) -> None:
    def answer(call: Call) -> None:
        count = len(prompt_of(json.loads(call.body))) + 3
        usage = {"prompt_tokens": count, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        call.send(whole(packed({"id": "c", "choices": [], "usage": usage})))

    pool.server.script = answer
    for number in range(8):
        pool.chat(f"number {number} " * (number + 1))

    text, status = pool.doctor()

    assert status == 1
    assert "model tiny: prompt-lengths-differ" in text
    assert "8 of the last 8 prompts" in text
    assert "tokens at the router and" in text
