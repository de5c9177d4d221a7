"""Session ids by the headers and fields in which clients send them.

Headers come first, in the order of ``HEADERS``, then fields of the body. A name that is not short printable text stands
for itself by its hash. What a client sends is a name and no right: tenants have sessions of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.frontend.schema import Message
from poolgrid.inference.inference_request import NO_HINT, SessionHint
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.request_ids import OBJECT_PREFIXES

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
    """Return what the first call of a request's answer has in its id (``poolgrid.frontend.tools.CallIds``)."""
    return stable_u64(f"{name}/0/0")
