"""aider with its default configuration, on its chat mode and with files to edit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "aider-chat"
TIMEOUT_S = 180


def _aider(home, url, *arguments):
    """Run a turn; aider keeps the conversation in a file, from which the next turn restores it."""
    options = ["--model", "openai/tiny", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable"]
    kept = {name: value for name, value in os.environ.items() if "proxy" in name.lower() or name == "PATH"}
    done = subprocess.run(
        [Path(sys.executable).parent / "aider", *options, "--no-show-model-warnings", "--no-browser", *arguments],
        env={
            **kept,
            "HOME": home,
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"rc {done.returncode}: {said[-500:]}"
    assert "Tokens:" in said, said[-500:]
    assert "litellm." not in said, said[-500:]


def check_turns_of_a_conversation(url):
    with tempfile.TemporaryDirectory() as home:
        _aider(home, url, "--chat-mode", "ask", "--message", "Where is the next station?")
        _aider(home, url, "--chat-mode", "ask", "--restore-chat-history", "--message", "And the one after it?")


def check_a_file_to_edit(url):
    with tempfile.TemporaryDirectory() as home:
        Path(home, "station.py").write_text("NAME = 'north'\n")
        _aider(home, url, "--message", "Rename the station.", "station.py")


def check_answers_in_one_piece(url):
    with tempfile.TemporaryDirectory() as home:
        _aider(home, url, "--no-stream", "--chat-mode", "ask", "--message", "Where is the next station?")
