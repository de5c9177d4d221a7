"""From a request body to what it asks for: model, prompts, sampling, limits, all checked. Nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.kernel.requests.inference import InferenceBackend, ServedModel
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.guides import Guide, guide_of
from poolgrid.server.frontend.media.conversation import find_media
from poolgrid.server.frontend.message_adaptation import CONTENT, FUNCTION_CALL, ROLE, TOOL_CALLS, write_as_tool_calls
from poolgrid.server.frontend.model_forms import ModelForm, ModelForms, template_source
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompt_model import PromptModel, PromptModels
from poolgrid.server.frontend.prompts import check_vocabulary, count_prompts
from poolgrid.server.frontend.reasoning_switch import apply_switch
from poolgrid.server.frontend.schema import (
    ChatBody,
    CompletionBody,
    InferenceBody,
    chat_decoder,
    completion_decoder,
    parse_inference,
    settle_aliases,
)
from poolgrid.server.frontend.sequences import check_retention
from poolgrid.server.frontend.session_fields import (
    RESULT_ROLES,
    answered_by,
    keep_ms_of,
)
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tool_use import ToolUse
from poolgrid.server.frontend.tools import NO_TOOLS, beside_calls, plain_choice, read_tools, tool_use

CHOICES_MAX = 128
"""Most sequences that one request may ask for (prompts times ``n``); OpenAI's own limit of ``n``."""

STOP_STRINGS_MAX = 16
"""Most stop strings of one request. OpenAI allows 4; agents send more; each is searched for in every chunk."""

STOP_CHARS_MAX = 256
"""Longest stop string: it is also the most text that a stream may hold back."""


class Preparation:
    """Checks bodies against what is served now."""

    def __init__(self, backend: InferenceBackend, models: PromptModels, settings: FrontendSettings) -> None:
        self._backend = backend
        self.forms = ModelForms(models, settings)
        self._served: Sequence[ServedModel] = ()
        """What is served, as the backend said last: it says so with the same object until that changes."""
        self._known: dict[str, tuple[ServedModel, str, ModelForm]] = {}
        """What clients have meant by a name since then."""

    def chat(self, raw: bytes) -> PreparedRequest:
        """Check the body of a chat request; raises ``RequestError``."""
        body, plain = parse_inference(chat_decoder, raw)
        if plain:
            return self._job(body, chat=True, logprobs=None, prompts=1, is_plain=True)
        return self.chat_job(body)

    def chat_job(self, body: ChatBody, lenient: bool = False) -> PreparedRequest:
        """Check a chat request that is parsed already; raises ``RequestError``.

        ``lenient``: reasoning that cannot be switched off is left to the answer's headers to name.
        """
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
        if job.not_applied and not lenient and self._found(body.model)[2].always_reasons:
            raise unsupported(
                job.not_applied, f"{job.model.name} always reasons, its chat template has no switch for it"
            )
        return job

    def completion(self, raw: bytes) -> PreparedRequest:
        """Check the body of a completion request; raises ``RequestError``."""
        body, plain = parse_inference(completion_decoder, raw)
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens", "max_tokens is 0: allowed is an integer from 1, or with echo also 0")
        if plain:
            return self._job(body, chat=False, logprobs=None, prompts=count_prompts(body), is_plain=True)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise unsupported("best_of", f"no candidates are generated beyond n (got {quoted(body.best_of)})")
        guide, param = guide_of(body, body.nvext)
        return self._job(
            body, chat=False, logprobs=body.logprobs, prompts=count_prompts(body), guide=guide, guide_param=param
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
        if not served.generates:
            tasks = " and ".join(stage.name.lower() for stage in served.tasks)
            names = ", ".join(each.name for each in served_now if each.generates) or "none now"
            message = f"model {quoted(name)} generates no tokens, it serves tasks ({tasks}); served for tokens: {names}"
            raise RequestError(404, "model_not_found", message, param="model")
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
        guide: Guide | None = None,
        guide_param: str = "",
        use: ToolUse | None = None,
        is_plain: bool = False,
    ) -> PreparedRequest:
        served, lora_name, form = self._found(body.model)
        model = form.model
        choices = 1 if is_plain else body.n or 1
        if choices * prompts > CHOICES_MAX:
            raise invalid(
                "n", f"n is {choices} for {prompts} prompt(s): allowed are {CHOICES_MAX} sequences in one request"
            )
        output_model, output_format = model, None
        if chat and form.format.active(use):
            output_format = form.format
            output_model = form.showing(output_format.markers(use))
        limit = min(served.max_sequence_length, model.max_position_embeddings)
        job = PreparedRequest(
            chat, body, model, served, output_model, limit, lora_name, is_plain, output_format=output_format
        )
        if not is_plain:
            settle_aliases(body)
            if type(body) is ChatBody:
                with_tools = bool(body.tools) and body.tool_choice != "none"
                job.not_applied = apply_switch(body, form.tool_switch if with_tools else form.switch)
                if not form.format.reasoning:
                    job.not_applied = ""  # as far as is known it does not reason
            if body.stop_token_ids:
                check_vocabulary(body.stop_token_ids, model.vocab_size, "stop_token_ids")
            if body.logit_bias:
                check_vocabulary(list(body.logit_bias), model.vocab_size, "logit_bias")
            nvext = body.nvext
            job.choices_per_prompt = choices
            job.stops = () if body.stop is None else _stops(body.stop)
            job.logprobs = logprobs
            job.guide, job.guide_param = guide or {}, guide_param
            job.client_salt = body.cache_salt or (nvext.cache_salt if nvext is not None else None) or ""
            job.tool_use = use
            job.keep_ms = keep_ms_of(body)
            if nvext is not None and nvext.kv_cache_retention_config is not None:
                job.retention = check_retention(nvext.kv_cache_retention_config)
        if type(body) is ChatBody:
            _note_messages(job, body)
        elif type(body) is CompletionBody:
            job.prompt_only = body.max_tokens == 0
            if not isinstance(body.prompt, str):
                job.has_text = bool(body.echo) or any(isinstance(item, str) for item in body.prompt[:1])
        return job


def _note_messages(job: PreparedRequest, body: ChatBody) -> None:
    """Note what must be known of the messages once they are forgotten, and what they name."""
    messages = body.messages
    if list in map(type, map(CONTENT, messages)):
        job.media = find_media(messages, job.served.media, body.model)
    if any(map(FUNCTION_CALL, messages)):
        write_as_tool_calls(messages)
    job.earlier_calls = sum(map(len, filter(None, map(TOOL_CALLS, messages))))
    if not RESULT_ROLES.isdisjoint(map(ROLE, messages)):
        job.after_tool, job.answer = answered_by(messages)
    if body.continue_final_message:
        last = messages[-1].content if messages else None
        job.continued = last if isinstance(last, str) else ""


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    alone = isinstance(stop, str)
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > STOP_STRINGS_MAX:
        raise invalid("stop", f"stop has {len(stop)} strings: allowed are up to {STOP_STRINGS_MAX}")
    for index, text in enumerate(stop):
        if len(text) > STOP_CHARS_MAX:
            param = "stop" if alone else f"stop[{index}]"
            raise invalid(param, f"{param} has {len(text)} characters: allowed are up to {STOP_CHARS_MAX}")
    return tuple(dict.fromkeys(filter(None, stop)))


def model_not_found(name: str, served: Sequence[str]) -> RequestError:
    """Return the 404 for a model that no worker serves, naming those that are."""
    names = ", ".join(served) or "none now"
    return RequestError(
        404, "model_not_found", f"model {quoted(name)} does not exist here; served: {names}", param="model"
    )
