"""From a prepared request to its prompts: the chat template rendered, text tokenized, media put in their places.

``tokenize`` is the only costly part of serving a request before it is dispatched, and pure, so that it can run in a
tokenizer thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.frontend.chat_template import TIME_LIMIT_MS, TemplateFailure, TemplateTooSlow
from poolgrid.server.frontend.errors import ContextOverflow, RequestError, invalid, quoted
from poolgrid.server.frontend.media.conversation import with_media
from poolgrid.server.frontend.message_adaptation import adapt, adapt_tools, is_malformed
from poolgrid.server.frontend.model_parsers import PROMPT_END_CHARS
from poolgrid.server.frontend.prepared_request import PreparedRequest, Prompt, PromptText
from poolgrid.server.frontend.schema import ChatBody, CompletionBody, Message
from poolgrid.server.frontend.template_probes import capabilities_of

SAMPLE_CHARS_PER_TOKEN = 16
"""Text of any language has fewer characters in a token, on average; runs of blanks may have more."""


def look_up(job: PreparedRequest, limit_ms: float) -> int | None:
    """Do what is quick of ``tokenize``, and return about how many bytes of text are left for the tokenizer.

    ``None`` when rendering takes longer than ``limit_ms``: ``tokenize`` begins again. Raises ``RequestError``.
    """
    body, model = job.body, job.model
    if type(body) is ChatBody:
        try:
            text = _rendered(job, body, min(limit_ms, TIME_LIMIT_MS))
        except TemplateTooSlow:
            return None
        lookup = None if job.items else model.look_up(text, bool(body.add_special_tokens), job.domain)
        job.texts = [PromptText(text, lookup)]
    else:
        assert isinstance(body, CompletionBody), "there are two kinds of body"
        special = body.add_special_tokens is not False
        texts = [prompt for prompt, _ in _prompts(body) if isinstance(prompt, str)]
        job.texts = [PromptText(text, model.look_up(text, special, job.domain)) for text in texts]
    return sum(prompt.text_bytes for prompt in job.texts)


def tokenize(job: PreparedRequest) -> list[Prompt]:
    """Render and tokenize the prompts; raises ``RequestError``. Costly for long ones; touches no shared state."""
    body = job.body
    if type(body) is ChatBody:
        return [_chat_prompt(job, body)]
    assert isinstance(body, CompletionBody), "there are two kinds of body"
    if isinstance(body.prompt, str):
        return [_text_prompt(job, body, body.prompt, job.texts[0] if job.texts else None)]
    texts = iter(job.texts)
    return [
        _completion_prompt(job, body, prompt, param, next(texts, None) if isinstance(prompt, str) else None)
        for prompt, param in _prompts(body)
    ]


def count_prompts(body: CompletionBody) -> int:
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


def too_long(job: PreparedRequest, tokens: int) -> ContextOverflow:
    """Return the error of a prompt that leaves no room for an answer."""
    param = job.prompt_param
    however = f"{param} has {tokens} tokens, and at least one must be left for the answer. Shorten it"
    return overflow(job, param, tokens, None, however)


def check_length(job: PreparedRequest, text: str) -> None:
    """Refuse a text whose beginning alone is twice too long, for tokens of all of it can take gigabytes."""
    limit = job.max_sequence_length
    sample_chars = SAMPLE_CHARS_PER_TOKEN * limit
    if len(text) < 2 * sample_chars:
        return
    tokens = len(job.model.encode(text[:sample_chars])) // 4
    if tokens > 2 * limit:
        param = job.prompt_param
        raise overflow(job, param, tokens, None, f"{param} has more than {tokens} tokens. Shorten it")


def overflow(job: PreparedRequest, param: str, isl: int, wanted: int | None, however: str) -> ContextOverflow:
    """Return the error of a request that does not fit into the model's context."""
    limit = job.max_sequence_length
    begins = f"This model's maximum context length is {limit} tokens. However, {however}."
    # litellm looks for how it begins. LangChain looks for the code, in what openai's client makes of the message.
    return ContextOverflow(param, limit, isl, wanted, f"{begins} The request was not run (context_length_exceeded).")


def _chat_prompt(job: PreparedRequest, body: ChatBody) -> Prompt:
    [known] = job.texts or [PromptText(_rendered(job, body, TIME_LIMIT_MS))]
    text, model = known.text, job.model
    end = text[-PROMPT_END_CHARS:] if job.output_format is not None else ""
    special = bool(body.add_special_tokens)
    check_length(job, text)
    if job.items:
        packed, multimodal = with_media(text, job.items, job.served.media, model, special, job.domain)
        return Prompt(packed, end=end, multimodal=multimodal)
    if known.lookup is not None:
        return Prompt(model.complete(known.lookup), end=end)
    return Prompt(model.encode(text, special, job.domain), end=end)


def _text_prompt(job: PreparedRequest, body: CompletionBody, text: str, known: PromptText | None) -> Prompt:
    check_length(job, text)
    if known is not None and known.lookup is not None:
        packed = job.model.complete(known.lookup)
    else:
        packed = job.model.encode(text, body.add_special_tokens is not False, job.domain)
    return Prompt(packed, text if body.echo else "")


def _completion_prompt(
    job: PreparedRequest, body: CompletionBody, prompt: str | list[int], param: str, known: PromptText | None
) -> Prompt:
    if isinstance(prompt, str):
        return _text_prompt(job, body, prompt, known)
    model = job.model
    if len(prompt) >= job.max_sequence_length:
        raise too_long(job, len(prompt))  # before anything is done with each of them
    check_vocabulary(prompt, model.vocab_size, param)
    packed = pack_tokens(prompt)
    return Prompt(packed, model.decode(packed) if body.echo else "")


def _rendered(job: PreparedRequest, body: ChatBody, limit_ms: float) -> str:
    """Return the text of a chat prompt; raises ``RequestError``, and ``TemplateTooSlow`` when that is not final."""
    model = job.model
    tools = body.tools if body.tool_choice != "none" else None
    template = model.tool_template if tools and model.tool_template else model.template
    if template is None:
        raise invalid("model", f"{model.name} has no chat template: use /v1/completions", code="no_chat_template")
    takes = template.capabilities.get(bool(tools)) or capabilities_of(template, bool(tools))
    try:
        messages = adapt(body.messages, takes, job.served.media.placeholder)
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
            limit_ms=limit_ms,
        )
    except TemplateFailure as failure:
        if isinstance(failure, TemplateTooSlow) and limit_ms < TIME_LIMIT_MS:
            raise
        raise _malformed_arguments(body.messages) or invalid(
            "messages", f"{failure}. The request was not run.", code="chat_template_error"
        ) from failure
    return text if final is None else _up_to(text, final)


def _final_words(body: ChatBody, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what the assistant has said so far in the last message, which the answer is to continue."""
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
    whole = final.lstrip()
    return text[: at + len(whole)] if text.startswith(whole, at) else text[: at + len(stripped)]


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
