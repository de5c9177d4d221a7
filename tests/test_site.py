"""What `make site` needs of the pages, without Sphinx: a place for each, pictures, plots that say what tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.website import figures, support_page
from lab.website.build import llms_text, openapi_page
from lab.website.navigation import BELOW, HOME, NAVIGATION
from lab.website.plots import DATE, DOCS, PAGE, PLOTS, PLOTTED, first_number, ratio_range, table_rows
from poolgrid.server.workers.engines.registry import engines, server_kinds

ROOT = Path(__file__).parents[1]
PLACES = (
    *(".", "docs", "docs/internals", "docs/decisions", "pool_configs", "engine_configs", "launch", "workers"),
    *("src/poolgrid/server/frontend", "lab/attacks", "tests/data", "tests/fault_simulation"),
)
PAGES = [path for place in PLACES for path in sorted((ROOT / place).glob("*.md"))]
DIAGRAMS = ("flowchart", "sequenceDiagram")


def test_every_page_has_one_place_on_the_site() -> None:
    listed = [HOME, *(page for pages in NAVIGATION.values() for page in pages)]
    inside = {path for below in BELOW.values() for path in (ROOT / below).glob("*.md")}
    found = {path.relative_to(ROOT).with_suffix("").as_posix() for path in PAGES if path not in inside}
    found |= set(BELOW)

    assert len(listed) == len(set(listed))
    assert set(listed) == found, "say in lab/website/navigation.py where a page is"


def test_a_user_chooses_among_at_most_thirty_pages() -> None:
    assert len(list(DOCS.glob("*.md"))) <= 30, "merge it into a page of its subject, or put it into docs/internals"


def test_the_index_has_every_page_under_its_group() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    groups = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL))

    assert list(groups) == list(NAVIGATION)
    for group, pages in NAVIGATION.items():
        linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)\)", groups[group])}
        assert linked == {(ROOT / f"{page}.md").resolve() for page in pages} - {(DOCS / "README.md").resolve()}, group


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pictures_of_a_page_exist_and_are_described(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    for described, picture in re.findall(r"!\[(.*?)\]\(([^)]+)\)", text):
        assert len(described) > 20, f"{path.name}: {picture} has no description for those who do not see it"
        assert (path.parent / picture).is_file(), f"{path.name} shows {picture}"
    for diagram in re.findall(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert diagram.split(maxsplit=1)[0] in DIAGRAMS, f"{path.name}: a diagram of an unknown kind"
        assert re.search(r"^ +accTitle: .{20,}$", diagram, re.MULTILINE), f"{path.name}: a diagram without accTitle"


def test_every_plot_is_drawn_and_shown() -> None:
    shown = re.findall(r"\]\(plots/(\w+)\.svg\)", (DOCS / PAGE).read_text(encoding="utf-8"))

    assert sorted(shown) == sorted(PLOTTED)
    assert sorted(path.stem for path in PLOTS.glob("*.svg")) == sorted(PLOTTED), "run: make plots"


@pytest.mark.parametrize(("plot", "head", "column"), [("routers", "routers", 1), ("pools", "strategy", 1)])
def test_a_plot_of_a_table_shows_the_numbers_of_the_table(plot: str, head: str, column: int) -> None:
    drawn = (PLOTS / f"{plot}.svg").read_text(encoding="utf-8")
    rows = table_rows(PAGE, head)

    assert len(rows) >= 5
    for row in rows:
        assert f">{first_number(row[column]):.0f} %<" in drawn, f"run: make plots ({row})"


def test_the_plot_of_front_ends_shows_the_medians_of_its_table() -> None:
    drawn = (PLOTS / "front_ends.svg").read_text(encoding="utf-8")

    for row in table_rows(PAGE, "test")[:3]:
        for peer in (2, 3):
            assert f">{ratio_range(row[peer])[0]:.1f}<" in drawn, f"run: make plots ({row})"


def test_the_plot_of_front_ends_does_not_draw_streams_of_mock_servers_that_write_whole_answers() -> None:
    assert [row[0].partition(",")[0] for row in table_rows(PAGE, "test")[:3]] == ["`short`", "`paced`", "`turns`"]


def test_every_plot_has_a_title_its_method_and_a_date() -> None:
    for name in PLOTTED:
        drawn = (PLOTS / f"{name}.svg").read_text(encoding="utf-8")
        assert re.search(r">[^<]*(simulated: |measured|vLLM 0)[^<]*<", drawn), f"run: make plots {name}"
        assert re.search(rf">[^<]*{DATE}[^<]*<", drawn), f"run: make plots {name}"


def test_the_plot_of_event_planes_shows_the_numbers_of_its_table() -> None:
    drawn = (PLOTS / "event_plane.svg").read_text(encoding="utf-8")

    rows = [row for row in table_rows(PAGE, "journal") if row[1] == "all"]
    assert len(rows) == 2
    for row in rows:
        assert f">{first_number(row[6]):,.0f}<" in drawn, f"run: make plots ({row})"


def test_figures_on_several_pages_are_those_of_their_table() -> None:
    pages = figures.pages()

    assert {path.name for path in pages} >= {"README.md", "CHANGELOG.md", "benchmarks.md", "comparison.md"}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: make docs"


def test_a_table_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match="no table whose head begins with 'nothing'"):
        table_rows(PAGE, "nothing")


def test_the_support_matrix_has_the_versions_and_engines_of_the_code() -> None:
    page = support_page.PAGE.read_text(encoding="utf-8")

    assert page == support_page.page(), "run: make docs"
    assert set(re.findall(r"^\| `([\w-]+)` \|.*\.py\) \|$", page, re.MULTILINE)) == set(engines())


def test_versions_of_engines_are_in_the_support_matrix_and_on_benchmark_pages_alone() -> None:
    """Other pages link to it; two that name a version contradict each other one day."""
    free = {"docs/support_matrix.md", *(f"{page}.md" for page in NAVIGATION["Benchmarks"])}
    guides = [f"{page}.md" for group in ("Get started", "Guides") for page in NAVIGATION[group]]
    rows = [row for head in ("`--engine`", "Feature | From") for row in table_rows("support_matrix.md", head)]
    stated = {version for row in rows for version in re.findall(r"\d+\.\d+", " ".join(row))}

    for name in set(guides) - free:
        for version in re.findall(
            r"vLLM (?:from |before |up to )?(\d+\.\d+)", (ROOT / name).read_text(encoding="utf-8")
        ):
            assert version in stated, f"{name}: vLLM {version}"


def test_pages_print_the_options_by_which_servers_publish_events() -> None:
    """As the engines' own definitions have them, which refusals and findings print."""
    options = {kind.title: kind.events_option.partition(" --page-size")[0] for kind in server_kinds().values()}
    guide, quickstart = ((DOCS / name).read_text(encoding="utf-8") for name in ("engine_servers.md", "quickstart.md"))

    for title in ("vLLM", "SGLang"):
        assert options[title] in guide
    assert options["vLLM"] in quickstart


def test_llms_txt_lists_every_page_with_its_first_sentence() -> None:
    text = llms_text()

    assert text.startswith("# poolgrid\n\n> ")
    for pages in NAVIGATION.values():
        for page in pages:
            (line,) = re.findall(rf"^- \[.+\]\({re.escape(page)}\.html\): (.+)$", text, re.MULTILINE)
            assert line.endswith("."), f"{page} has no first sentence"


def test_the_openapi_page_shows_each_operation_and_escapes_what_it_shows() -> None:
    operation = {"summary": "Chat <now>", "parameters": [{"name": "id"}], "responses": {"200": {"description": "ok"}}}
    page = openapi_page({"info": {"title": "poolgrid", "version": "1"}, "paths": {"/v1/chat": {"post": operation}}})

    assert "<code>POST /v1/chat</code> Chat &lt;now&gt;" in page
    assert "<now>" not in page
    assert "<h4>responses</h4>" in page
