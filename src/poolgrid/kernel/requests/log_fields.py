"""What a line of the log is about: fields next to its words."""

from __future__ import annotations

from typing import Any

Field = str | int | float | bool


def about(**fields: Field | None) -> dict[str, Any]:
    """Return the ``extra`` of a line that is about something: ``request_id``, ``trace_id``, ``worker``, ``pool``, …

    What is empty is left out.
    """
    return {"fields": {name: value for name, value in fields.items() if value is not None and value != ""}}
