"""APIs that may be absent: without the folder of its plug-in, tests of one are skipped."""

from __future__ import annotations

import pytest

from poolgrid.server.frontend.api_endpoint import absent_endpoint


def needs(path: str) -> pytest.MarkDecorator:
    """Return the mark of a test, or of one of its cases, that asks for a path."""
    return pytest.mark.skipif(bool(absent_endpoint(path)), reason=f"the plug-in of {path} is absent")
