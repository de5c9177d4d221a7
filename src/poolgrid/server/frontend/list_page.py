"""A part of a list, in OpenAI's form."""

from __future__ import annotations

from typing import Any, Final

from poolgrid.server.frontend.errors import invalid, quoted

PAGE_MAX: Final = 100
"""Items that one answer lists at most; OpenAI's own limit."""


def page_of(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """Return a part of a list; raises ``RequestError`` for an ``after`` that is not in it."""
    if order == "desc":
        items = items[::-1]
    if after is not None:
        at = next((index for index, item in enumerate(items) if item.get("id") == after), None)
        if at is None:
            raise invalid("after", f"after is {quoted(after)}: allowed is the id of an item of the list")
        items = items[at + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
