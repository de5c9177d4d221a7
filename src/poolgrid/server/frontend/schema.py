"""The request bodies of ``/v1/chat/completions`` and ``/v1/completions``, parsed in one pass over the bytes.

Unknown fields are accepted and ignored, as OpenAI's API does, so that a newer client library keeps working. Fields that
are known elsewhere and would change the answer, but are not served here, are refused by name (``refused``).
A body that does not fit gives one ``RequestError`` naming the field by its JSON path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from poolgrid.kernel.wire.limits import (
    IDENTIFIER_BYTES_MAX,
    LOGITS_PROCESSORS_MAX,
    RETAINED_RANGES_MAX,
    STOP_TOKENS_MAX,
    U32_MAX,
)
from poolgrid.kernel.wire.requests import RETENTION_DEFAULT
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.field_words import FOR_ENGINE, allowed, body_type, loosen, refused, words_at

LOGPROBS_PER_TOKEN_MAX = 20
"""OpenAI's limit of ``top_logprobs``."""

LOGIT_BIAS_MAX = 1024
"""Entries of ``logit_bias``; OpenAI takes 300, and every engine step applies each of them."""

CUSTOM_ARGUMENT = "input"
"""The one argument of the function that stands for a custom tool: the text of the call."""

JSON_NUMBER_MAX = 2**63 - 1
JSON_NUMBER_MIN = -(2**63)

TokenId = Annotated[int, Meta(ge=0, le=U32_MAX, extra={"plural": "token ids"})]
Count = Annotated[int, Meta(ge=1, le=U32_MAX)]
TopK = Annotated[int, Meta(ge=-1, le=U32_MAX), allowed("an integer from 1, or 0 or -1 for no limit")]
ToolChoice = Annotated[Any, allowed("none, auto, required or an object that names a function")]
Position = Annotated[int, Meta(ge=0, le=U32_MAX)]
RetentionPriority = Annotated[int, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2), FOR_ENGINE]
BadWords = Annotated[Any, refused("engines forbid tokens, not words; use logit_bias with -100", [])]
AllowedTokens = Annotated[Any, refused("use logit_bias, or a guide such as guided_choice")]
TruncatedPrompt = Annotated[Any, refused("a prompt that does not fit is refused, not shortened")]
PlainPriority = Annotated[
    Any, refused("servers differ in whether low or high goes first; use nvext.agent_hints.priority, high first", 0)
]


class StreamOptions(Struct, frozen=True):
    """Content of a stream in addition to text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Counts so far in every chunk, with ``include_usage``."""


class AgentHints(Struct, frozen=True):
    """What an agent knows of its own request."""

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    osl: Count | None = None
    """Output tokens that the client expects."""


class TokenRangeRetention(Struct, frozen=True):
    """A range of prompt tokens and how long its blocks stay cached, in TensorRT-LLM's words."""

    token_start: Position
    token_end: Position | None = None
    """Exclusive; none = to the end of the prompt."""
    priority: RetentionPriority = RETENTION_DEFAULT
    duration_ms: Count | None = None


class KvCacheRetention(Struct, frozen=True):
    """How long a request's blocks stay cached, in TensorRT-LLM's words."""

    token_range_retention_configs: Annotated[
        Annotated[list[TokenRangeRetention], Meta(max_length=RETAINED_RANGES_MAX)] | None,
        allowed(f"a list of up to {RETAINED_RANGES_MAX} ranges"),
    ] = None
    decode_retention_priority: RetentionPriority = RETENTION_DEFAULT
    decode_duration_ms: Count | None = None
    transfer_mode: Annotated[Any, allowed("null: the engine's configuration sets where KV is offloaded to")] = None
    directory: Annotated[Any, allowed("null: the engine's configuration sets where KV is offloaded to")] = None


class LatencyTargets(Struct, frozen=True, forbid_unknown_fields=True):
    """``extra_args``: latency targets in milliseconds, as Dynamo's global router takes them."""

    ttft_target: Annotated[float, Meta(ge=0)] | None = None
    itl_target: Annotated[float, Meta(ge=0)] | None = None


class Nvext(Struct, frozen=True):
    """Extensions by the name that the field's clients already send.

    What only helps to route or to trace is ignored, but for the session in ``agent_context`` and ``session_control``.
    """

    ignore_eos: bool | None = None
    top_k: TopK | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    agent_hints: AgentHints | None = None
    router: Annotated[Any, allowed("an object")] = None
    """Latency targets; read (and refused, if they are wrong) by the router that has a use for them."""
    cache_salt: Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)] | None = None
    guided_decoding: Annotated[Any, allowed("an object with json, regex, grammar, choice or structural_tag")] = None
    """A guide, by kind (``json``, ``regex``, ``grammar``, ``choice``)."""
    kv_cache_retention_config: Annotated[
        KvCacheRetention | None, allowed('an object such as {"decode_retention_priority": 20}')
    ] = None
    guided_json: Annotated[Any, allowed("a JSON schema, an object")] = None
    guided_regex: Annotated[Any, allowed("a regular expression")] = None
    guided_choice: Annotated[Any, allowed("a list of strings that are not empty")] = None
    guided_grammar: Annotated[Any, allowed("a grammar in EBNF")] = None
    annotations: list[str] | None = None
    """Those that ask for events next to the answer are ignored."""
    guided_decoding_backend: Annotated[Any, refused("workers are started with one")] = None
    guided_whitespace_pattern: Annotated[Any, refused("use guided_regex or guided_grammar")] = None
    extra_fields: Annotated[
        Any, refused("answers have no nvext; /v1/decisions/{id} has workers and times, logprobs the tokens", [])
    ] = None
    metadata_upload: Annotated[Any, refused("answers are sent to the client only")] = None
    cache_control: Annotated[Any, allowed('an object such as {"type": "ephemeral"}')] = None
    agent_context: Annotated[Any, allowed("an object with session_id")] = None
    session_control: Annotated[Any, allowed("an object with session_id")] = None
    use_raw_prompt: Annotated[Any, refused("use /v1/completions", False)] = None
    token_data: Annotated[Any, refused("use a token array as the prompt of /v1/completions")] = None
    backend_instance_id: Annotated[Any, refused("the router chooses the worker")] = None
    prefill_worker_id: Annotated[Any, refused("the router chooses the worker")] = None
    decode_worker_id: Annotated[Any, refused("the router chooses the worker")] = None
    dp_rank: Annotated[Any, refused("the router chooses the worker and its rank")] = None
    prefill_dp_rank: Annotated[Any, refused("the router chooses the worker and its rank")] = None
    max_thinking_tokens: Annotated[Any, refused("reasoning is not limited separately")] = None
    greed_sampling: Annotated[Any, refused("use temperature 0", False)] = None


class PromptCacheOptions(Struct, frozen=True):
    """OpenAI's wishes for its prompt cache."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] | None = None


class LogitsProcessorField(Struct):
    """A logits processor that the workers' operator registered."""

    name: Annotated[
        str,
        Meta(min_length=1, max_length=IDENTIFIER_BYTES_MAX),
        allowed("the name of a processor that the workers have"),
    ]
    arguments: dict[str, Any] = {}


class Thinking(Struct):
    """Whether the model is to reason before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0, le=U32_MAX)] | None = None
    display: str | None = None
    """``omitted`` leaves the reasoning out of the answer; every other word shows it as it was written."""


class ReasoningOptions(Struct):
    """Whether and how much the model is to reason."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None


AnyThinking = Annotated[Thinking | bool | None, allowed('an object such as {"type": "disabled"}, true or false')]
AnyReasoning = Annotated[ReasoningOptions | None, allowed('an object such as {"effort": "low"} or {"enabled": false}')]


class SamplingFields(Struct, kw_only=True):
    """The fields that the bodies of every API share, with one meaning: ``shared_fields`` copies them."""

    # Those of a plain body (USUAL) come first, so that all others are looked at together.
    model: str
    stream: bool | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=JSON_NUMBER_MIN, le=JSON_NUMBER_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX // 2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=U32_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1), FOR_ENGINE] | None = None
    cache_salt: Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)] | None = None
    nvext: Nvext | None = None
    extra_args: Annotated[
        LatencyTargets | None, allowed("an object with ttft_target and itl_target in milliseconds")
    ] = None
    # Whether to reason, as several engines and vendors name it (reasoning_switch.py).
    enable_thinking: bool | None = None
    think: Annotated[bool | str | None, allowed("true, false or an effort such as low")] = None
    # How long to keep the prompt's KV (session_fields.py).
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, allowed('an object such as {"ttl": "30m"}')] = None
    # Of these only names of sessions are read (session_fields.py).
    prompt_cache_key: Annotated[Any, allowed("a string")] = None
    metadata: Annotated[Any, allowed("an object of strings")] = None
    conversation_params: Annotated[Any, allowed("an object with conversation_id")] = None


def shared_fields(body: SamplingFields) -> dict[str, Any]:
    """Return the fields that a body of any API shares with that of a chat."""
    return {name: getattr(body, name) for name in SamplingFields.__struct_fields__}


class InferenceBody(SamplingFields, kw_only=True):
    """The fields that both endpoints share."""

    stream_options: Annotated[StreamOptions | None, allowed('an object such as {"include_usage": true}')] = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=U32_MAX)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2), FOR_ENGINE] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=LOGIT_BIAS_MAX),
            allowed(f"an object of at most {LOGIT_BIAS_MAX} token ids, each with a number from -100 to 100"),
        ]
        | None
    ) = None
    add_special_tokens: bool | None = None
    logits_processors: (
        Annotated[
            list[LogitsProcessorField],
            Meta(max_length=LOGITS_PROCESSORS_MAX),
            allowed(
                f'a list of at most {LOGITS_PROCESSORS_MAX} objects such as {{"name": "banned_tokens", "arguments": '
                '{"token_ids": [7]}}'
            ),
        ]
        | None
    ) = None
    # Guides towards structured output: see guides.py.
    response_format: Annotated[
        Any, allowed("an object with the type text, json_object, json_schema, regex, ebnf or structural_tag")
    ] = None
    guided_json: Annotated[Any, allowed("a JSON schema, an object")] = None
    guided_regex: Annotated[Any, allowed("a regular expression")] = None
    guided_choice: Annotated[Any, allowed("a list of strings that are not empty")] = None
    guided_grammar: Annotated[Any, allowed("a grammar in EBNF")] = None
    structural_tag: Annotated[Any, allowed("an object")] = None
    structured_outputs: Annotated[Any, allowed("an object with json, regex, grammar, choice or structural_tag")] = None
    # Known elsewhere, refused here when they ask for something.
    use_beam_search: Annotated[Any, refused("sequences are sampled; use n", False)] = None
    prompt_logprobs: Annotated[Any, refused("engines report log probabilities of generated tokens only")] = None
    include_stop_str_in_output: Annotated[Any, refused("a stop string is never part of the output", False)] = None
    skip_special_tokens: Annotated[Any, refused("special tokens are never part of the output", True)] = None
    return_token_ids: Annotated[Any, refused("answers are text", False)] = None
    return_tokens_as_token_ids: Annotated[Any, refused("answers are text", False)] = None
    bad_words: BadWords = None
    allowed_token_ids: AllowedTokens = None
    truncate_prompt_tokens: TruncatedPrompt = None
    priority: PlainPriority = None
    thinking_token_budget: Annotated[Any, refused("reasoning is not limited separately")] = None
    regex: Annotated[Any, refused("use guided_regex")] = None
    ebnf: Annotated[Any, refused("use guided_grammar")] = None


class ImageUrl(Struct):
    """Where an image is; ``detail`` and other fields of clients are for the engine's own resizing to decide."""

    url: str


class ContentPart(Struct):
    """One part of a message's content: text, or an image by its URL."""

    type: Annotated[str, allowed("text or image_url")]
    text: str | None = None
    image_url: Annotated[
        ImageUrl | str | None, allowed('an object such as {"url": "https://..."}, or the URL alone')
    ] = None
    refusal: str | None = None
    """The text of a part of the type ``refusal``, which an assistant wrote earlier."""
    thinking: Annotated[Any, allowed("a string or a list of text parts")] = None
    """The text of a part of the type ``thinking`` of an assistant; that of ``reasoning`` is in the next field."""
    reasoning: Annotated[Any, allowed("a string or a list of text parts")] = None
    file: Annotated[Any, allowed("an object with file_data, a data URL of text")] = None

    def __post_init__(self) -> None:
        if self.type == "refusal":
            self.type, self.text = "text", self.refusal


class PlacedPart(ContentPart):
    """A part that the client wrote elsewhere than in a message; never decoded."""

    place: str = ""
    """Its JSON path in the client's own body, for error messages."""


class Function(Struct):
    """The function of an earlier tool call."""

    name: Annotated[str, Meta(min_length=1), allowed("the name of a function")]
    arguments: str | dict[str, Any] = ""


class CustomCall(Struct):
    """The custom tool of an earlier call, and the text that it was called with."""

    name: str
    input: str = ""


class ToolCall(Struct):
    """An earlier tool call of the assistant, as OpenAI writes it; that of a custom tool becomes one of a function."""

    function: Function = msgspec.field(default_factory=lambda: Function(""))
    id: str | None = None
    type: str = "function"
    custom: CustomCall | None = None

    def __post_init__(self) -> None:
        if self.custom is not None:
            self.function = Function(self.custom.name, {CUSTOM_ARGUMENT: self.custom.input})
            self.type, self.custom = "function", None
        elif not self.function.name:
            raise ValueError("Object missing required field `function`")


class Message(Struct, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[ContentPart] | None, allowed("a string, a list of text and image parts or null")] = (
        None
    )
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of ``reasoning_content``, as ``thinking`` is."""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Function | None = None
    """The assistant's one call before there were ``tool_calls``; its result has the role ``function``."""


class ChatBody(InferenceBody, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1), allowed("a list of at least one message")]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_PER_TOKEN_MAX)] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: AnyReasoning = None
    thinking: AnyThinking = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None
    """Dynamo's name of ``chat_template_kwargs``."""
    chat_template: Annotated[Any, refused("the model's own template is used; no template is taken from requests")] = (
        None
    )
    functions: Annotated[Any, refused("use tools", [])] = None
    function_call: Annotated[Any, refused("use tools and tool_choice", "none", "auto")] = None
    audio: Annotated[Any, refused("only text is served")] = None
    modalities: Annotated[Any, refused("only text is served", [], ["text"])] = None
    web_search_options: Annotated[Any, allowed("an object")] = None
    """Left out and reported, as hosted tools are."""
    mm_processor_kwargs: Annotated[Any, refused("only text is served")] = None
    echo: Annotated[Any, refused("a chat prompt is not repeated; use /v1/completions", False)] = None
    include_reasoning: Annotated[Any, refused("reasoning is always in the answer, as reasoning_content", True)] = None
    separate_reasoning: Annotated[Any, refused("reasoning is always separate, as reasoning_content", True)] = None


class CompletionBody(InferenceBody, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: Annotated[
        str | list[TokenId | str | list[TokenId]],
        allowed("a string, a list of strings, a list of token ids or a list of such lists"),
    ]
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_PER_TOKEN_MAX)] | None = None
    echo: bool | None = None
    max_tokens: (
        Annotated[int, Meta(ge=0, le=U32_MAX), allowed("an integer from 1, or with echo also 0 for the prompt alone")]
        | None
    ) = None
    best_of: Any = None
    suffix: Annotated[Any, refused("text is only continued, not filled in", "")] = None
    prompt_embeds: Annotated[Any, refused("prompts are text or token ids")] = None


Body = TypeVar("Body", bound=Struct)

chat_decoder = msgspec.json.Decoder(ChatBody)
completion_decoder = msgspec.json.Decoder(CompletionBody)

USUAL = frozenset({
    "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
    "seed", "ignore_eos",
})  # fmt: skip
"""Fields that a plain body may have."""


def _unusual(kind: type[InferenceBody]) -> tuple[tuple[slice, tuple[None, ...]], ...]:
    """Return where the fields are that a plain body leaves out, and what is found there in one."""
    names = kind.__struct_fields__
    runs: list[tuple[int, int]] = []
    for place, name in enumerate(names):
        if name not in USUAL:
            if runs and runs[-1][1] == place:
                runs[-1] = (runs[-1][0], place + 1)
            else:
                runs.append((place, place + 1))
    return tuple((slice(first, end), (None,) * (end - first)) for first, end in runs)


_UNUSUAL = {kind: _unusual(kind) for kind in (ChatBody, CompletionBody)}
_AT = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"missing required field `(.*)`")


def is_plain(body: ChatBody | CompletionBody) -> bool:
    """Return whether a body asks for nothing beyond ``USUAL``. Nearly every one does: one look in the place of one for
    each field."""
    values = msgspec.structs.astuple(body)
    for where, nothing in _UNUSUAL[type(body)]:  # noqa: SIM110 - a generator costs what it compares
        if values[where] != nothing:
            return False
    return True


Inference = TypeVar("Inference", ChatBody, CompletionBody)


def parse_inference(decoder: msgspec.json.Decoder[Inference], body: bytes) -> tuple[Inference, bool]:
    """Parse a body of chat or of a completion, and tell whether it is plain; raises ``RequestError``."""
    parsed = parse(decoder, body)
    plain = is_plain(parsed)
    if not plain:
        refuse(parsed)
    return parsed, plain


def parse(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Parse a body; raises ``RequestError`` that names the field which does not fit."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error) and "got `null`" not in str(error):
                raise
            return _as_meant(body, decoder)
    except msgspec.ValidationError as error:
        raise _explain(error, body, body_type(decoder)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            400, "invalid_json", f"reading the request body ({len(body)} bytes): it is not valid JSON: {error}"
        ) from None
    except RecursionError:
        raise RequestError(
            400, "invalid_json", f"reading the request body ({len(body)} bytes): it is nested too deeply"
        ) from None


def _as_meant(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Parse a body that has ``null`` in fields that could be absent, or integers written as ``2.0``, which JavaScript,
    Lua and YAML do not tell apart from 2."""
    value = msgspec.json.decode(body)
    loosen(body_type(decoder), value)
    return msgspec.convert(value, decoder.type, str_keys=True)


NVEXT_ALIASES = ("ignore_eos", "top_k", "repetition_penalty")
"""Fields of ``nvext`` that older clients send for those of the body."""


def settle_aliases(body: SamplingFields) -> None:
    """Fill in fields that a body gives by another name; raises ``RequestError`` where both names differ."""
    nvext = body.nvext
    for name in NVEXT_ALIASES if nvext is not None else ():
        _settle(body, name, f"nvext.{name}", getattr(nvext, name))
    _settle(body, "chat_template_kwargs", "chat_template_args", getattr(body, "chat_template_args", None))


def _settle(body: SamplingFields, name: str, alias: str, value: Any) -> None:
    if value is None:
        return
    known = getattr(body, name)
    if known is not None and known != value:
        raise invalid(alias, f"{alias} is {quoted(value)} and {name} is {quoted(known)}: they mean the same, give one")
    setattr(body, name, value)


@cache
def refusals_of(body: type) -> Mapping[str, tuple[str, tuple[object, ...]]]:
    """Return the fields of a body that are refused: why, and the values that ask for nothing (``null`` always does)."""
    told = {name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(body, include_extras=True).items()}
    metas = ((name, each.extra) for name, given in told.items() for each in given if isinstance(each, Meta))
    return {name: (extra["refused"], extra["inert"]) for name, extra in metas if extra and "refused" in extra}


def refuse(parsed: Struct, where: str = "") -> None:
    """Refuse by name what a body asks for and is not served."""
    for name, (reason, inert) in refusals_of(type(parsed)).items():
        value = getattr(parsed, name)
        if value is not None and not _asks_for_nothing(value, inert):
            raise unsupported(where + name, f"{reason} (got {quoted(value)})")
    nvext = getattr(parsed, "nvext", None)
    if nvext is not None:
        refuse(nvext, "nvext.")
        for each in nvext.annotations or ():
            if each.startswith("query_instance_id"):
                raise unsupported("nvext.annotations", f"ask POST /v1/route where it would go (got {quoted(each)})")


def _asks_for_nothing(value: object, inert: tuple[object, ...]) -> bool:
    # In Python 0 is False and 1 is True; in JSON they are not.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in inert)


def _explain(error: msgspec.ValidationError, body: bytes, kind: type) -> RequestError:
    """Name the field of a validation error, its value and what is allowed there."""
    match = _AT.match(str(error))
    assert match is not None, "the pattern matches any text"
    what = match["what"]
    path = (match["path"] or "").lstrip(".")
    missing = _MISSING.search(what)
    if missing is not None:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(
            param, f"{param} is missing: {_allowed(kind, param, 'it is required')}", "missing_required_parameter"
        )
    if not path:
        return invalid("body", f"the request body must be a JSON object: {what}", "invalid_type")
    code = "invalid_type" if what.startswith("Expected") and ", got" in what else "invalid_value"
    if match["key"]:
        return invalid(path, f"a key of {path} is not allowed: {_allowed(kind, path, what)}", code)
    return invalid(
        path, f"{path} is {_value_at(body, path)}: {_allowed(kind, path, what)}. The request was not run.", code
    )


def _allowed(kind: type, path: str, otherwise: str) -> str:
    words = words_at(kind, path)
    return f"allowed is {words}" if words is not None else otherwise[0].lower() + otherwise[1:]


def _value_at(body: bytes, path: str) -> str:
    """Quote the value at a JSON path; only called for bodies that were refused, so the second parse may cost."""
    try:
        value = msgspec.json.decode(body)
        for step in _STEP.finditer(f".{path}"):
            value = value[step[1]] if step[1] is not None else value[int(step[2])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return "not allowed"
    return quoted(value)
