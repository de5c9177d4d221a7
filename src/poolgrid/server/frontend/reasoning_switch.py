"""Whether the model is to reason, and how much: what clients ask for in many fields, in the variables of one template.

Rules
    1. A field that says whether to reason wins over an effort. An effort alone asks for reasoning, and the effort
       ``none`` for none.
    2. What a client gives in ``chat_template_kwargs`` is passed on as it is and wins over both.
    3. A template has a switch if its prompts differ by it. An effort that it refuses becomes the nearest that it takes,
       the higher one of two.
    4. Where a template has no switch, a request for no reasoning is refused if the model always reasons, and else named
       in a header of the answer, as for Messages: its agents ask for it unasked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from poolgrid.server.frontend.chat_template import ChatTemplate, TemplateFailure
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.message_adaptation import adapt, adapt_tools
from poolgrid.server.frontend.schema import ChatBody, Message, Thinking
from poolgrid.server.frontend.template_probes import capabilities_of

EFFORTS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts that clients send, in order."""

NO_EFFORT: Final = "none"
_USUAL_EFFORT: Final = "high"

_HARMONY: Final = "<|channel|>"
_HARMONY_EFFORTS: Final = ("low", "medium", "high")
"""What gpt-oss was trained with; its template writes any other word into the prompt."""

_SWITCHES: Final[Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]] = (
    ({"enable_thinking": True}, {"enable_thinking": False}),
    ({"thinking": True}, {"thinking": False}),
    ({"reasoning": True}, {"reasoning": False}),
    ({"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
    ({"thinking_budget": -1}, {"thinking_budget": 0}),
    ({}, {"reasoning_effort": NO_EFFORT}),
    ({}, {"reasoning_effort": "no_think"}),
)
"""Variables of published templates that switch reasoning on and off, the usual ones first."""

_PROBE_LIMIT_MS: Final = 200.0
"""Longest time of one of up to 16 probes; one of a published template takes less than 1 ms."""


@dataclass(frozen=True, slots=True)
class ReasoningSwitch:
    """What one chat template knows of reasoning."""

    on: Mapping[str, Any]
    off: Mapping[str, Any]
    """The variables that switch it; empty = there is no switch."""
    efforts: tuple[str, ...]
    """Those of ``EFFORTS`` that it takes; empty = any, or none of them changes anything."""

    def effort(self, asked: str) -> str:
        """Return the effort that the template is given."""
        if not self.efforts or asked in self.efforts or asked not in EFFORTS:
            return asked
        at = EFFORTS.index(asked)
        return min(self.efforts, key=lambda each: (abs(EFFORTS.index(each) - at), -EFFORTS.index(each)))


NO_SWITCH: Final = ReasoningSwitch({}, {}, ())


def switch_of(template: ChatTemplate | None) -> ReasoningSwitch:
    """Find out what a template knows; takes milliseconds."""
    if template is None:
        return NO_SWITCH
    takes = capabilities_of(template, False)
    try:
        messages = adapt([Message("user", "q7userw")], takes)
    except RequestError:
        return NO_SWITCH
    tools = adapt_tools(None, takes)

    def prompt(variables: Mapping[str, Any]) -> str | None:
        try:
            return template.render(messages, tools=tools, variables=variables, limit_ms=_PROBE_LIMIT_MS)
        except TemplateFailure:
            return None

    efforts: tuple[str, ...] = ()
    if _names(template, "reasoning_effort"):
        if _HARMONY in template.source:
            efforts = _HARMONY_EFFORTS
        else:
            efforts = tuple(each for each in EFFORTS if prompt({"reasoning_effort": each}) is not None)
    by_effort = {"reasoning_effort": _USUAL_EFFORT if _USUAL_EFFORT in efforts or not efforts else efforts[-1]}
    for on, off in _SWITCHES:
        [(name, value)] = off.items()
        if not _names(template, name) or (isinstance(value, str) and not _quotes(template, value)):
            continue
        switched_off = prompt(off)
        if switched_off is None or switched_off == prompt(on or by_effort):
            continue
        is_default = switched_off == prompt({})
        return ReasoningSwitch(by_effort if is_default and not on else on, off, efforts)
    return ReasoningSwitch({}, {}, efforts)


def apply_switch(body: ChatBody, switch: ReasoningSwitch) -> str:
    """Put what a body asks for into the variables of its template; raises ``RequestError``.

    Return the field that asks for no reasoning where the template has no switch, else an empty string.
    """
    if body.reasoning is not None and body.reasoning.exclude:
        raise unsupported("reasoning.exclude", "reasoning is always in the answer, as reasoning_content (got true)")
    param, wanted = _wanted(body)
    effort_param, effort = _effort(body)
    if param == "" and effort is not None:
        param, wanted = effort_param, effort != NO_EFFORT
    body.reasoning_effort = None if effort is None or effort == NO_EFFORT else switch.effort(effort)
    if param == "":
        return ""
    given = body.chat_template_kwargs or {}
    chosen = switch.on if wanted else switch.off
    if not chosen:
        return "" if wanted else param
    if not wanted:
        body.reasoning_effort = None
    if given.keys().isdisjoint(chosen) and not (body.reasoning_effort and "reasoning_effort" in chosen):
        body.chat_template_kwargs = {**given, **chosen}
    return ""


def _wanted(body: ChatBody) -> tuple[str, bool]:
    """Return the field that says whether to reason, and what it says; an empty name without one."""
    thinking = body.thinking
    said = {
        "enable_thinking": body.enable_thinking,
        "thinking": thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking,
        "think": body.think if isinstance(body.think, bool) else None,
        "reasoning.enabled": None if body.reasoning is None else body.reasoning.enabled,
    }
    found = [(name, value) for name, value in said.items() if value is not None]
    for name, value in found[1:]:
        if value is not found[0][1]:
            first, other = found[0][0], name
            raise invalid(other, f"{other} and {first} contradict each other: they mean the same, give one")
    return found[0] if found else ("", False)


def _effort(body: ChatBody) -> tuple[str, str | None]:
    """Return the field that says how much, and what it says."""
    said = {
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": None if body.reasoning is None else body.reasoning.effort,
        "think": body.think if isinstance(body.think, str) else None,
    }
    found = [(name, value) for name, value in said.items() if value is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise invalid(
                name,
                f"{name} is {quoted(value)} and {found[0][0]} is {quoted(found[0][1])}: they mean the same, give one",
            )
    return found[0] if found else ("", None)


def _names(template: ChatTemplate, variable: str) -> bool:
    return re.search(rf"\b{variable}\b", template.source) is not None


def _quotes(template: ChatTemplate, word: str) -> bool:
    return re.search(rf"""["']{word}["']""", template.source) is not None
