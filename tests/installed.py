"""Tests of other parts that need a plug-in, for those who have deleted its folder."""

from __future__ import annotations

import pytest

from poolgrid.server.process.plugins import PARSERS, has_plugin

needs_parsers = pytest.mark.skipif(not has_plugin(PARSERS, "model"), reason="src/poolgrid/plugins/parsers is deleted")
