"""Tests of what `deploy/` ships."""
