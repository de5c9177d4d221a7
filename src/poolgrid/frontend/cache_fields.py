"""How long clients ask to keep the KV of a prompt, by the fields of Anthropic and OpenAI.

A request has one time, the longest that it asks for, and it is for its whole prompt: where a block of the client's ends
among the tokens is known to the chat template alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from poolgrid.frontend.errors import invalid, quoted
from poolgrid.frontend.messages_api.schema import CountedBody
from poolgrid.frontend.schema import SamplingFields

HOUR_MS: Final = 3_600_000
CONTROL_MS: Final = {None: 300_000, "5m": 300_000, "1h": HOUR_MS}
"""By ``ttl`` of ``cache_control``; five minutes is Anthropic's default."""

RETENTION_MS: Final = {None: 0, "in_memory": 300_000, "in-memory": 300_000, "24h": 24 * HOUR_MS}
"""By ``prompt_cache_retention``. OpenAI keeps prompts in memory for 5 to 10 minutes. Earlier clients write a hyphen."""

OPTIONS_MS: Final = {None: 30 * 60_000, "30m": 30 * 60_000, "12h": 12 * HOUR_MS}
"""By ``ttl`` of ``prompt_cache_options``; half an hour is OpenAI's default."""


def keep_ms_of(body: SamplingFields) -> int:
    """Return how long OpenAI's fields, or ``nvext``, ask to keep the prompt; raises ``RequestError``."""
    keep_ms, options, nvext = RETENTION_MS[body.prompt_cache_retention], body.prompt_cache_options, body.nvext
    if options is not None and options.mode != "explicit":  # which keeps what breakpoints name, and they are not read
        keep_ms = max(keep_ms, OPTIONS_MS[options.ttl])
    if nvext is not None and nvext.cache_control is not None:
        keep_ms = max(keep_ms, _control_ms(nvext.cache_control, "nvext.cache_control"))
    return keep_ms


def keep_ms_of_messages(body: CountedBody) -> int:
    """Return how long the ``cache_control`` in a Messages body asks to keep it; raises ``RequestError``."""
    return max((_control_ms(control, place) for control, place in _controls(body)), default=0)


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


def _control_ms(control: Any, place: str) -> int:
    if not isinstance(control, dict):
        raise invalid(place, f'{place} is {quoted(control)}: allowed is an object such as {{"type": "ephemeral"}}')
    if control.get("type") != "ephemeral":
        raise invalid(f"{place}.type", f"{place}.type is {quoted(control.get('type'))}: allowed is ephemeral")
    ttl = control.get("ttl")
    if not (ttl is None or isinstance(ttl, str)) or ttl not in CONTROL_MS:
        raise invalid(f"{place}.ttl", f"{place}.ttl is {quoted(ttl)}: allowed is 5m or 1h")
    return CONTROL_MS[ttl]
