"""What is cut into a client's bytes, and taken out of the answer again: a table in ``docs/engine_servers.md``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct

from poolgrid.server.forwarding.body_edit import edit
from poolgrid.server.forwarding.event_filter import TakenIds
from poolgrid.server.forwarding.prompt_ids import Sending, ids_json
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.proxy.prompt_record import IdUse

COUNTS_ON_DEMAND: Final = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Paths of APIs whose streams have counts only with ``stream_options.include_usage``."""

POOLGRID: Final = "poolgrid"
"""The kind of a pool's router whose workers take tokens."""

KNOWN_KINDS: Final = frozenset(("vllm", "sglang", "trtllm-serve", POOLGRID))
"""Servers that take ``include_usage``; of others it is not known."""


class Changes(Struct, frozen=True):
    """A request's body as the server gets it, and what it asks for that is not for the client."""

    body: bytes
    asks_usage: bool = False
    asks_ids: TakenIds = TakenIds.NONE
    use: IdUse | None = None
    """What is done about the prompt's ids."""


class _StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _is_true(value: Raw | None) -> bool:
    return value is not None and bytes(value) == b"true"


def is_streamed(values: Mapping[str, Raw]) -> bool:
    """Return whether a body asks for a stream."""
    return _is_true(values.get("stream"))


def _counts(values: Mapping[str, Raw]) -> bool | None:
    """Return whether a body asks for counts; ``None`` where that is not to be changed: for options that cannot be read,
    which the server judges, and for counts in each chunk, which depend on it."""
    options = values.get("stream_options")
    if options is None:
        return False
    try:
        found = msgspec.json.decode(options, type=_StreamOptions | None)
    except msgspec.MsgspecError:
        return None
    if found is None:
        return False
    return None if found.continuous_usage_stats else bool(found.include_usage)


def make_changes(
    path: str,
    kind: str,
    body: bytes,
    values: Mapping[str, Raw],
    salt: str = "",
    priority_max: int | None = None,
    use: IdUse | None = None,
    token_ids: bytes = b"",
) -> Changes:
    """Return the changes to a request of ``POST path`` for a server of a kind.

    ``salt`` is the tenant's part of the caches, ``priority_max`` the highest priority that it may ask for; engines run
    lower numbers first. ``use`` is what is done about the prompt's ``token_ids``. Raises ``RequestError`` for a body
    that cannot be made the tenant's.
    """
    fields: dict[str, bytes] = {}
    nested: dict[str, dict[str, bytes]] = {}
    asks_usage = False
    if path in COUNTS_ON_DEMAND and kind in KNOWN_KINDS and is_streamed(values) and _counts(values) is False:
        nested["stream_options"] = {"include_usage": b"true"}
        asks_usage = True
    if salt:
        fields["cache_salt"] = msgspec.json.encode(salt)
    if priority_max is not None and (priority := _number(values.get("priority"))) is not None:
        fields["priority"] = b"%d" % max(priority, -priority_max)
    is_owed = bool(fields)
    asks_ids = TakenIds.NONE
    if use is not None:
        form = use.form
        if use.sending is Sending.CHECKED:
            asks_ids = form.taken
            if form.asked:
                fields[form.asked] = b"true"
        elif form.inner:
            nested[form.member] = {form.inner: ids_json(token_ids)}
        else:
            fields[form.member] = ids_json(token_ids)
    if not fields and not nested:
        return Changes(body, use=use)
    try:
        return Changes(edit(body, fields, nested), asks_usage, asks_ids, use)
    except ValueError as error:
        if is_owed:
            raise RequestError(400, "invalid_json", f"reading the request body: {error}") from None
        return Changes(body)


def _number(value: Raw | None) -> int | None:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=int)
    except msgspec.MsgspecError:
        return None
