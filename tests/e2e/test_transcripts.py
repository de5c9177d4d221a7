"""A reader who types what the README and the tutorial say sees what they promise, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.transcript import ROOT, Transcript, blocks, missing_line

PAGES = ("README.md", "docs/tutorial.md")


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


@pytest.mark.parametrize("page", PAGES)
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
