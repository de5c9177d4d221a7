"""Settings of Sphinx: ``python -m sphinx -W -c website . build/site``, or ``make site``."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

from lab.website.navigation import BELOW, HOME, NAVIGATION, table_of_contents
from poolgrid import __version__

ROOT = Path(__file__).parents[2]

project = "poolgrid"
author = "the authors of poolgrid"
release = version = __version__
root_doc = HOME

extensions = ["myst_parser", "lab.website.diagrams"]
source_suffix = {".md": "markdown"}
include_patterns = [
    *(f"{page}.md" for pages in NAVIGATION.values() for page in pages),
    *(f"{directory}/*.md" for directory in BELOW.values()),
    f"{HOME}.md",
]
exclude_patterns = [".venv", "build"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["misc.highlighting_failure"]  # JSON with an ellipsis is for people

html_theme = "furo"
html_title = f"poolgrid {release}"
html_static_path = ["static"]
html_css_files = ["diagrams.css"]
html_show_sphinx = False
html_copy_source = False


def _with_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Say on the first page what pages there are."""
    if page == HOME:
        source[0] += "".join(table_of_contents(pages, caption) for caption, pages in NAVIGATION.items())
    elif page in BELOW:
        inside = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / BELOW[page]).glob("*.md"))
        source[0] += table_of_contents([each for each in inside if each != page])


def _with_index(app: Sphinx, error: Exception | None) -> None:
    """Let the directory be opened as such."""
    if error is None:
        shutil.copy(Path(app.outdir) / f"{HOME}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Add what is ours."""
    app.connect("source-read", _with_contents)
    app.connect("build-finished", _with_index)
