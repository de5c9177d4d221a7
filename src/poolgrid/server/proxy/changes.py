"""What is cut into a client's bytes, and taken out of the answer again: a table in ``docs/engine_servers.md``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from poolgrid.kernel.wire.requests import unit_priority
from poolgrid.server.forwarding import trtllm_serve
from poolgrid.server.forwarding.body_edit import edit
from poolgrid.server.forwarding.event_filter import TakenIds
from poolgrid.server.forwarding.prompt_ids import Sending, ids_json
from poolgrid.server.frontend.errors import RequestError, unsupported
from poolgrid.server.proxy.prompt_record import IdUse

T = TypeVar("T", int, float)

COUNTS_ON_DEMAND: Final = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Paths of APIs whose streams have counts only with ``stream_options.include_usage``."""

POOLGRID: Final = "poolgrid"
"""The kind of a pool's router whose workers take tokens."""

OPENAI: Final = "openai"
"""The kind of a server that is of no known one. All others take ``include_usage``."""


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
    version: str = "",
    priority: int = 0,
) -> Changes:
    """Return the changes to a request of ``POST path`` for a server of a kind and a version.

    ``salt`` is the tenant's part of the caches, ``priority_max`` the highest priority that it may ask for; engines run
    lower numbers first, but for TensorRT-LLM. ``use`` is what is done about the prompt's ``token_ids``. ``priority`` is
    what hints ask for, the higher first. Raises ``RequestError`` for a body that cannot be made the tenant's.
    """
    fields: dict[str, bytes] = {}
    nested: dict[str, dict[str, bytes]] = {}
    asks_usage = False
    if path in COUNTS_ON_DEMAND and kind != OPENAI and is_streamed(values) and _counts(values) is False:
        nested["stream_options"] = {"include_usage": b"true"}
        asks_usage = True
    if kind == trtllm_serve.KIND:
        _check_salt(path, salt, values)
        salt = salt if path == trtllm_serve.SALTED_PATH else ""
    if salt:
        fields["cache_salt"] = msgspec.json.encode(salt)
    if kind == trtllm_serve.KIND:
        given = _unit_priority(path, version, values, priority_max, priority)
        if given is not None:
            fields["priority"] = msgspec.json.encode(given)
    elif priority_max is not None and (asked := _number(values.get("priority"))) is not None:
        fields["priority"] = b"%d" % max(asked, -priority_max)
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


def _check_salt(path: str, salt: str, values: Mapping[str, Raw]) -> None:
    """Raise ``RequestError`` for a request that asks for a part of the caches where there are none."""
    given = values.get("cache_salt")
    if path in trtllm_serve.UNSALTED_PATHS and (salt or (given is not None and bytes(given) not in (b"null", b'""'))):
        raise unsupported(
            "cache_salt", f"trtllm-serve has caches of their own for requests of {trtllm_serve.SALTED_PATH} alone"
        )


def _unit_priority(
    path: str, version: str, values: Mapping[str, Raw], priority_max: int | None, priority: int
) -> float | None:
    """Return the priority for a server of TensorRT-LLM; ``None`` = as the client wrote it."""
    given = values.get("priority")
    if given is None:
        has_hint = priority and trtllm_serve.takes_priority(version, path)
        return unit_priority(priority) if has_hint else None
    asked = _number(given, float)
    return None if priority_max is None or asked is None else min(asked, unit_priority(priority_max))


def _number(value: Raw | None, form: type[T] = int) -> T | None:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=form)
    except msgspec.MsgspecError:
        return None
