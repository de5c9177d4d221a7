"""OpenCode with its default configuration, a provider of each of its three kinds and one MCP server."""

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

NPM_PACKAGE = "opencode-ai"
TIMEOUT_S = 120


def _command():
    """Return the program, which npm installs as a package of its own for each kind of machine."""
    modules = Path(os.environ["CLIENTS_NPM"], "node_modules")
    for program in sorted(modules.glob("opencode-*/bin/opencode"), key=lambda path: "baseline" not in str(path)):
        if subprocess.run([program, "--version"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0:
            return program
    raise FileNotFoundError(f"no package opencode-* in {modules} has a program that runs here")


@contextmanager
def _project(url, package):
    configuration = {
        "model": "poolgrid/tiny",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "poolgrid": {
                "npm": package,
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {"tiny": {"limit": {"context": 131_072, "output": 400}}},
            }
        },
        "mcp": {"demo": {"type": "local", "command": [sys.executable, str(HERE.parent / "mcp_server.py")]}},
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "opencode.json").write_text(json.dumps(configuration))
        yield directory


def _opencode(project, *arguments):
    """Run a turn and return what it printed."""
    kept = {name: value for name, value in os.environ.items() if "proxy" in name.lower() or name == "PATH"}
    done = subprocess.run(
        [_command(), "run", *arguments],
        env={**kept, "HOME": project, "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"rc {done.returncode}: {done.stderr[-400:]}"
    return done.stdout


def _turns(url, package, choice):
    """Try a turn in which a tool of the MCP server is called, and one more."""
    with forced_calls(url, choice) as passed, _project(passed.url, package) as project:
        session = json.loads(_opencode(project, "--format", "json", "What is the sum?").splitlines()[0])["sessionID"]
        assert "the sum is" in json.dumps(passed.bodies[-1]), "the tool's result goes back to the model"
        assert _opencode(project, "--continue", "And once more?").strip()
        assert len(passed.statuses) >= 4
        assert set(passed.statuses) == {200}, passed.statuses
        row = shown_session(url, session, len(passed.bodies))
        assert "tool" in row["gaps_ms"], row


def check_turns_on_chat(url):
    _turns(url, "@ai-sdk/openai-compatible", {"type": "function", "function": {"name": "demo_add"}})


def check_turns_on_responses(url):
    _turns(url, "@ai-sdk/openai", {"type": "function", "name": "demo_add"})


def check_turns_on_messages(url):
    _turns(url, "@ai-sdk/anthropic", {"type": "tool", "name": "demo_add"})
