"""Codex CLI with its default configuration, a custom provider and one MCP server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from forced_calls import forced_calls  # noqa: E402 - the environment has the clients and nothing of ours
from shown_sessions import shown_session  # noqa: E402

NPM_PACKAGE = "@openai/codex"
TIMEOUT_S = 180
CONFIGURATION = """
model = "tiny"
model_provider = "poolgrid"

[model_providers.poolgrid]
name = "poolgrid"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "POOLGRID_KEY"

[mcp_servers.demo]
command = "{python}"
args = ["{server}"]
"""


@contextmanager
def _home(url):
    with tempfile.TemporaryDirectory() as directory:
        server = HERE.parent / "mcp_server.py"
        text = CONFIGURATION.format(url=url, python=sys.executable, server=server)
        Path(directory, "config.toml").write_text(text)
        yield directory


def _codex(home, *arguments):
    """Run a turn and return its events."""
    command = Path(os.environ["CLIENTS_NPM"], "node_modules", ".bin", "codex")
    kept = {name: value for name, value in os.environ.items() if "proxy" in name.lower() or name == "PATH"}
    done = subprocess.run(
        [command, "exec", "--json", "--skip-git-repo-check", *arguments],
        env={**kept, "HOME": home, "CODEX_HOME": home, "POOLGRID_KEY": "none"},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"rc {done.returncode}: {done.stdout[-300:]} {done.stderr[-200:]}"
    assert events[-1]["type"] == "turn.completed", events[-1]
    return events


def _items(events, kind):
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def check_turns_of_a_session(url):
    with forced_calls(url) as passed, _home(passed.url) as home:
        first = _codex(home, "Where is the next station?")
        second = _codex(home, "resume", "--last", "And the one after it?")
        assert _items(first, "agent_message")
        assert _items(second, "agent_message")
        assert set(passed.statuses) == {200}, passed.statuses
        kinds = {tool["type"] for tool in passed.bodies[0]["tools"]}
        assert {"function", "namespace", "web_search"} <= kinds, kinds
        assert second[-1]["usage"]["cached_input_tokens"] > 10_000, second[-1]["usage"]
        assert first[0]["thread_id"] == second[0]["thread_id"]
        shown_session(url, first[0]["thread_id"], 2)


def check_a_tool_of_an_mcp_server(url):
    choice = {"type": "function", "namespace": "mcp__demo", "name": "add"}
    with forced_calls(url, choice) as passed, _home(passed.url) as home:
        events = _codex(home, "What is the sum?")
        (call,) = _items(events, "mcp_tool_call")
        assert (call["server"], call["tool"], call["status"]) == ("demo", "add", "completed"), call
        assert "the sum is" in json.dumps(passed.bodies[-1]["input"][-1])
        assert passed.statuses == [200, 200]
        row = shown_session(url, events[0]["thread_id"], 2)
        assert "tool" in row["gaps_ms"], row


def check_a_command(url):
    with forced_calls(url, {"type": "function", "name": "exec_command"}) as passed:
        ran = []
        while not ran and len(passed.statuses) < 10:  # Codex refuses a tenth of what a model writes at random
            with _home(passed.url) as home:
                ran = _items(_codex(home, "List the files."), "command_execution")
        assert ran
        assert passed.statuses in [[200, 200] * turns for turns in range(1, 6)], passed.statuses


def check_a_custom_tool(url):
    with forced_calls(url, {"type": "custom", "name": "exec"}) as passed, _home(passed.url) as home:
        _codex(home, "-c", "features.code_mode=true", "Run something.")
        call, output = passed.bodies[-1]["input"][-2:]
        assert (call["type"], output["type"]) == ("custom_tool_call", "custom_tool_call_output")
        assert passed.statuses == [200, 200]


def check_a_session_that_is_compacted(url):
    with forced_calls(url) as passed, _home(passed.url) as home:
        _codex(home, "Where is the next station?")
        _codex(home, "resume", "--last", "-c", "model_auto_compact_token_limit=2000", "And the one after it?")
        assert passed.statuses == [200, 200, 200]
