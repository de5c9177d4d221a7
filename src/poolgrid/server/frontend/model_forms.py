"""With what a served model's prompts are written and its answers read: what this server was told, else its workers.

Rules
    1. A template or a parser that this server's own options name is used, whatever workers were told; where they were
       given another one, that is logged once.
    2. Where the options name none (``auto``), what the workers' cards name is used, and where those name nothing, what
       the model's own template and vocabulary show.
    3. A form is made when it is first asked for, and again when the cards name another one. One is kept for each
       model.
    4. What a card names and this server cannot use is reported once and left out: the model's own is used.
    5. The parsers of a form are logged, with the markers that showed them; so is a template whose calls or reasoning
       no parser knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from poolgrid.kernel.requests.inference import ServedModel
from poolgrid.kernel.wire.card import ChatSpec, shown_value
from poolgrid.server.frontend.chat_template import TemplateFailure
from poolgrid.server.frontend.model_parsers import MISSING, PLAIN_TEXT, ModelParsers, choose_parsers
from poolgrid.server.frontend.prompt_model import PromptModel, PromptModels
from poolgrid.server.frontend.reasoning_switch import NO_SWITCH, ReasoningSwitch, switch_of
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.template_probes import capabilities_of
from poolgrid.server.process.parser_names import AUTO

log: Final = logging.getLogger(__name__)

TURN_BEGINNING_CHARS: Final = 32
"""Longest end of a prompt that is compared: the marks of a role, and of reasoning."""

_PROBE: Final = "probe"


@dataclass(frozen=True, slots=True)
class ModelForm:
    """One model as chats use it."""

    base: PromptModel
    """The model as this server loaded it."""
    chat: ChatSpec
    """What the workers' cards name."""
    model: PromptModel
    """The model with the template that is in force."""
    format: ModelParsers
    switch: ReasoningSwitch = NO_SWITCH
    tool_switch: ReasoningSwitch = NO_SWITCH
    """Of the template for requests with tools."""
    always_reasons: bool = False
    _shown: dict[frozenset[str], PromptModel] = field(default_factory=dict, repr=False)

    def showing(self, markers: frozenset[str]) -> PromptModel:
        """Return the model with markers shown, made once for each set of them."""
        shown = self._shown.get(markers)
        if shown is None:
            shown = self._shown[markers] = self.model.showing(markers)
        return shown


class ModelForms:
    """The forms of all models; safe to ask from several threads."""

    def __init__(self, models: PromptModels, settings: FrontendSettings) -> None:
        self._models = models
        self._settings = settings
        self._forms: dict[str, ModelForm] = {}

    def loads(self, name: str) -> bool:
        return self._models.get(name) is not None

    def of(self, served: ServedModel) -> ModelForm | None:
        """Return the form of a served model; ``None`` when this server has not loaded it."""
        form = self._forms.get(served.name)
        if form is not None and (form.chat is served.chat or form.chat == served.chat):
            return form
        base = self._models.get(served.name)
        if base is None:
            return None
        form = self._forms[served.name] = self._make(base, served.chat)
        return form

    def make_ready(self, served: Sequence[ServedModel]) -> None:
        """Make what is asked for first, and say where this server's options overrule workers."""
        for each in served:
            self.of(each)

    def _make(self, base: PromptModel, chat: ChatSpec) -> ModelForm:
        settings = self._settings
        model = base
        if chat.chat_template and settings.chat_template is not None:
            _overruled("chat-template", str(settings.chat_template), base.name, shown_value(chat.chat_template))
        elif chat.chat_template:
            try:
                model = base.with_template(chat.chat_template)
            except TemplateFailure as failure:
                log.error(
                    "the chat template of model %r that its workers were given cannot be used, the model's own is: %s",
                    base.name,
                    failure,
                )
        for template in (model.template, model.tool_template):
            if template is not None:
                for has_tools in (False, True):
                    capabilities_of(template, has_tools)  # found out now, so that no request waits for it
        own_reasoning, own_tools = settings.reasoning_parser, settings.tool_call_parser
        source, added = template_source(model), model.added_tokens()
        turn_beginnings = _turn_beginnings(model)
        try:
            found = choose_parsers(
                _chosen("reasoning-parser", own_reasoning, chat.reasoning_parser, base.name),
                _chosen("tool-call-parser", own_tools, chat.tool_call_parser, base.name),
                source,
                added,
                turn_beginnings,
            )
        except ValueError as error:
            log.error("the parsers of model %r that its workers were given are not used: %s", base.name, error)
            found = choose_parsers(own_reasoning, own_tools, source, added, turn_beginnings)
        _log_parsers(base.name, found, source, own_reasoning == AUTO, own_tools == AUTO)
        switch = switch_of(model.template)
        tool_switch = switch if model.tool_template is None else switch_of(model.tool_template)
        return ModelForm(base, chat, model, found, switch, tool_switch, found.always_reasons)


def _log_parsers(model: str, found: ModelParsers, source: str, any_reasoning: bool, any_tools: bool) -> None:
    log.info(
        "model %r: reasoning parser %s, tool-call parser %s",
        model,
        _shown_parser(found.reasoning, found.signs[0]),
        _shown_parser(found.tools, found.signs[1]),
    )
    for option, name, is_auto, message_field in (
        ("--reasoning-parser", found.reasoning, any_reasoning, "reasoning_content"),
        ("--tool-call-parser", found.tools, any_tools, "tool_calls"),
    ):
        if name or not is_auto or message_field not in source:
            continue
        if found is PLAIN_TEXT:
            log.warning("model %r: its chat template has %s, which stay content: %s", model, message_field, MISSING)
        else:
            log.warning(
                "model %r: its chat template has %s in a format that no parser shows: they stay content. %s names a "
                "parser, or none to keep it so",
                model,
                message_field,
                option,
            )


def _shown_parser(name: str, signs: tuple[str, ...]) -> str:
    return f"{name} (by {' and '.join(repr(sign) for sign in signs)})" if signs else name or "none"


def template_source(model: PromptModel) -> str:
    """Return the source of a model's chat templates."""
    return "\n".join(template.source for template in (model.template, model.tool_template) if template is not None)


def _turn_beginnings(model: PromptModel) -> tuple[str, ...]:
    """Return how a model's prompts end where a turn of the assistant begins, as far as its templates show that."""
    found: set[str] = set()
    for template in (model.template, model.tool_template):
        if template is not None:
            with suppress(TemplateFailure):
                found.add(_turn_beginning(template.render))
    return tuple(sorted(found - {""}))


def _turn_beginning(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """Return what a template writes between a user's message and the answer; empty where it does not render one."""
    after = render([{"role": "user", "content": _PROBE}]).rpartition(_PROBE)[2]
    return after.rstrip()[-TURN_BEGINNING_CHARS:]


def _chosen(option: str, own: str, of_workers: str, model: str) -> str:
    """Return the name of a parser: this server's own, else what the workers were told, else ``auto``."""
    if own == AUTO:
        return of_workers or AUTO
    if of_workers and of_workers != own:
        _overruled(option, own, model, repr(of_workers))
    return own


def _overruled(option: str, own: str, model: str, of_workers: str) -> None:
    log.warning(
        "--%s %s of this server is used for model %r; its workers were given %s", option, own, model, of_workers
    )
