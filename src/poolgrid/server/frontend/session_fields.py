"""Session ids and cache lifetimes, read from the headers and fields in which clients send them.

Rules
    1. A session id comes from the first header in the order of ``HEADERS``, else from fields of the body. An id that is
       not short printable text is replaced by its hash. A session id grants no access: each tenant has its own
       sessions.
    2. A request has one cache lifetime, the longest that it asks for in a field of Anthropic or OpenAI. The lifetime
       applies to the whole prompt: only the chat template knows which token ends a block of the client's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from poolgrid.kernel.requests.inference import NO_HINT, SessionHint
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.identifiers import OBJECT_PREFIXES
from poolgrid.server.frontend.errors import invalid, quoted
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.schema import Message, SamplingFields

HEADERS: Final = (
    # Session, and its parent: Dynamo, Claude Code, Codex, OpenCode (which Dynamo and llm-d read too).
    (b"x-dynamo-session-id", b"x-dynamo-parent-session-id"),
    (b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
    (b"x-claude-code-session-id", b""),
    (b"thread-id", b"x-codex-parent-thread-id"),
    (b"x-opencode-session", b"x-parent-session-id"),
    (b"session_id", b""),
    (b"session-id", b""),
    (b"conversation_id", b""),
    # TensorRT-LLM's, in its order but for the correlation id, which proxies also make for each request.
    (b"x-session-id", b"x-parent-session-id"),
    (b"x-session-affinity", b"x-parent-session-id"),
    (b"x-multi-turn-session-id", b""),
    (b"x-correlation-id", b""),
)
SESSION_HEADERS: Final = frozenset(name for name, _ in HEADERS)

CLAUDE_CODE_SESSION: Final = b"x-claude-code-session-id"

CONTEXT_FIELDS: Final = ("session_id", "trajectory_id", "program_id")
"""Fields of ``nvext.agent_context`` that name a session: today's of Dynamo, and those of earlier versions."""

METADATA_FIELDS: Final = ("session_id", "conversation_id", "thread_id")

NAME_CHARS_MAX: Final = 96
"""A UUID has 36."""

RESULT_ROLES: Final = frozenset({"tool", "function"})
"""Of messages that have the result of a call."""

TRAILING_MESSAGES_MAX: Final = 64
"""Messages behind the last answer that are looked at: the results of its calls."""

_NAME: Final = re.compile(rf"[!-~]{{1,{NAME_CHARS_MAX}}}")
_CALL: Final = re.compile(r"call_([0-9a-f]{16})")
_CLAUDE_USER: Final = re.compile(r"_session_([0-9a-f-]{36})$")
_SECRET: Final = re.compile(r"_[0-9a-f]{24}$")


def session_hint(job: PreparedRequest, headers: Mapping[bytes, bytes]) -> SessionHint:
    """Return what a request says of its session."""
    name = parent = ""
    if not SESSION_HEADERS.isdisjoint(headers):
        name, parent = _of_headers(headers)
    if not name and not job.is_plain:
        name, parent = _of_body(job.body)
    if not name and not job.after_tool and not job.answer and not job.keep_ms:
        return NO_HINT
    return SessionHint(name, parent, job.after_tool, job.answer, job.keep_ms)


class _SessionContext(msgspec.Struct):
    agent_context: Any = None
    session_control: Any = None


class _SessionMembers(msgspec.Struct):
    """The members of any API's body that name its session."""

    nvext: _SessionContext | None = None
    conversation_params: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None


def hint_of_members(
    values: Mapping[str, msgspec.Raw], headers: Mapping[bytes, bytes], after_tool: bool, answer: int
) -> SessionHint:
    """Return what a request says of its session whose body is not prepared; ``values`` are its members, unread."""
    name = parent = ""
    if not SESSION_HEADERS.isdisjoint(headers):
        name, parent = _of_headers(headers)
    if not name and not _SESSION_MEMBERS.isdisjoint(values):
        try:
            found = {key: msgspec.json.decode(values[key]) for key in _SESSION_MEMBERS.intersection(values)}
            name, parent = _of_body(msgspec.convert(found, _SessionMembers))
        except (msgspec.MsgspecError, RecursionError):
            pass  # the server refuses it
    return SessionHint(name, parent, after_tool, answer) if name or after_tool or answer else NO_HINT


_SESSION_MEMBERS: Final = frozenset(_SessionMembers.__struct_fields__)


def _of_headers(headers: Mapping[bytes, bytes]) -> tuple[str, str]:
    for name, parent in HEADERS:
        value = headers.get(name)
        if value:
            above = headers.get(parent, b"") if parent else b""
            if name == b"x-claude-code-agent-id" and not above:
                above = headers.get(CLAUDE_CODE_SESSION, b"")
            return clean(value.decode("latin-1")), clean(above.decode("latin-1"))
    return "", ""


def _of_body(body: Any) -> tuple[str, str]:
    nvext = body.nvext
    for context in () if nvext is None else (nvext.agent_context, nvext.session_control):
        if isinstance(context, dict):
            for field in CONTEXT_FIELDS:
                if name := clean(context.get(field)):
                    return name, clean(context.get("parent_session_id"))
    params = body.conversation_params
    if isinstance(params, dict) and (name := clean(params.get("conversation_id"))):
        return name, ""
    if name := clean(body.prompt_cache_key):
        return name, ""
    metadata = body.metadata
    if isinstance(metadata, dict):
        for field in METADATA_FIELDS:
            if name := clean(metadata.get(field)):
                return name, ""
        return _of_claude_user(metadata.get("user_id")), ""
    return "", ""


def _of_claude_user(user_id: object) -> str:
    """Return the session in Claude Code's ``metadata.user_id``, which has it in JSON, or at its end."""
    if not isinstance(user_id, str):
        return ""
    if found := _CLAUDE_USER.search(user_id):
        return found[1]
    try:
        value = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return clean(value.get("session_id")) if isinstance(value, dict) else ""


def clean(value: object) -> str:
    """Return a name as sessions have it: as the client wrote it, or its hash; empty for what is no name."""
    if not isinstance(value, str) or not value:
        return ""
    return value if _NAME.fullmatch(value) else f"x{stable_u64(value):016x}"


def answered_by(messages: Sequence[Message]) -> tuple[bool, int]:
    """Return whether messages end in results of tools, and return the key of the answer whose calls these are."""
    after_tool = False
    for message in messages[: -TRAILING_MESSAGES_MAX - 1 : -1]:
        if message.role in RESULT_ROLES:
            after_tool = True
        elif message.role == "assistant":
            calls = message.tool_calls
            found = _CALL.fullmatch(calls[0].id or "") if calls else None
            return after_tool, int(found[1], 16) if found and after_tool else 0
    return after_tool, 0


def response_key(response_id: str) -> int:
    """Return the key of the response that a body continues by its id."""
    name = _SECRET.sub("", response_id)
    for prefix in OBJECT_PREFIXES:
        name = name.removeprefix(prefix)
    return answer_key(name)


def answer_key(name: str) -> int:
    """Return what the first call of a request's answer has in its id (``poolgrid.server.frontend.tools.CallIds``)."""
    return stable_u64(f"{name}/0/0")


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
        keep_ms = max(keep_ms, control_ms(nvext.cache_control, "nvext.cache_control"))
    return keep_ms


def control_ms(control: Any, place: str) -> int:
    """Return how long a ``cache_control`` at ``place`` asks to keep what is before it; raises ``RequestError``."""
    if not isinstance(control, dict):
        raise invalid(place, f'{place} is {quoted(control)}: allowed is an object such as {{"type": "ephemeral"}}')
    if control.get("type") != "ephemeral":
        raise invalid(f"{place}.type", f"{place}.type is {quoted(control.get('type'))}: allowed is ephemeral")
    ttl = control.get("ttl")
    if not (ttl is None or isinstance(ttl, str)) or ttl not in CONTROL_MS:
        raise invalid(f"{place}.ttl", f"{place}.ttl is {quoted(ttl)}: allowed is 5m or 1h")
    return CONTROL_MS[ttl]
