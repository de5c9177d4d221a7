"""Tests that need the program in one form: interpreted and not compiled, a checkout and not an installation.

``make compiled`` runs all tests against what was installed and compiled; these are skipped there.
"""

from __future__ import annotations

import pytest

from poolgrid.cli.configuration_page import DOCS
from poolgrid.runtime.program_form import program_form

needs_frames = pytest.mark.skipif(
    program_form() == "compiled", reason="a compiled function has no frame and no source for a profiler or inspect"
)
needs_checkout = pytest.mark.skipif(not DOCS.is_dir(), reason="pages and boards are written from a checkout")

needs_patches = pytest.mark.skipif(
    program_form() == "compiled",
    reason="compiled code does not look at what a test puts in its functions' place",
)
