"""The tables of formats in the pages."""

from __future__ import annotations

from lab.website.parser_tables import PAGE, with_tables
from poolgrid.plugins.parsers.formats import CALL_NAMES, REASONING_NAMES
from tests.forms import needs_checkout


@needs_checkout
def test_the_page_of_parsers_has_a_row_for_every_format() -> None:
    page = PAGE.read_text()

    assert with_tables(page) == page, "run: make docs"
    for name in (*CALL_NAMES, *REASONING_NAMES):
        assert f"\n| `{name}` |" in page
