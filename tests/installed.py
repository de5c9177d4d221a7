"""Tests of other parts that need a plug-in, for those who have deleted its folder."""

from __future__ import annotations

import pytest

from poolgrid.server.frontend.api_endpoint import absent_endpoint
from poolgrid.server.process.plugins import PARSERS, has_plugin

needs_parsers = pytest.mark.skipif(not has_plugin(PARSERS, "model"), reason="src/poolgrid/plugins/parsers is deleted")


def needs(path: str) -> pytest.MarkDecorator:
    """Return the mark of a test, or of one of its cases, that asks for a path of an API."""
    return pytest.mark.skipif(bool(absent_endpoint(path)), reason=f"the plug-in of {path} is deleted")
