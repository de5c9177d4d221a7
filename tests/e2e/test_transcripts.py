"""A reader who types what the README and the tutorial say sees what they promise, on real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.transcript import ROOT, Transcript, blocks, missing_line, unmarked

PAGES = ("README.md", "docs/tutorial.md", "docs/recipes.md")
QUICKSTART = "docs/quickstart.md"

GUIDES = tuple(
    f"docs/{name}.md"
    for name in (
        *("engine_servers", "trtllm", "trtllm_configuration", "trtllm_examples", "kubernetes", "bare_metal"),
        *("disaggregation", "global_router", "coding_agents", "multimodal", "comparison", "production"),
        *("troubleshooting",),
    )
)
"""Their commands are run one page after the other, each in a directory of its own."""


@pytest.mark.e2e
def test_what_pages_say_to_type_shows_what_they_promise(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path)
    try:
        broken = [
            f"{page}: {promise}" for page in PAGES for promise in transcript.follow((ROOT / page).read_text("utf-8"))
        ]
    finally:
        transcript.close()

    assert not broken, "\n\n".join(broken)


@pytest.mark.e2e
def test_the_quickstart_reaches_a_cache_hit_in_front_of_a_vllm_server(tmp_path: Path) -> None:
    vllm = {"vllm": f"{sys.executable} {ROOT / 'tests' / 'e2e' / 'vllm_serve.py'}"}
    transcript = Transcript(tmp_path, vllm, {"/models/Qwen3-8B": str(TINY_MODEL_PATH)})
    try:
        broken = list(transcript.follow((ROOT / QUICKSTART).read_text("utf-8")))
    finally:
        transcript.close()

    assert not broken, "\n\n".join(broken)


@pytest.mark.e2e
@pytest.mark.parametrize("page", GUIDES)
def test_what_guides_say_to_run_runs(tmp_path: Path, page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    if not blocks(text):
        pytest.skip("its commands say why they are not run")
    transcript = Transcript(tmp_path)
    try:
        broken = list(transcript.follow(text))
    finally:
        transcript.close()

    assert not broken, "\n\n".join(broken)


@pytest.mark.parametrize("page", [*PAGES, QUICKSTART, *GUIDES, "launch/README.md", "pool_configs/README.md"])
def test_every_command_of_a_page_is_run_or_says_why_not(page: str) -> None:
    assert unmarked((ROOT / page).read_text("utf-8")) == []


def test_a_command_without_a_mark_is_named() -> None:
    page = "```sh\none\n```\n<!-- run -->\n```sh\ntwo\n```\n<!-- not run: needs a GPU -->\n```console\n$ three\n```\n"

    assert unmarked(page) == ["one"]
    assert unmarked("<!-- not run: -->\n```bash\nfour\n```\n") == ["four"]


def test_the_quickstart_has_at_most_five_commands_before_the_cache_hit() -> None:
    text = (ROOT / QUICKSTART).read_text("utf-8").partition("## 4. ")[0]

    assert text.count("```sh") == 5


@pytest.mark.parametrize("page", [*PAGES, QUICKSTART])
def test_every_command_that_a_page_prints_is_run_and_promises_something(page: str) -> None:
    kinds = [block.kind for block in blocks((ROOT / page).read_text("utf-8"))]

    assert kinds.count("shows") >= 3
    assert kinds[0] != "shows"


def test_a_promise_is_kept_line_by_line_and_in_order() -> None:
    shown = "\x1b[1mready\x1b[0m http://127.0.0.1:8000\n  cached   608 of 700\nbye\n"

    assert missing_line("ready http://127.0.0.1:8000\n…\ncached 608 of …", shown) is None
    assert missing_line("cached 608", shown) is None
    assert missing_line("cached … 700\nbye", shown) is None
    assert missing_line("cached 0 of", shown) == "cached 0 of"
    assert missing_line("bye\nready", shown) == "ready"
    assert missing_line("cached 608\ncached 608", shown) == "cached 608", "each line is shown once"


def test_blocks_are_found_by_what_stands_before_them() -> None:
    page = (
        "<!-- run-command -->\n```sh\na && b && poolgrid up\n```\n<!-- /run-command -->\n"
        "<!-- shows -->\n```text\nready …\n```\n```sh\nnot run\n```\n<!-- run -->\n```sh\none\ntwo\n```\n"
    )

    assert [tuple(block) for block in blocks(page)] == [
        ("terminal", "pool", "poolgrid up", "sh"),
        ("shows", "", "ready …", "text"),
        ("run", "", "one\ntwo", "sh"),
    ]
