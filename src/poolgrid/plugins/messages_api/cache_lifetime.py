"""How long a Messages request asks to keep its prompt: the ``cache_control`` of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from poolgrid.plugins.messages_api.schema import CountedBody
from poolgrid.server.frontend.session_fields import control_ms


def keep_ms_of_messages(body: CountedBody) -> int:
    """Return how long the ``cache_control`` in a Messages body asks to keep it; raises ``RequestError``."""
    return max((control_ms(control, place) for control, place in _controls(body)), default=0)


def _controls(body: CountedBody) -> Iterator[tuple[Any, str]]:
    if body.cache_control is not None:
        yield body.cache_control, "cache_control"
    for index, tool in enumerate(body.tools or ()):
        if tool.cache_control is not None:
            yield tool.cache_control, f"tools[{index}].cache_control"
    if isinstance(body.system, list):
        for number, block in enumerate(body.system):
            if block.get("cache_control") is not None:
                yield block["cache_control"], f"system[{number}].cache_control"
    for index, message in enumerate(body.messages):
        if isinstance(message.content, list):
            for number, block in enumerate(message.content):
                if block.get("cache_control") is not None:
                    yield block["cache_control"], f"messages[{index}].content[{number}].cache_control"
