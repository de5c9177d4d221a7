"""Token ids of a prompt that go to an engine server with its text, so that it need not tokenize it again. Pure.

A router that chooses by tokens has made the ids of a prompt. A server that takes them skips its own template and
tokenizer, and does all else as before. That is right only while both make the same ids of a request. So a request of a
new kind goes as text, and what the engine made of it is compared; ids are sent once enough requests of the kind were
equal, and one in some hundreds is compared from then on. One difference ends it for the model.

Two proofs are known:

- **ids**: the server returns the ids of the prompt when it is asked for them (``IdForm.asked``).
- **counts**: where it cannot be asked, its count of prompt tokens is equal, and it reuses as much of the prompt as was
  promised from its own cache events, which is most of it. Those events are about the engine's ids.

Facts were read in vLLM 0.27, 0.32 and 0.33, SGLang 0.5.23 and TensorRT-LLM 1.4. trtllm-serve takes
``prompt_token_ids`` in chat for its generation servers alone: it then no longer knows whether the prompt asks for
thinking, so the answer may differ, and it shows no ids to compare. It gets none there.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from poolgrid.kernel.wire.answers import ModelFinding
from poolgrid.server.forwarding.event_filter import AnswerNotes, TakenIds

IDS_MIN: Final = 1024
"""Shortest prompt in tokens. Its ids spare vLLM 0.32 1.2 ms and cost the router 0.02 ms, both in proportion to its
length: 2.4 ms at 2,357 tokens, 3.4 ms at 3,381 (on a machine of two CPU cores, medians of 60 requests with one token of
a cached prompt). What a shorter one gains is below the step of an engine, for which it waits anyway."""

IDS_MAX: Final = 131_072
"""Longest prompt in tokens: the event with its ids must stay below ``event_filter.MAX_EVENT_BYTES``."""

PROOFS: Final = 4
"""Equal requests of a kind before ids are sent: the first alone may be a prompt that shows no difference."""

CHECKED_EVERY: Final = 256
"""Requests of a proven kind of which one is compared: a template that was changed is noticed within minutes of traffic,
and the text costs a client of a hundred turns less than one slower turn."""

SILENT_MAX: Final = 16
"""Answers in succession that do not show the ids that were asked for. Then the server is not asked again for
``CHECKED_EVERY`` requests: asking costs a search in each event."""

KINDS_MAX: Final = 4096
"""Kinds that are known, the ones used last: 40 combinations of members at 100 servers. Others are proven again."""

OFF_MAX: Final = 1024
"""Models whose ids are off. Their names are those of served models, of which a pool has fewer."""

LEAST_SHARE: Final = 0.5
"""Share of a prompt that must be reused as promised for its ids to count as proven."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class IdForm(Struct, frozen=True):
    """Where a server takes the ids of a prompt, and how it shows those that it made."""

    member: str
    inner: str = ""
    """The member of ``member`` that takes them; empty: it takes them itself."""
    asked: str = ""
    """The member that asks for the engine's own ids; empty: it has none."""
    taken: TakenIds = TakenIds.NONE
    """How they are taken out of the answer."""


_VLLM: Final = ("kv_transfer_params", "prompt_token_ids")
_VLLM_SINCE: Final = (0, 27)
"""The first release that reads them; others leave the member to a connector, or refuse it."""
_SGLANG_SINCE: Final = (0, 5, 23)

_FORMS: Final[Mapping[tuple[str, str], tuple[tuple[int, ...], IdForm]]] = {
    ("vllm", CHAT): (_VLLM_SINCE, IdForm(*_VLLM, "return_token_ids", TakenIds.NULL)),
    ("vllm", MESSAGES): (_VLLM_SINCE, IdForm(*_VLLM)),
    ("vllm", RESPONSES): (_VLLM_SINCE, IdForm(*_VLLM)),
    ("vllm", COMPLETIONS): (_VLLM_SINCE, IdForm("prompt", "", "return_token_ids", TakenIds.NULL)),
    ("sglang", CHAT): (_SGLANG_SINCE, IdForm("input_ids", "", "return_input_ids_in_sglext", TakenIds.EXTENSION)),
    ("sglang", COMPLETIONS): (_SGLANG_SINCE, IdForm("prompt", "", "return_token_ids", TakenIds.ABSENT)),
}

_PLAIN_COMPLETION: Final = IdForm("prompt")
"""OpenAI's API itself: any server takes a prompt of ids."""

_VERSION = re.compile(r"\d+(?:\.\d+)*")


def id_form(kind: str, version: str, path: str) -> IdForm | None:
    """Return how a server takes ids at a path; ``None`` where it does not."""
    known = _FORMS.get((kind, path))
    if known is not None:
        found = _VERSION.match(version)
        if found is not None and tuple(map(int, found[0].split("."))) >= known[0]:
            return known[1]
    return _PLAIN_COMPLETION if path == COMPLETIONS else None


_SAMPLING: Final = frozenset((
    "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "n", "max_tokens", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "ignore_eos", "skip_special_tokens", "priority", "cache_salt", "service_tier", "user", "metadata",
))  # fmt: skip
"""Members that leave a prompt as it is."""

_OF_CHAT: Final = frozenset(
    ("tools", "tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs", "reasoning_effort")
)

_MEMBERS: Final[Mapping[str, frozenset[str]]] = {
    CHAT: _SAMPLING
    | _OF_CHAT
    | {"messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "continue_final_message", "store"},
    COMPLETIONS: _SAMPLING | {"prompt"},
    MESSAGES: _SAMPLING
    | {"messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "chat_template_kwargs"},
    RESPONSES: _SAMPLING
    | _OF_CHAT
    | {"input", "instructions", "reasoning", "max_output_tokens", "store", "text", "include", "top_logprobs"},
}
"""By path: the members that a body with ids may have. Of any other it is not known whether it changes the prompt, or
needs its text: ``echo``, ``documents``, ``chat_template``, ``truncate_prompt_tokens``, ``prompt_logprobs``. A client's
own ``kv_transfer_params`` and ``return_token_ids`` are its business."""


def may_carry(path: str, values: Mapping[str, Raw]) -> bool:
    """Return whether the prompt of a body is all that its ids say."""
    members = _MEMBERS.get(path)
    if members is None or not members.issuperset(values):
        return False
    if "tool_choice" in values and bytes(values["tool_choice"]) == b'"none"':
        return False  # servers differ in whether the prompt then shows the tools
    return path != COMPLETIONS or bytes(values.get("prompt", b"")).startswith(b'"')


def ids_json(token_ids: bytes) -> bytes:
    """Return the JSON array of token ids that are u32, little-endian."""
    return msgspec.json.encode(_listed(token_ids))


def _listed(token_ids: bytes) -> list[int]:
    return memoryview(token_ids).cast("I").tolist()


class Sending(Enum):
    """How a prompt goes to its server."""

    TEXT = "text"
    CHECKED = "as text, and the ids that the engine makes of it are compared"
    IDS = "its ids go along"


class IdKind(NamedTuple):
    """Requests whose prompts a server makes in the same way."""

    model: str
    url: str
    version: str
    path: str
    members: frozenset[str]
    """Those of the body: which of tools, system prompt, thinking and the like it has."""
    after_tool: bool
    """Whether the prompt ends in the results of tools."""


class _Proof(Struct):
    equal: int = 0
    """Requests that were equal in succession, up to ``PROOFS``."""
    since: int = 0
    """Requests since the last comparison."""
    silent: int = 0
    """Answers since then that did not show what was asked for."""


class IdProofs:
    """What is proven, by kind of request."""

    def __init__(self) -> None:
        self._proofs: OrderedDict[IdKind, _Proof] = OrderedDict()
        self._off: dict[str, ModelFinding] = {}

    def sending(self, kind: IdKind) -> Sending:
        """Return how the next request of a kind is sent."""
        if kind.model in self._off:
            return Sending.TEXT
        proof = self._proofs.get(kind)
        if proof is None:
            proof = self._proofs[kind] = _Proof()
            if len(self._proofs) > KINDS_MAX:
                self._proofs.popitem(last=False)
        else:
            self._proofs.move_to_end(kind)
        is_proven, is_silent = proof.equal >= PROOFS, proof.silent >= SILENT_MAX
        if not (is_proven or is_silent):
            return Sending.CHECKED
        proof.since += 1
        if proof.since >= CHECKED_EVERY:
            if is_silent:
                proof.since = 0
            return Sending.CHECKED
        return Sending.TEXT if is_silent else Sending.IDS

    def equal(self, kind: IdKind) -> None:
        """Take note that the engine made the same ids of a request."""
        proof = self._proofs.get(kind)
        if proof is not None:
            proof.equal = min(PROOFS, proof.equal + 1)
            proof.since = proof.silent = 0

    def silent(self, kind: IdKind) -> None:
        """Take note that an answer did not show the ids that were asked for."""
        proof = self._proofs.get(kind)
        if proof is not None:
            proof.silent += 1

    def differ(self, kind: IdKind, why: str) -> None:
        """Take note that it made others: no ids are sent for the model from now on."""
        self._turn_off(
            kind,
            "prompt-ids-differ",
            "the engine makes other token ids of a prompt than the router, so it gets prompts as text alone",
            why,
            "give router and engine the same model files and chat template, and restart the router; "
            "if they have the same, report the evidence",
        )

    def refused(self, kind: IdKind, status: int) -> None:
        """Take note that a server refused a body for its ids."""
        self._turn_off(
            kind,
            "prompt-ids-refused",
            "the engine refuses token ids of a prompt whose text it takes, so it gets prompts as text alone",
            f"status {status} with ids, and an answer without",
            "give router and engine the same model files, then restart the router",
        )

    def findings(self) -> list[ModelFinding]:
        """Return for which models no ids are sent, and why."""
        return list(self._off.values())

    def _turn_off(self, kind: IdKind, cause: str, meaning: str, why: str, fix: str) -> None:
        if len(self._off) < OFF_MAX:
            evidence = [f"{kind.path} at {kind.url}: {why}"]
            finding = ModelFinding(
                model=kind.model, cause=cause, is_fault=True, meaning=meaning, evidence=evidence, fix=fix
            )
            self._off.setdefault(kind.model, finding)


class IdVerdict(NamedTuple):
    """What an answer shows of a prompt's ids."""

    is_equal: bool | None
    """``None``: nothing."""
    why: str = ""


UNSHOWN: Final = IdVerdict(None)
EQUAL: Final = IdVerdict(True)


def compare(form: IdForm, token_ids: bytes, notes: AnswerNotes, promised_tokens: int) -> IdVerdict:
    """Compare the ids of a prompt that went as text with what its answer reports.

    ``promised_tokens`` is what the server was to reuse, where that is known from its own events; else 0.
    """
    count = len(token_ids) // 4
    if form.asked and notes.prompt_token_ids is not None:
        return _compare_ids(_listed(token_ids), notes.prompt_token_ids)
    if notes.prompt_tokens is not None and notes.prompt_tokens != count:
        return IdVerdict(False, f"it counts {notes.prompt_tokens} prompt tokens, the router {count}")
    if form.asked:
        return UNSHOWN
    is_proven = (
        notes.prompt_tokens is not None
        and notes.cached_tokens == promised_tokens
        and promised_tokens >= LEAST_SHARE * count
    )
    return EQUAL if is_proven else UNSHOWN


def _compare_ids(own: list[int], shown: bytes) -> IdVerdict:
    try:
        other = msgspec.json.decode(shown, type=list[int])
    except msgspec.MsgspecError:
        return UNSHOWN
    if own == other:
        return EQUAL
    at = next((at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    if at == min(len(own), len(other)):
        return IdVerdict(False, f"it has {len(other)} ids, the router {len(own)}")
    return IdVerdict(False, f"id {at} of {len(other)} is {other[at]}, at the router {own[at]}")
