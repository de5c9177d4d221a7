"""The fleet page in a real browser: ``python -m tests.ui``, and the short test of the suite."""
