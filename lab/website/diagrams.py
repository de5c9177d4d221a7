"""Mermaid diagrams, drawn when the site is built: readers need neither a network nor scripts.

A diagram that does not parse ends the build. Drawings are kept by their text, because one takes a second.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

TITLE = re.compile(r"^\s*accTitle: (.+)$", re.MULTILINE)

LAYOUT = 1
"""Counted up when the same text is drawn in another way."""


class Mermaid(SphinxDirective):
    """A block of code in the language ``mermaid``."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        source = "\n".join(self.content)
        picture = base64.b64encode(drawn(source, Path(self.env.doctreedir).parent / "diagrams")).decode()
        title = TITLE.search(source)
        if title is None:
            raise self.error("a diagram needs a line 'accTitle: ...', for those who do not see it")
        image = f'<img class="diagram" alt="{escape(title[1])}" src="data:image/svg+xml;base64,{picture}">'
        return [nodes.raw("", image, format="html")]


def drawn(source: str, kept: Path) -> bytes:
    """Return a diagram as SVG."""
    path = kept / f"{hashlib.sha256(f'{LAYOUT} {source}'.encode()).hexdigest()[:32]}.svg"
    if not path.exists():
        from mermaidx import render

        svg = render(source, theme="neutral").svg()
        kept.mkdir(parents=True, exist_ok=True)
        path.write_text(svg)
    return path.read_bytes()


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
