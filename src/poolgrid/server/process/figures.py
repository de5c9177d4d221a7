"""How numbers are written for people, everywhere in one form.

Thousands have commas, shares are percentages without a space (``37.4%``), durations have the unit that keeps them
short, and a count comes with its noun in the right number (``1 file``, ``2 files``).
"""

from __future__ import annotations

UNKNOWN = "–"
"""Stands where nothing is known."""

_IRREGULAR = {"entry": "entries", "medium": "media", "query": "queries", "policy": "policies"}


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 file``, ``1,200 files``. ``noun`` is the singular; its last word is changed."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun whose last word is regular or in the list."""
    first, space, last = noun.rpartition(" ")
    return f"{first}{space}{_IRREGULAR.get(last, last + 's')}"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with commas and so many digits after the point, or a dash."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share (1.0 is all) as a percentage, or a dash."""
    return UNKNOWN if share is None else f"{100 * share:,.{digits}f}%"


def milliseconds(value: float | None) -> str:
    """Return a duration in milliseconds with the unit that keeps it short: ``12 ms``, ``3.4 s``, ``5 min``."""
    if value is None:
        return UNKNOWN
    if value < 1000:
        return f"{value:.0f} ms"
    if value < 120_000:
        return f"{value / 1000:.1f} s"
    return f"{value / 60_000:.0f} min"


def size(count: float) -> str:
    """Return a number of bytes: ``512 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
