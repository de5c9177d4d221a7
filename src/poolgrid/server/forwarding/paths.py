"""Which request targets clients may use at a server behind poolgrid, and what is known of these.

Clients may use everything under ``/v1`` and ``/v2`` but what changes or inspects a server, and a list of further paths.
All else of a server is for operators: a route that a later version adds outside of ``/v1`` is closed by default.

A target is compared in a plain form: percent-decoded until it stays the same, without parameters, repeated or trailing
slashes, case ignored. Targets that servers read in several ways are refused: dot segments, backslashes, control
characters, a scheme or a host. The target itself is forwarded as it came.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from poolgrid.server.forwarding.event_filter import ApiForm

MAX_DECODINGS: Final = 3
"""Rounds of percent-decoding. Proxies in front add one at most; each further one is an attempt to hide a path."""

REMEMBERED_TARGETS: Final = 1024
"""Targets whose reading is kept. Most requests are for a dozen of them; those with ids come and go."""


class TargetAccess(Enum):
    """Whose requests a target is for."""

    CLIENT = "a path of clients"
    OPERATOR = "a path of operators"
    REFUSED = "a malformed target"


class ClientRoute(NamedTuple):
    """What is known of a path for clients; others are forwarded too."""

    reason: str
    """Why clients may use it."""
    has_prompt: bool = False
    """Its JSON body has a prompt."""
    answer: ApiForm | None = None
    """The API of its answers, where they report tokens."""
    model_in_path: bool = False
    """The end of the path is the name of a model."""


class ReservedRoute(NamedTuple):
    """A path under ``/v1`` or ``/v2`` that is for operators."""

    name: str
    """The segment behind the version."""
    reason: str


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """A target as it was read."""

    access: TargetAccess
    reason: str
    path: str = ""
    """In its plain form, letters as they came; empty if refused."""
    route: ClientRoute | None = None
    collection: str = ""
    """The path of a collection whose members only the server has that made them, letters as they came: of a path of the
    collection itself, or of a member."""
    state_id: str | None = None
    """The id of a member of the collection; ``None`` for the collection itself."""


CLIENT_ROUTES: Final = {
    "/v1/chat/completions": ClientRoute("generates", has_prompt=True, answer=ApiForm.CHAT),
    "/v1/chat/completions/batch": ClientRoute("generates", has_prompt=True, answer=ApiForm.CHAT),
    "/v1/completions": ClientRoute("generates", has_prompt=True, answer=ApiForm.CHAT),
    "/v1/messages": ClientRoute("generates", has_prompt=True, answer=ApiForm.MESSAGES),
    "/v1/responses": ClientRoute("generates", has_prompt=True, answer=ApiForm.RESPONSES),
    "/v1/decisions": ClientRoute("scores candidates", has_prompt=True),
    "/v1/systemone": ClientRoute("scores candidates", has_prompt=True),
    "/v1/embeddings": ClientRoute("pools", has_prompt=True, answer=ApiForm.CHAT),
    "/v2/embed": ClientRoute("pools", has_prompt=True),
    "/v1/score": ClientRoute("scores", has_prompt=True),
    "/v1/classify": ClientRoute("classifies", has_prompt=True),
    "/v1/rerank": ClientRoute("ranks", has_prompt=True),
    "/v2/rerank": ClientRoute("ranks", has_prompt=True),
    "/rerank": ClientRoute("ranks; vLLM and trtllm-serve", has_prompt=True),
    "/score": ClientRoute("scores; vLLM", has_prompt=True),
    "/classify": ClientRoute("classifies; vLLM and SGLang", has_prompt=True),
    "/pooling": ClientRoute("pools; vLLM", has_prompt=True),
    "/generative_scoring": ClientRoute("scores; vLLM", has_prompt=True),
    "/inference/v1/generate": ClientRoute("generates from token ids; vLLM", has_prompt=True, answer=ApiForm.CHAT),
    "/invocations": ClientRoute(
        "the SageMaker form of chat and others; vLLM and SGLang", has_prompt=True, answer=ApiForm.CHAT
    ),
    "/cohere/v2/chat": ClientRoute("generates; vLLM", has_prompt=True),
    "/cohere/v2/chat/render": ClientRoute("renders the client's own prompt; vLLM"),
    "/tokenize": ClientRoute("tokenizes the client's own text; vLLM and SGLang"),
    "/detokenize": ClientRoute("detokenizes the client's own ids; vLLM and SGLang"),
    "/tokenizer_info": ClientRoute("shows the tokenizer where vLLM was started to"),
    "/v1/audio/transcriptions": ClientRoute("transcribes"),
    "/v1/audio/translations": ClientRoute("transcribes"),
    "/v1/images/edits": ClientRoute("generates from a file"),
    "/v1/images/variations": ClientRoute("generates from a file"),
    "/v1/videos": ClientRoute("generates, from a file or JSON"),
    "/v1/videos/generations": ClientRoute("generates, from a file or JSON"),
    "/v1/files": ClientRoute("keeps a file for batches"),
    "/v1/batches": ClientRoute("runs a file of requests"),
    "/v1/realtime": ClientRoute("a session over a websocket"),
    "/v1/models": ClientRoute("lists models"),
}
"""Of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.4. What is outside of ``/v1`` and ``/v2`` is for clients because it is
here, each row with the servers that have it."""

_MODEL_CARD = ClientRoute("shows a model", model_in_path=True)
_OTHER = ClientRoute("is under /v1 or /v2")

RESERVED_ROUTES: Final = (
    ReservedRoute("load_lora_adapter", "loads an adapter from a path of the server; vLLM, SGLang"),
    ReservedRoute("load_lora_adapter_from_tensors", "loads an adapter; SGLang"),
    ReservedRoute("unload_lora_adapter", "takes an adapter away from all clients; vLLM, SGLang"),
    ReservedRoute("kv_cache_hints", "drops cached prefixes of any client; trtllm-serve"),
    ReservedRoute("kv_cache_events", "takes events away from their follower; trtllm-serve"),
    ReservedRoute("loads", "shows the load of one server; SGLang"),
    ReservedRoute("reset_prefix_cache", "drops the cache of all clients; vLLM"),
    ReservedRoute("reset_mm_cache", "drops the cache of all clients; vLLM"),
    ReservedRoute("reset_encoder_cache", "drops the cache of all clients; vLLM"),
    ReservedRoute("flush_cache", "drops the cache of all clients; SGLang"),
    ReservedRoute("sleep", "stops serving; vLLM"),
    ReservedRoute("wake_up", "changes what serves; vLLM"),
    ReservedRoute("pause", "stops serving; vLLM"),
    ReservedRoute("resume", "changes what serves; vLLM"),
    ReservedRoute("pause_generation", "stops serving; SGLang"),
    ReservedRoute("continue_generation", "changes what serves; SGLang"),
    ReservedRoute("release_kv_cache_memory", "stops serving; vLLM"),
    ReservedRoute("release_memory_occupation", "stops serving; SGLang"),
    ReservedRoute("resume_memory_occupation", "changes what serves; SGLang"),
    ReservedRoute("release_memory", "stops serving; trtllm-serve"),
    ReservedRoute("resume_memory", "changes what serves; trtllm-serve"),
    ReservedRoute("abort_request", "ends a request of any client; SGLang"),
    ReservedRoute("abort_requests", "ends requests of any client; vLLM"),
    ReservedRoute("collective_rpc", "calls any method of the engine; vLLM"),
    ReservedRoute("scale_elastic_ep", "changes the size of the server; vLLM, SGLang"),
    ReservedRoute("set_internal_state", "changes settings of the engine; SGLang"),
    ReservedRoute("configure_logging", "changes what is logged, prompts included; SGLang"),
    ReservedRoute("start_profile", "slows the server down and fills its disk; all three"),
    ReservedRoute("stop_profile", "ends a profile of an operator; all three"),
    ReservedRoute("server_info", "shows the server's settings; all three"),
    ReservedRoute("get_server_info", "shows the server's settings; SGLang"),
)
"""Under ``/v1`` and ``/v2``, with everything below them. Most are served outside of ``/v1`` today, where all is for
operators; a server that serves them under a version too opens nothing."""

RESERVED_PREFIXES: Final = (
    ReservedRoute("update_weight", "replaces the weights for all clients; all three"),
    ReservedRoute("init_weight", "prepares other weights; vLLM, SGLang"),
    ReservedRoute("start_weight", "prepares other weights; vLLM"),
    ReservedRoute("finish_weight", "replaces the weights for all clients; vLLM"),
)
"""Names that begin so."""

_RESERVED: Final = {route.name: route.reason for route in RESERVED_ROUTES}
_VERSIONS: Final = ("v1", "v2")

STATEFUL_COLLECTIONS: Final = (
    "/v1/responses",
    "/v1/conversations",
    "/v1/messages/batches",
    "/v1/files",
    "/v1/uploads",
    "/v1/batches",
    "/v1/videos",
)
"""What a POST to these makes is at the server that made it: the next segment is its id, with everything below."""

NO_IDS: Final = frozenset({"render", "derender", "compact", "input_tokens", "generations", "edits"})
"""Segments below the collections that are names of actions."""

_PLAIN = re.compile(rb"/[A-Za-z0-9_/.-]*")
_ODD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ODD_RAW = re.compile(rb"[\x00-\x20\x7f#]")
_ODD_DECODED = re.compile(rb"[\x00-\x1f\x7f\\]")
_PARAMETERS = re.compile(rb";[^/]*")
_SLASHES = re.compile(rb"/{2,}")


def read_target(target: bytes) -> RequestTarget:
    """Read the target of a request line: the path, and the query if there is one."""
    return _read_path(target.partition(b"?")[0])


@lru_cache(maxsize=REMEMBERED_TARGETS)
def _read_path(raw: bytes) -> RequestTarget:
    try:
        path, with_parameters = _plain_forms(raw)
    except _MalformedTargetError as error:
        return RequestTarget(TargetAccess.REFUSED, str(error))
    found = _access_of(path)
    if with_parameters != path:
        other = _access_of(with_parameters)
        found = other if other.access is TargetAccess.OPERATOR else found
    return found


class _MalformedTargetError(ValueError):
    """Servers read the target in several ways."""


def _plain_forms(raw: bytes) -> tuple[str, str]:
    """The plain path, and the same with its parameters, which some servers take for a part of the path.

    Raises:
        _MalformedTargetError: Says what is not allowed.
    """
    if not raw.startswith(b"/") or raw.startswith(b"//"):
        raise _MalformedTargetError(f"the target is {_quoted(raw)}, allowed is a path that begins with one '/'")
    path = raw
    if _PLAIN.fullmatch(raw) is None:
        if _ODD_ESCAPE.search(raw):
            raise _MalformedTargetError(f"the path {_quoted(raw)} has a '%' without two hexadecimal digits behind it")
        path = _decoded(raw)
        if _ODD_RAW.search(raw) or _ODD_DECODED.search(path):
            raise _MalformedTargetError(f"the path {_quoted(raw)} has a backslash, '#', space or control character")
    if b"/." in path and any(segment.partition(b";")[0] in (b".", b"..") for segment in path.split(b"/")):
        raise _MalformedTargetError(f"the path {_quoted(raw)} has a dot segment")
    plain = _joined(path)
    return (_joined(_PARAMETERS.sub(b"", path)), plain) if b";" in path else (plain, plain)


def _joined(path: bytes) -> str:
    return _SLASHES.sub(b"/", path).rstrip(b"/").decode("latin-1") or "/"


def _decoded(path: bytes) -> bytes:
    for _ in range(MAX_DECODINGS + 1):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return path
        path = decoded
    raise _MalformedTargetError(f"the path {_quoted(path)} is encoded more than {MAX_DECODINGS} times")


def _access_of(path: str) -> RequestTarget:
    plain = path.lower()
    _, version, *rest = plain.split("/")
    route = CLIENT_ROUTES.get(plain)
    if version in _VERSIONS:
        name = rest[0].strip() if rest else ""
        reason = _RESERVED.get(name) or next((r.reason for r in RESERVED_PREFIXES if name.startswith(r.name)), None)
        if reason is not None:
            return RequestTarget(TargetAccess.OPERATOR, f"{path} {reason}", path)
        route = route or (_MODEL_CARD if plain.startswith("/v1/models/") else _OTHER)
    if route is None:
        return RequestTarget(TargetAccess.OPERATOR, f"{path} is not among the paths of clients", path)
    return RequestTarget(TargetAccess.CLIENT, f"{path} {route.reason}", path, route, *_state_of(path, plain))


def _state_of(path: str, plain: str) -> tuple[str, str | None]:
    """The collection and the id in a path."""
    for collection in STATEFUL_COLLECTIONS:
        if plain == collection:
            return path, None
        if plain.startswith(collection + "/"):
            name = path[len(collection) + 1 :].partition("/")[0]
            if name.lower() not in NO_IDS:
                return path[: len(collection)], name
            break
    return "", None


def _quoted(raw: bytes) -> str:
    return repr(raw[:80].decode("latin-1"))
