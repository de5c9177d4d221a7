"""The first lines of `poolgrid up`: the processes it started, and three commands that show what a router is for.

Rules
    1. Each command works as printed, in a terminal of any width, with keys and without.
    2. Each shows something: of two turns of a conversation the second finds the first one's part cached; the
       explanation names the worker, and in a disaggregated pool the leg that computed the prompt.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from poolgrid.cli.router_client import API_KEY_VARIABLE


def program() -> str:
    """Return how this program was called, so that the commands can be pasted."""
    called = Path(sys.argv[0])
    if called.name != "poolgrid":
        return f"{sys.executable} -m poolgrid"
    found = shutil.which("poolgrid")
    return "poolgrid" if found is not None and Path(found) == called else str(called)


def two_turns(url: str, model: str, keyed: bool) -> str:
    """Return a command that sends two turns of a conversation and prints what was cached of each.

    A turn adds a thousand numbers, a few thousand tokens: more than a decode worker computes by itself.
    """
    authorization = [f'    -H "authorization: Bearer ${API_KEY_VARIABLE}" \\'] if keyed else []
    fields = f'\\"model\\": \\"{model}\\", \\"max_tokens\\": 8'
    lines = [
        "for turn in 1 2; do",
        f"  curl -s {url}/v1/completions \\",
        "    -H 'content-type: application/json' -H \"x-request-id: turn-$turn\" \\",
        *authorization,
        f'    -d "{{{fields}, \\"prompt\\": \\"$(seq -s " " ${{turn}}000)\\"}}" |',
        "    grep -o '\"cached_tokens\":[0-9]*'",
        "done",
    ]
    return "\n".join(lines)


def greeting(what: str, url: str, model: str, keyed: bool, explained: str) -> str:
    """Return the first lines: ``what`` runs at ``url``, what to try, and what the explanation shows.

    ``keyed``: requests need an API key.
    """
    command = program()
    lines = [
        f"Model {model!r} is served at {url}/v1",
        f"by {what}. Ctrl-C ends it. In another terminal, try:",
    ]
    if keyed:
        lines += ["", "0. Requests need a key; to look inside, an operator's", f"   export {API_KEY_VARIABLE}=pg-..."]
    lines += [
        "",
        "1. Send two turns of a conversation: the second reuses the prompt of the first",
        *(f"   {line}" for line in two_turns(url, model, keyed).splitlines()),
        f"2. Show why each went to its worker{explained}",
        f"   {command} explain turn-2 --url {url}",
        "3. Watch workers, their caches and the last decisions",
        f"   {command} top --url {url}",
        "",
    ]
    return "\n".join(lines) + "\n"
