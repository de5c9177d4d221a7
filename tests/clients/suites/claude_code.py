"""Claude Code with its default configuration, sessions of several turns and one MCP server."""

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

NPM_PACKAGE = "@anthropic-ai/claude-code"
TIMEOUT_S = 180
TURNS = 12
"""The simulated model calls tools at random; a session that runs out of turns has been served all the same."""


@contextmanager
def _home():
    with tempfile.TemporaryDirectory() as directory:
        server = {"command": sys.executable, "args": [str(HERE.parent / "mcp_server.py")]}
        Path(directory, "mcp.json").write_text(json.dumps({"mcpServers": {"demo": server}}))
        yield directory


def _claude(home, url, *arguments, **environment):
    """Run a turn of a session and return its events."""
    command = ["node", Path(os.environ["CLIENTS_NPM"], "node_modules", NPM_PACKAGE, "cli-wrapper.cjs"), "-p"]
    settings = ["--model", "tiny", "--max-turns", str(TURNS), "--output-format", "stream-json", "--verbose"]
    kept = {name: value for name, value in os.environ.items() if "proxy" in name.lower() or name == "PATH"}
    done = subprocess.run(
        [*command, *settings, *arguments],
        env={
            **kept,
            "HOME": home,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            **environment,
        },
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    result = next((event for event in events if event["type"] == "result"), None)
    assert result is not None, f"rc {done.returncode}: {done.stdout[-300:]} {done.stderr[-200:]}"
    assert result["subtype"] in ("success", "error_max_turns"), result
    assert not result.get("is_error") or result["subtype"] == "error_max_turns", result
    return events


def _usage(events):
    return next(event["usage"] for event in events if event["type"] == "result")


def check_turns_of_a_session(url):
    with forced_calls(url) as passed, _home() as home:
        _claude(home, passed.url, "Where is the next station?")
        events = _claude(home, passed.url, "--continue", "And the one after it?")
        _claude(home, passed.url, "--resume", events[-1]["session_id"], "And the last one?")
        assert set(passed.statuses) == {200}, passed.statuses
        roles = {message["role"] for body in passed.bodies for message in body["messages"]}
        assert "system" in roles, roles
        lines = [body["system"][0]["text"] for body in passed.bodies if body.get("system")]
        assert lines[0].startswith("x-anthropic-billing-header:"), lines[0][:60]
        assert _usage(events)["cache_read_input_tokens"] > 10_000, _usage(events)
        shown_session(url, events[-1]["session_id"], len(passed.bodies))


MCP = ("--mcp-config", "mcp.json", "--allowedTools", "mcp__demo__add", "--")


def check_a_search_for_tools(url):
    # By default tools of MCP servers come into a request once the model has searched for them.
    with forced_calls(url, {"type": "tool", "name": "ToolSearch"}) as passed, _home() as home:
        _claude(home, passed.url, *MCP, "What is the sum?")
        assert set(passed.statuses) == {200}, passed.statuses
        assert '"tool_result"' in json.dumps(passed.bodies[1]["messages"])


def check_a_tool_of_an_mcp_server(url):
    choice = {"type": "tool", "name": "mcp__demo__add"}
    with forced_calls(url, choice) as passed, _home() as home:
        events = _claude(home, passed.url, *MCP, "What is the sum?", ENABLE_TOOL_SEARCH="false")
        assert set(passed.statuses) == {200}, passed.statuses
        assert "the sum is" in json.dumps(passed.bodies[1]["messages"]), passed.bodies[1]["messages"][-1]
        row = shown_session(url, events[-1]["session_id"], len(passed.bodies))
        assert "tool" in row["gaps_ms"], row


def check_a_command(url):
    with forced_calls(url, {"type": "tool", "name": "Bash"}) as passed, _home() as home:
        _claude(home, passed.url, "List the files.")
        assert set(passed.statuses) == {200}, passed.statuses
        assert '"tool_result"' in json.dumps(passed.bodies[1]["messages"])
