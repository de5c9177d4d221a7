"""Tests that need a checkout and not an installation."""

from __future__ import annotations

import pytest

from lab.website.configuration_page import DOCS

needs_checkout = pytest.mark.skipif(not DOCS.is_dir(), reason="pages and boards are written from a checkout")
