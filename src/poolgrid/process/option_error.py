"""The error of an option whose value cannot be used."""

from __future__ import annotations


class OptionError(ValueError):
    """The message begins with the option and its value; the process ends with status 2."""
