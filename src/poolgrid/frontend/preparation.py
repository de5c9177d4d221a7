"""From a request body to the sequences that a router is asked for: model, prompts, sampling, limits, all checked.

Nothing here waits or talks to a router. ``Preparation.chat`` and ``Preparation.completion`` parse and check a body and
return a ``Job``; ``Job.tokenize`` is the only costly part, and pure, so that it can run in a tokenizer thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import msgspec

from poolgrid.frontend.answer_form import AnswerForm
from poolgrid.frontend.call_ids import CallIds
from poolgrid.frontend.chat_template import TemplateFailure, TemplateTooSlow
from poolgrid.frontend.errors import ContextOverflow, RequestError, invalid, quoted, unsupported
from poolgrid.frontend.guides import Guide, guide_of
from poolgrid.frontend.media.conversation import find_media, with_media
from poolgrid.frontend.media.references import MediaReference
from poolgrid.frontend.message_adaptation import adapt, adapt_tools, is_malformed, write_as_tool_calls
from poolgrid.frontend.messages_api.conversation import chat_body as chat_of_messages
from poolgrid.frontend.messages_api.encoder import MessagesForm
from poolgrid.frontend.messages_api.schema import CountedBody, MessagesBody
from poolgrid.frontend.model_forms import ModelForm, ModelForms, template_source
from poolgrid.frontend.parsed_answers import ParsedChatEncoder
from poolgrid.frontend.parsers.custom_calls import CustomCalls
from poolgrid.frontend.parsers.formats import PROMPT_END_CHARS, OutputFormat, ToolUse
from poolgrid.frontend.parsers.pieces import OutputParser
from poolgrid.frontend.prompt import Prompt
from poolgrid.frontend.prompt_encoder import Lookup
from poolgrid.frontend.prompt_model import PromptModel, PromptModels
from poolgrid.frontend.request_ids import base_name
from poolgrid.frontend.responses import AnswerEncoder
from poolgrid.frontend.responses_api.conversation import Items
from poolgrid.frontend.responses_api.conversation import chat_body as chat_of_responses
from poolgrid.frontend.responses_api.kept import ResponsesForm
from poolgrid.frontend.responses_api.schema import REFUSED_RESPONSES, ResponsesBody
from poolgrid.frontend.retention import check_retention, for_prompt
from poolgrid.frontend.schema import (
    JSON_NUMBER_MAX,
    ChatBody,
    CompletionBody,
    InferenceBody,
    Message,
    Nvext,
    parse,
    parse_chat,
    parse_completion,
    refuse,
)
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.frontend.template_probes import capabilities_of
from poolgrid.frontend.tools import NO_TOOLS, beside_calls, custom_text, plain_choice, read_tools, tool_use
from poolgrid.inference.cache_domain import CacheDomain
from poolgrid.inference.inference_request import NO_HINTS, InferenceRequest
from poolgrid.inference.ports import InferenceBackend, ServedModel
from poolgrid.wire.hashing import TOKEN_BYTES, pack_tokens, stable_u64
from poolgrid.wire.limits import LOGITS_ARGUMENT_BYTES_MAX
from poolgrid.wire.multimodal import MediaItem
from poolgrid.wire.request_ids import name_of
from poolgrid.wire.requests import KvRetention, LogitsProcessorCall, Sampling

COMPLETION_MAX_TOKENS_DEFAULT: Final = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat answer may fill the context instead."""


class _Sighted:
    """A prompt whose text is there, and what is known of it."""

    __slots__ = ("lookup", "text")

    def __init__(self, text: str, lookup: Lookup | None) -> None:
        self.text = text
        self.lookup = lookup

    @property
    def text_bytes(self) -> int:
        """Return about how much text is still to be tokenized."""
        if self.lookup is not None:
            return self.lookup.text_bytes
        return len(self.text) if self.text.isascii() else 3 * len(self.text)


@final
class Job:
    """What one body asks for, checked, with its prompts still text.

    A body of another API comes as the chat body that means the same, with the form of its answer.
    """

    # Not a struct: what is asked for so often is a plain place in memory where it is compiled.
    __slots__ = (
        "body",
        "chat",
        "choices_per_prompt",
        "client_salt",
        "continued",
        "domain",
        "earlier_calls",
        "form",
        "guide",
        "guide_param",
        "has_text",
        "is_plain",
        "items",
        "logprobs",
        "lora_name",
        "max_sequence_length",
        "media",
        "model",
        "output_format",
        "output_model",
        "own_salt",
        "prompt_only",
        "retention",
        "served",
        "settings",
        "sighted",
        "stops",
        "tool_use",
        "tools",
    )

    def __init__(
        self,
        *,
        chat: bool,
        body: InferenceBody,
        model: PromptModel,
        served: ServedModel,
        lora_name: str,
        is_plain: bool,
        stops: tuple[str, ...],
        logprobs: int | None,
        settings: FrontendSettings,
        guide: Guide,
        guide_param: str,
        output_model: PromptModel,
        choices_per_prompt: int,
        client_salt: str,
        max_sequence_length: int,
        output_format: OutputFormat | None,
        tool_use: ToolUse | None,
        retention: KvRetention | None,
    ) -> None:
        self.chat = chat
        self.body = body
        self.model = model
        self.served = served
        self.lora_name = lora_name
        self.is_plain = is_plain
        """Nothing is asked for beyond what ``poolgrid.frontend.schema.USUAL`` names."""
        self.stops = stops
        self.logprobs = logprobs
        """Alternatives per token that the client wants; ``None`` = no log probabilities."""
        self.settings = settings
        self.guide = guide
        """What the output must keep to, as fields of ``Sampling``."""
        self.guide_param = guide_param
        """The field of the body that it is from."""
        self.output_model = output_model
        """``model``, with those special tokens shown that the parsers of the output look for."""
        self.choices_per_prompt = choices_per_prompt
        """``n``."""
        self.client_salt = client_salt
        """The cache salt that the client wrote, or an empty one."""
        self.max_sequence_length = max_sequence_length
        """How many tokens a prompt and its answer may have together."""
        self.output_format = output_format
        """How the output is taken apart; ``None`` = it is content as it is."""
        self.tool_use = tool_use
        self.tools = NO_TOOLS
        """The tools that the client declared."""
        self.retention = retention
        """How long its blocks stay cached, where the client says so."""
        self.prompt_only = False
        """Whether the answer is the prompt (``echo``) and no token more (``max_tokens`` 0)."""
        self.has_text = True
        """Whether the tokenizer has work to do: packing a token array is not worth a thread."""
        self.form: AnswerForm | None = None
        """The form of the answer where it is not chat's or that of a completion."""
        self.earlier_calls = 0
        """Tool calls in the messages."""
        self.continued: str | None = None
        """The words of the assistant that the output goes on with, when the client asked for that."""
        self.media: tuple[MediaReference, ...] = ()
        """Media that the messages name, in order."""
        self.items: tuple[MediaItem, ...] = ()
        """The same, loaded; the caller sets them before ``look_up`` and ``tokenize``."""
        self.domain: CacheDomain | None = None
        """Whose it is, for caches; the caller sets it. Without one nothing is looked up or kept."""
        self.own_salt = ""
        """Takes the place of the salt that the client wrote."""
        self.sighted: Sequence[_Sighted] = ()
        """Prompts as ``look_up`` left them for ``tokenize``, in order."""

    @property
    def counts_in_chunks(self) -> bool:
        """Return whether each chunk of a stream carries the usage so far; only beside ``include_usage``."""
        options = self.body.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def prompt_param(self) -> str:
        return "messages" if self.chat else "prompt"

    def forget_prompt(self) -> None:
        """Drop the parsed prompt, which can be far larger than the packed one, for the time of the generation."""
        if self.media:
            self.media = self.items = ()
        if self.sighted:
            self.sighted = ()
        if isinstance(self.body, ChatBody):
            self.body.messages = []
        elif isinstance(self.body, CompletionBody):
            self.body.prompt = ""

    def look_up(self, limit_ms: float) -> int | None:
        """Do what is quick of ``tokenize``, and return about how many bytes of text are left for the tokenizer.

        ``None`` when rendering takes longer than ``limit_ms``: ``tokenize`` begins anew. Raises ``RequestError``.
        """
        body = self.body
        if isinstance(body, ChatBody):
            try:
                text = self._rendered(body, min(limit_ms, self.settings.template_time_limit_ms))
            except TemplateTooSlow:
                return None
            lookup = None if self.items else self.model.look_up(text, bool(body.add_special_tokens), self.domain)
            self.sighted = [_Sighted(text, lookup)]
        else:
            assert isinstance(body, CompletionBody), "there are two kinds of body"
            special = body.add_special_tokens is not False
            texts = [prompt for prompt, _ in _prompts(body) if isinstance(prompt, str)]
            self.sighted = [_Sighted(text, self.model.look_up(text, special, self.domain)) for text in texts]
        return sum(prompt.text_bytes for prompt in self.sighted)

    def tokenize(self) -> list[Prompt]:
        """Render and tokenize the prompts; raises ``RequestError``. Costly for long ones; touches no shared state."""
        body = self.body
        if isinstance(body, ChatBody):
            return [self._chat_prompt(body)]
        assert isinstance(body, CompletionBody), "there are two kinds of body"
        if isinstance(body.prompt, str):
            return [self._completion_prompt(body, body.prompt, "prompt", self.sighted[0] if self.sighted else None)]
        sighted = iter(self.sighted)
        return [
            self._completion_prompt(body, prompt, param, next(sighted, None) if isinstance(prompt, str) else None)
            for prompt, param in _prompts(body)
        ]

    def encoder(self, prompts: Sequence[Prompt], request_ids: Sequence[str], created_s: int) -> AnswerEncoder:
        """Return what turns output into the bytes of the answer."""
        request_id = base_name(request_ids)
        if self.form is not None:
            parser = None if self.output_format is None else self._parser(prompts[0])
            call_ids = self._call_ids(request_id)
            return self.form.encoder(request_ids, created_s, prompts[0].isl, self.output_model, parser, call_ids)
        options = self.body.stream_options
        include_usage = options is not None and options.include_usage
        if self.output_format is None:
            return AnswerEncoder(
                chat=self.chat,
                request_id=request_id,
                model_name=self.body.model,
                created_s=created_s,
                model=self.output_model,
                include_usage=include_usage,
            )
        return ParsedChatEncoder(
            request_id=request_id,
            new_parser=partial(self._parser, prompts[0]),
            call_ids=self._call_ids(request_id),
            model_name=self.body.model,
            created_s=created_s,
            model=self.output_model,
            include_usage=include_usage,
            custom=self.tools.custom,
        )

    def _call_ids(self, request_id: str) -> CallIds:
        return CallIds(request_id, "" if self.output_format is None else self.output_format.tools, self.earlier_calls)

    def _leaves_no_room_to_reason(self) -> bool:
        """Return whether the engine was told to write JSON, or the client's answer or calls."""
        return "guided_json" in self.guide or ("structural_tag" in self.guide and self.tool_use is not None)

    def _parser(self, prompt: Prompt) -> OutputParser:
        assert self.output_format is not None, "only asked for formats that need one"
        parser = self.output_format.parser(
            self.tool_use, prompt.end, guided=self._leaves_no_room_to_reason(), continued=self.continued
        )
        assert parser is not None, "active, so there is a parser"
        custom = self.tools.custom
        return CustomCalls(parser, custom, custom_text) if custom else parser

    def requests(
        self, prompts: Sequence[Prompt], request_ids: Sequence[str], headers: Mapping[str, str] | None = None
    ) -> list[InferenceRequest]:
        """Return one request per prompt and choice, in the order of their ``index``; raises ``RequestError``."""
        body = self.body
        per_prompt = self.choices_per_prompt
        salt = self.own_salt or self.client_salt
        stop_token_ids = self._stop_token_ids()
        nvext = None if self.is_plain else body.nvext
        hints = nvext.agent_hints if nvext is not None else None
        priority = hints.priority or 0 if hints is not None else 0
        expected = hints.osl if hints is not None else None
        routing_hints = _hints(nvext, headers)
        seed = body.seed
        if seed is None and len(request_ids) > 1:
            # Without a seed of their own the choices of one request could all be the same text.
            seed = stable_u64(name_of(request_ids[0])) & 0x7FFF_FFFF
        # As ``SequenceOutput`` collects: neither events, nor stop strings to look for, nor log probabilities.
        read_whole = not body.stream and not self.stops and self.logprobs is None
        requests: list[InferenceRequest] = []
        for position, prompt in enumerate(prompts):
            sampling = self._sampling(prompt)
            retention = None if self.retention is None else for_prompt(self.retention, prompt.isl)
            for index in range(position * per_prompt, (position + 1) * per_prompt):
                requests.append(  # noqa: PERF401 - the seed is woven in step by step
                    InferenceRequest(
                        request_id=request_ids[index],
                        model=self.served.name,
                        token_ids=prompt.token_ids,
                        sampling=sampling
                        if seed is None
                        else msgspec.structs.replace(sampling, seed=_wrap_i64(seed + index)),
                        stop_token_ids=stop_token_ids,
                        priority=priority,
                        lora_name=self.lora_name,
                        cache_salt=salt,
                        cache_shares=None if self.domain is None else self.domain.shares,
                        expected_output_tokens=expected,
                        multimodal=prompt.multimodal,
                        read_whole=read_whole,
                        retention=retention,
                        hints=routing_hints,
                    )
                )
        return requests

    def _chat_prompt(self, body: ChatBody) -> Prompt:
        [sighted] = self.sighted or [_Sighted(self._rendered(body, self.settings.template_time_limit_ms), None)]
        text = sighted.text
        end = text[-PROMPT_END_CHARS:] if self.output_format is not None else ""
        special = bool(body.add_special_tokens)
        if self.items:
            packed, multimodal = with_media(text, self.items, self.served.media, self.model, special, self.domain)
            return Prompt(packed, end=end, multimodal=multimodal)
        if sighted.lookup is not None:
            return Prompt(self.model.complete(sighted.lookup), end=end)
        return Prompt(self.model.encode(text, special, self.domain), end=end)

    def _rendered(self, body: ChatBody, limit_ms: float) -> str:
        """Return the text of a chat prompt; raises ``RequestError``, and ``TemplateTooSlow`` when that is not final."""
        tools = body.tools if body.tool_choice != "none" else None
        template = self.model.tool_template if tools and self.model.tool_template else self.model.template
        if template is None:
            raise invalid(
                "model", f"{self.model.name} has no chat template: use /v1/completions", code="no_chat_template"
            )
        takes = capabilities_of(template, bool(tools))
        try:
            messages = adapt(body.messages, takes, self.served.media.placeholder)
        except RecursionError:
            raise invalid("messages", "messages has arguments that are nested too deeply") from None
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        final = _final_words(body, messages) if body.continue_final_message else None
        try:
            text = template.render(
                messages,
                tools=adapt_tools(tools, takes),
                documents=body.documents,
                add_generation_prompt=body.add_generation_prompt is not False and final is None,
                variables=variables,
                max_chars=self.settings.max_prompt_chars,
                limit_ms=limit_ms,
            )
        except TemplateFailure as failure:
            if isinstance(failure, TemplateTooSlow) and limit_ms < self.settings.template_time_limit_ms:
                raise
            raise _malformed_arguments(body.messages) or invalid(
                "messages", f"{failure}. The request was not run.", code="chat_template_error"
            ) from failure
        return text if final is None else _up_to(text, final)

    def _completion_prompt(
        self, body: CompletionBody, prompt: str | list[int], param: str, sighted: _Sighted | None
    ) -> Prompt:
        if isinstance(prompt, str):
            if sighted is not None and sighted.lookup is not None:
                packed = self.model.complete(sighted.lookup)
            else:
                packed = self.model.encode(prompt, body.add_special_tokens is not False, self.domain)
            return Prompt(packed, prompt if body.echo else "")
        if len(prompt) >= self.max_sequence_length:
            raise self._too_long(len(prompt))  # before anything is done with each of them
        check_vocabulary(prompt, self.model.vocab_size, param)
        packed = pack_tokens(prompt)
        return Prompt(packed, self.model.decode(packed) if body.echo else "")

    def _stop_token_ids(self) -> tuple[int, ...]:
        body = self.body
        listed = None if self.is_plain else body.stop_token_ids
        own = tuple(dict.fromkeys(listed)) if listed else ()
        if body.ignore_eos:
            return own
        return own + tuple(token_id for token_id in self.model.eos_token_ids if token_id not in own)

    def _too_long(self, tokens: int) -> RequestError:
        param = self.prompt_param
        return self._overflow(
            param,
            tokens,
            None,
            f"{param} has {tokens} tokens, and at least one must be left for the answer. Shorten it",
        )

    def _overflow(self, param: str, isl: int, wanted: int | None, however: str) -> ContextOverflow:
        limit = self.max_sequence_length
        begins = f"This model's maximum context length is {limit} tokens. However, {however}."
        # litellm looks for how it begins. LangChain looks for the code, in what openai's client makes of the message.
        return ContextOverflow(
            param, limit, isl, wanted, f"{begins} The request was not run (context_length_exceeded)."
        )

    def _sampling(self, prompt: Prompt) -> Sampling:
        body, isl = self.body, len(prompt.token_ids) // TOKEN_BYTES
        room = self.max_sequence_length - isl
        if isl < 1:
            raise invalid(self.prompt_param, f"{self.prompt_param} is empty: allowed is a prompt of at least one token")
        if room < 1:
            raise self._too_long(isl)
        name, max_tokens = "max_tokens", body.max_tokens
        if isinstance(body, ChatBody):
            if body.max_completion_tokens is not None:
                name = "max_completion_tokens"
                max_tokens = body.max_completion_tokens
            elif max_tokens is None:
                max_tokens = room
        elif max_tokens is None:
            max_tokens = min(COMPLETION_MAX_TOKENS_DEFAULT, room)
        assert max_tokens is not None, "each kind of body has a default"
        if max_tokens > room:
            raise self._overflow(
                name,
                isl,
                max_tokens,
                f"you requested {isl + max_tokens} tokens ({isl} in the {self.prompt_param}, "
                f"{max_tokens} in the completion): allowed for {name} is 1 to {room}",
            )
        if self.is_plain:
            return Sampling(
                max_tokens=max(1, max_tokens),
                temperature=body.temperature,
                seed=body.seed,
                ignore_eos=bool(body.ignore_eos),
            )
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise invalid("min_tokens", f"min_tokens is {min_tokens}: allowed is 0 to {name} ({max_tokens})")
        top_k = body.top_k
        sampling = Sampling(
            # Engines read a prompt to generate: of nothing wanted they make one token, which nobody is shown.
            max_tokens=max(1, max_tokens),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=top_k if top_k is not None and top_k > 0 else None,
            min_p=body.min_p,
            seed=body.seed,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            repetition_penalty=body.repetition_penalty,
            min_tokens=min_tokens,
            ignore_eos=bool(body.ignore_eos),
            logprobs=self.logprobs,
            logit_bias=body.logit_bias or None,
            prompt_logprobs=self.logprobs if isinstance(body, CompletionBody) and body.echo else None,
            logits_processors=_logits_processors(body) if body.logits_processors else (),
        )
        # Not in the call: names that are not known beforehand make all others a dict first.
        return msgspec.structs.replace(sampling, **self.guide) if self.guide else sampling


_responses_decoder: Final = msgspec.json.Decoder(ResponsesBody)
_messages_decoder: Final = msgspec.json.Decoder(MessagesBody)
_counted_decoder: Final = msgspec.json.Decoder(CountedBody)


def parse_responses(raw: bytes) -> ResponsesBody:
    """Parse the body of a Responses request; raises ``RequestError``."""
    body = parse(_responses_decoder, raw)
    refuse(body, REFUSED_RESPONSES)
    if body.include and "message.output_text.logprobs" in body.include:
        raise unsupported("include", "use /v1/chat/completions for log probabilities")
    return body


class Preparation:
    """Checks bodies against what is served now."""

    def __init__(self, backend: InferenceBackend, models: PromptModels, settings: FrontendSettings) -> None:
        self._backend = backend
        self._settings = settings
        self.forms = ModelForms(models, settings)
        self._choices_max = settings.max_choices
        self._served: Sequence[ServedModel] = ()
        """What is served, as the backend said last: it says so with the same object until that changes."""
        self._known: dict[str, tuple[ServedModel, str, ModelForm]] = {}
        """What clients have meant by a name since then."""

    def chat(self, raw: bytes) -> Job:
        """Check the body of a chat request; raises ``RequestError``."""
        body, plain = parse_chat(raw)
        if plain:
            return self._job(body, chat=True, logprobs=None, prompts=1, guide={}, is_plain=True)
        return self.chat_job(body)

    def responses(self, body: ResponsesBody, earlier: Items, form: ResponsesForm | None = None) -> Job:
        """Check a Responses request that was parsed, with the items that it goes on from; raises ``RequestError``."""
        job = self.chat_job(chat_of_responses(body, earlier))
        if form is not None:
            form.tools = job.tools
            job.form = form
        return job

    def messages(self, raw: bytes) -> Job:
        """Check the body of a Messages request; raises ``RequestError``."""
        body = parse(_messages_decoder, raw)
        refuse(body, {})
        job = self.chat_job(chat_of_messages(body))
        job.form = MessagesForm(body)
        return job

    def counted_messages(self, raw: bytes) -> Job:
        """Check the body of a request to count the tokens of messages; raises ``RequestError``."""
        body = parse(_counted_decoder, raw)
        refuse(body, {})
        return self.chat_job(chat_of_messages(body))

    def chat_job(self, body: ChatBody) -> Job:
        """Check a chat request that is parsed already; raises ``RequestError``."""
        wanted: int | None = None
        if body.logprobs:
            wanted = body.top_logprobs or 0
        elif body.top_logprobs:
            raise invalid("top_logprobs", f"top_logprobs is {body.top_logprobs}: it needs logprobs to be true")
        if body.web_search_options is not None:
            body.tools = [*(body.tools or ()), {"type": "web_search_options"}]
        tools = read_tools(body.tools) if body.tools else NO_TOOLS
        body.tools = tools.shown or None
        body.tool_choice = plain_choice(body.tool_choice)
        use, guide = tool_use(tools, body.tool_choice, body.parallel_tool_calls)
        if body.continue_final_message and body.add_generation_prompt:
            raise invalid("continue_final_message", "continue_final_message is true: add_generation_prompt must not be")
        own, param = guide_of(body, body.nvext)
        if guide:
            own, param = guide, "tools"  # the model must call: what an answer were to be does not matter
        elif own and use is not None:
            form = self._found(body.model)[2]
            own = beside_calls(own, param, use, form.format, template_source(form.model))
        job = self._job(body, chat=True, logprobs=wanted, prompts=1, use=use, guide=own, guide_param=param)
        job.tools = tools
        return job

    def completion(self, raw: bytes) -> Job:
        """Check the body of a completion request; raises ``RequestError``."""
        body, plain = parse_completion(raw)
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens", "max_tokens is 0: allowed is an integer from 1, or with echo also 0")
        if plain:
            return self._job(body, chat=False, logprobs=None, prompts=_count_prompts(body), guide={}, is_plain=True)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise unsupported("best_of", f"no candidates are generated beyond n (got {quoted(body.best_of)})")
        guide, param = guide_of(body, body.nvext)
        return self._job(
            body, chat=False, logprobs=body.logprobs, prompts=_count_prompts(body), guide=guide, guide_param=param
        )

    def served(self, name: str) -> tuple[ServedModel, str] | None:
        """Return the served model that a client means by ``name``, and the LoRA adapter if it named one."""
        for served in self._backend.models():
            if served.name == name:
                return served, ""
            if name in served.loras:
                return served, name
        for served in self._backend.models():
            if name in served.aliases:
                return served, ""
        return None

    def only_model(self) -> str:
        """Return the name of the model that is served, for bodies that leave it out; raises ``RequestError``."""
        names = [served.name for served in self._backend.models()]
        if len(names) != 1:
            raise invalid(
                "model",
                f"model is missing: it may be left out where one is served, and here are {len(names)} ("
                f"{', '.join(names) or 'none now'})",
                "missing_required_parameter",
            )
        return names[0]

    def found(self, name: str) -> tuple[ServedModel, PromptModel]:
        """Return what is served by a name and its prompt model; raises ``RequestError``."""
        served, _, form = self._found(name)
        return served, form.model

    def _found(self, name: str) -> tuple[ServedModel, str, ModelForm]:
        served_now = self._backend.models()
        if served_now is not self._served:
            self._served = served_now
            self._known.clear()
        known = self._known.get(name)
        if known is not None:
            return known
        found = self.served(name)
        if found is None:
            if self.forms.loads(name):
                raise RequestError(
                    503, "no_worker", f"model {quoted(name)} has no worker now; try again later", param="model"
                )
            raise model_not_found(name, [served.name for served in self._backend.models()])
        served, lora_name = found
        form = self.forms.of(served)
        if form is None:
            raise RequestError(
                503, "no_prompt_model", f"model {quoted(served.name)} is served, but no tokenizer is loaded for it"
            )
        known = self._known[name] = served, lora_name, form
        return known

    def _job(
        self,
        body: InferenceBody,
        *,
        chat: bool,
        logprobs: int | None,
        prompts: int,
        guide: Guide,
        guide_param: str = "",
        use: ToolUse | None = None,
        is_plain: bool = False,
    ) -> Job:
        served, lora_name, form = self._found(body.model)
        model = form.model
        limit = self._choices_max
        choices = 1 if is_plain else body.n or 1
        nvext = None if is_plain else body.nvext
        sequences = choices * prompts
        if sequences > limit:
            raise invalid("n", f"n is {choices} for {prompts} prompt(s): allowed are {limit} sequences in one request")
        if not is_plain:
            if body.stop_token_ids:
                check_vocabulary(body.stop_token_ids, model.vocab_size, "stop_token_ids")
            if body.logit_bias:
                check_vocabulary(list(body.logit_bias), model.vocab_size, "logit_bias")
        output_model, output_format = model, None
        if chat and form.format.active(use):
            output_format = form.format
            output_model = form.showing(output_format.markers(use))
        job = Job(
            chat=chat,
            body=body,
            model=model,
            served=served,
            lora_name=lora_name,
            is_plain=is_plain,
            stops=() if is_plain or body.stop is None else self._stops(body.stop),
            logprobs=logprobs,
            settings=self._settings,
            guide=guide,
            guide_param=guide_param,
            output_model=output_model,
            choices_per_prompt=choices,
            client_salt="" if is_plain else body.cache_salt or (nvext.cache_salt if nvext is not None else None) or "",
            max_sequence_length=min(served.max_sequence_length, model.max_position_embeddings),
            output_format=output_format,
            tool_use=use,
            retention=_retention(nvext) if nvext is not None else None,
        )
        if isinstance(body, ChatBody):
            _note_messages(job, body)
        else:
            _note_prompts(job, body)
        return job

    def _stops(self, stop: str | list[str]) -> tuple[str, ...]:
        alone = isinstance(stop, str)
        stop = [stop] if isinstance(stop, str) else stop
        if len(stop) > self._settings.max_stop_strings:
            raise invalid("stop", f"stop has {len(stop)} strings: allowed are up to {self._settings.max_stop_strings}")
        for index, text in enumerate(stop):
            if len(text) > self._settings.max_stop_chars:
                param = "stop" if alone else f"stop[{index}]"
                raise invalid(
                    param, f"{param} has {len(text)} characters: allowed are up to {self._settings.max_stop_chars}"
                )
        return tuple(dict.fromkeys(filter(None, stop)))


def _note_messages(job: Job, body: ChatBody) -> None:
    """Note what a job must know of its messages once they are forgotten, and what they name."""
    messages = body.messages
    job.media = find_media(messages, job.served.media, body.model)
    for message in messages:
        if message.function_call is not None:
            write_as_tool_calls(messages)
        if message.tool_calls:
            job.earlier_calls += len(message.tool_calls)
    if body.continue_final_message:
        last = messages[-1].content if messages else None
        job.continued = last if isinstance(last, str) else ""


def _note_prompts(job: Job, body: InferenceBody) -> None:
    """Note what a job must know of a completion's prompts once they are forgotten."""
    assert isinstance(body, CompletionBody), "there are two kinds of body"
    prompt = body.prompt
    if body.max_tokens == 0:
        job.prompt_only = True
    if not isinstance(prompt, str):
        job.has_text = bool(body.echo) or any(isinstance(item, str) for item in prompt[:1])


def model_not_found(name: str, served: Sequence[str]) -> RequestError:
    """Return the 404 for a model that nobody serves, naming those that are."""
    names = ", ".join(served) or "none now"
    return RequestError(
        404, "model_not_found", f"model {quoted(name)} does not exist here; served: {names}", param="model"
    )


def _count_prompts(body: CompletionBody) -> int:
    """Return how many prompts a completion body has; raises ``RequestError`` for none, and for a mixture."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return 1
    if not prompt:
        raise invalid("prompt", "prompt is []: allowed is at least one prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("prompt", "prompt mixes kinds: allowed is a list of strings, of token ids or of lists of these")
    return 1 if kinds == {int} else len(prompt)


def _prompts(body: CompletionBody) -> list[tuple[str | list[int], str]]:
    """Return the prompts of a completion body that was counted, each with its JSON path."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if isinstance(prompt[0], int):
        return [(prompt, "prompt")]  # type: ignore[list-item]  # one kind: a list of token ids
    return [(item, f"prompt[{index}]") for index, item in enumerate(prompt) if not isinstance(item, int)]


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse token ids that the model does not have; the schema has already refused negative ones."""
    if token_ids and max(token_ids) >= vocab_size:
        index, token_id = next((at, value) for at, value in enumerate(token_ids) if value >= vocab_size)
        place = f"{param}.{token_id}" if param == "logit_bias" else f"{param}[{index}]"
        raise invalid(place, f"{place} is {token_id}: allowed are token ids from 0 to {vocab_size - 1}")


def _final_words(body: ChatBody, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what the assistant has said so far in the last message, which the answer is to go on with."""
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if final["role"] != "assistant" or not content or not content.strip() or body.messages[-1].tool_calls:
        raise invalid(
            "continue_final_message",
            "continue_final_message is true: the last message must be the assistant's, with text and no tool calls",
        )
    return str(content)


def _up_to(text: str, final: str) -> str:
    """Return a rendered prompt up to the end of its final message, as Hugging Face's tokenizers cut it."""
    stripped = final.strip()
    at = text.rfind(stripped)
    if at < 0:
        raise invalid(
            "continue_final_message",
            "continue_final_message is true, but the chat template does not show the last message as it is",
            code="chat_template_error",
        )
    kept = final.lstrip()
    return text[: at + len(kept)] if text.startswith(kept, at) else text[: at + len(stripped)]


def _malformed_arguments(messages: Sequence[Message]) -> RequestError | None:
    """Return what is wrong with the first call whose arguments are not JSON."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls or ()):
            arguments = call.function.arguments
            if is_malformed(arguments):
                param = f"messages[{index}].tool_calls[{number}].function.arguments"
                return invalid(
                    param,
                    f"{param} is {quoted(arguments)}: the chat template takes a JSON object only, as a string. "
                    "The request was not run.",
                )
    return None


def _hints(nvext: Nvext | None, headers: Mapping[str, str] | None) -> Mapping[str, Any]:
    """Return what the client asked of routing, for ``InferenceRequest.hints``."""
    hints: dict[str, Any] = {}
    if nvext is not None and (nvext.router is not None or nvext.agent_hints is not None):
        agent = nvext.agent_hints
        hints["nvext"] = {
            "router": nvext.router,
            "agent_hints": None if agent is None else {"priority": agent.priority, "osl": agent.osl},
        }
    if headers:
        hints["headers"] = headers
    return hints or NO_HINTS


def _retention(nvext: Nvext) -> KvRetention | None:
    asked = nvext.kv_cache_retention_config
    return None if asked is None else check_retention(asked)


def _logits_processors(body: InferenceBody) -> tuple[LogitsProcessorCall, ...]:
    """Return the processors that a body asks for; which names exist is for the worker to say."""
    calls = []
    for index, entry in enumerate(body.logits_processors or ()):
        arguments = msgspec.json.encode(entry.arguments)
        if len(arguments) > LOGITS_ARGUMENT_BYTES_MAX:
            param = f"logits_processors[{index}].arguments"
            raise invalid(param, f"{param} is {len(arguments)} bytes of JSON: allowed are {LOGITS_ARGUMENT_BYTES_MAX}")
        calls.append(LogitsProcessorCall(entry.name, arguments))
    return tuple(calls)


def _wrap_i64(value: int) -> int:
    return value if value <= JSON_NUMBER_MAX else value - 2**64
