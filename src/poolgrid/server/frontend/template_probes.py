"""Find out what a chat template can show: small conversations are adapted one way after the other and rendered.

A way counts as served when each word of the conversation is in the prompt, and nothing of Python's own notation of
values is. Of several the first is taken, which is the one that changes least. Where none is served, the conventions of
``TemplateCapabilities`` stand, so that nothing is rewritten without effect.

Templates may write a conversation otherwise when the request has tools, so each is probed with tools and without.
Probes run in the sandbox with its limits, and take ``TIME_LIMIT_MS`` together at most. A template that is not done then
keeps the conventions for the rest.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from poolgrid.server.frontend.chat_template import ChatTemplate, TemplateFailure, TemplateTooSlow
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.message_adaptation import adapt, adapt_tools
from poolgrid.server.frontend.schema import Function, Message, ToolCall
from poolgrid.server.frontend.template_capabilities import (
    IMAGE_PART,
    Arguments,
    ContentForm,
    EmptyContent,
    TemplateCapabilities,
    TextWithCalls,
    text_part,
)

log: Final = logging.getLogger(__name__)

TIME_LIMIT_MS: Final = 1000.0
"""Longest time of the CPU that a template's probes with tools, or without, take together: published ones take up to
30 ms. By the clock, a process that starts on a busy machine would lose text of requests for as long as it runs."""

PROMPT_CHARS_MAX: Final = 1024 * 1024

REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")

# Words that no template contains.
_USER, _ASKED, _ADDED = "q7userw", "q7askedw", "q7addedw"
_SYSTEM, _LATE = "q7systemw", "q7latew"
_SAID, _ANSWERED = "q7saidw", "q7answeredw"
_RESULT, _RESULT_2 = "q7resultw", "q7resultxw"
_KEY, _VALUE, _VALUE_2 = "q7keyw", "q7valuew", "q7valuexw"
_REASONING = "q7reasonw"
_NAME = "q7functionw"
_ID, _ID_2, _LONG_ID = "q7callid0", "q7callid1", "call_0123456789abcdef"

_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Look up.",
            "parameters": {
                "type": "object",
                "properties": {_KEY: {"type": "string", "description": "What."}},
                "required": [_KEY],
            },
        },
    }
]
_REPRESENTED: Final = (f"{{'{_KEY}'", "'text'", '"text"', "<class ")
"""What shows that a template printed a value as Python does, or a list of parts as it is."""

_NAMES_DEVELOPER: Final = re.compile("""['"]developer['"]""")


def _call(value: str = _VALUE, call_id: str = _ID) -> ToolCall:
    return ToolCall(Function(_NAME, {_KEY: value}), id=call_id)


def _result(text: str = _RESULT, call_id: str = _ID, name: str | None = _NAME) -> Message:
    return Message("tool", text, name=name, tool_call_id=call_id)


_ASKS: Final = Message("user", _USER)
_ASKS_AGAIN: Final = Message("user", _ASKED)
_SAYS: Final = Message("assistant", _SAID)
_CALLS: Final = Message("assistant", tool_calls=[_call()])
_SAYS_AND_CALLS: Final = Message("assistant", _SAID, tool_calls=[_call()])


class _TimeOver(Exception):
    """The probes of one template took too long together."""


class _Probes:
    """The probes of one template; ``found`` is what they have found so far."""

    def __init__(self, template: ChatTemplate, has_tools: bool, monotonic: Callable[[], float]) -> None:
        self.found = TemplateCapabilities()
        self._template = template
        self._monotonic = monotonic
        self._deadline_s = monotonic() + TIME_LIMIT_MS / 1000
        self._tools: Sequence[Mapping[str, Any]] | None = _TOOLS if has_tools else None
        self._nones = 0
        self._signs: Sequence[str] = _REPRESENTED

    def run(self) -> None:
        """Find out everything, in an order in which each answer helps to ask for the next."""
        self._find_user_form()
        self._find_roles()
        self._find_order()
        self._find_calls()
        self._find_reasoning()
        self._find_tools()

    def rendered(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the prompt of messages as they are, or ``None`` where the template fails."""
        left_ms = (self._deadline_s - self._monotonic()) * 1000
        if left_ms <= 0:
            raise _TimeOver
        try:
            return self._template.render(messages, tools=self._tools, max_chars=PROMPT_CHARS_MAX, limit_ms=left_ms)
        except TemplateTooSlow:
            raise _TimeOver from None
        except TemplateFailure:
            return None

    def prompt(self, messages: Sequence[Message], takes: TemplateCapabilities) -> str | None:
        """Return the prompt of adapted messages, or ``None`` where the template fails."""
        try:
            return self.rendered(adapt(messages, takes))
        except RequestError:
            return None

    def shows(self, messages: Sequence[Message], words: Sequence[str], **changes: Any) -> bool:
        """Return whether all words come out when messages are adapted with these changes to what was found."""
        return self._is_whole(self.prompt(messages, replace(self.found, **changes)), words)

    def choose(self, messages: Sequence[Message], words: Sequence[str], ways: Sequence[Mapping[str, Any]]) -> bool:
        """Keep the first way in which all words come out; return whether there is one."""
        for way in ways:
            if self.shows(messages, words, **way):
                self.found = replace(self.found, **way)
                return True
        return False

    def flag(self, name: str, messages: Sequence[Message], words: Sequence[str]) -> None:
        """Keep whether a template takes messages as they are; false only where rewriting them helps."""
        self.choose(messages, words, [{name: True}, {name: False}])

    def _is_whole(self, text: str | None, words: Sequence[str]) -> bool:
        return (
            text is not None
            and all(word in text for word in words)
            and text.count("None") <= self._nones
            and not any(sign in text for sign in self._signs)
        )

    def _note_own_words(self) -> None:
        """Note what the template writes itself, whatever the messages are."""
        text = self.rendered([{"role": "user", "content": self._shaped(_USER)}]) or ""
        self._nones = text.count("None")
        self._signs = [sign for sign in _REPRESENTED if sign not in text]

    def _form(self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any], *after: Mapping[str, Any]) -> Any:
        """Return the form in which the content of ``message`` comes out, or ``None`` where none does."""

        def asked(content: Any) -> str | None:
            return self.rendered([*before, {**message, "content": content}, *after])

        strings = self._is_whole(asked(_SAID), [_SAID])
        with_text = asked([text_part(_SAID), text_part(_ANSWERED)])
        parts = self._is_whole(with_text, [_SAID, _ANSWERED])
        if not (strings or parts):
            return ContentForm(strings=False) if self._is_whole(asked([text_part(_SAID)]), [_SAID]) else None
        with_image = asked([IMAGE_PART, text_part(_SAID)]) if parts else None
        media = self._is_whole(with_image, [_SAID]) and with_image != asked([text_part(_SAID)])
        return ContentForm(strings, parts, media)

    def _shaped(self, text: str) -> Any:
        return text if self.found.user_form.strings else [text_part(text)]

    def _find_user_form(self) -> None:
        form = self._form([], {"role": "user"})
        if form is None and self._tools is None:
            self._tools = []
            form = self._form([], {"role": "user"})
            self.found = replace(self.found, null_tools=form is None)
        if form is not None:
            self.found = replace(self.found, user_form=form)
        self._note_own_words()

    def _find_roles(self) -> None:
        user = {"role": "user", "content": self._shaped(_USER)}
        form = self._form([user], {"role": "assistant"}, user)
        if form is not None:
            self.found = replace(self.found, assistant_form=form)
        form = self._form([], {"role": "system"}, user)
        if form is not None:
            self.found = replace(self.found, system_form=form)
        self.flag("system", [Message("system", _SYSTEM), _ASKS], [_SYSTEM, _USER])
        if _NAMES_DEVELOPER.search(self._template.source) is None:
            # A template that prints any role would show one that its model has never seen.
            self.found = replace(self.found, developer=False)
        else:
            self.flag("developer", [Message("developer", _SYSTEM), _ASKS], [_SYSTEM, _USER])

    def _find_order(self) -> None:
        system, late = Message("system", _SYSTEM), Message("system", _LATE)
        self.flag(
            "consecutive_user", [_ASKS, _SAYS, _ASKS_AGAIN, Message("user", _ADDED)], [_USER, _SAID, _ASKED, _ADDED]
        )
        twice = [_ASKS, _SAYS, Message("assistant", _ANSWERED), _ASKS_AGAIN]
        self.flag("consecutive_assistant", twice, [_USER, _SAID, _ANSWERED, _ASKED])
        second = Message("developer" if self.found.developer else "system", _LATE)
        self.flag("several_system", [system, second, _ASKS], [_SYSTEM, _LATE, _USER])
        self.flag("lone_late_system", [_ASKS, _SAYS, late, _ASKS_AGAIN], [_USER, _SAID, _LATE, _ASKED])
        self.flag("late_system", [system, _ASKS, _SAYS, late, _ASKS_AGAIN], [_SYSTEM, _USER, _SAID, _LATE, _ASKED])

    def _find_calls(self) -> None:
        history, words = [_ASKS, _CALLS, _result()], [_USER, _NAME, _KEY, _VALUE, _RESULT]
        ways = [
            {"results": results, "empty_content": empty, "arguments": arguments}
            for results in (True, False)
            for empty in (EmptyContent.EMPTY, EmptyContent.NULL, EmptyContent.ABSENT)
            for arguments in (Arguments.OBJECT, Arguments.TEXT)
        ]
        if self.choose(history, words, ways):
            self._find_call_form(history, words)
        else:
            self.choose(history, words, [{"calls": False, "results": results} for results in (True, False)])
        if self.found.results:
            self._find_results(history, words)
        system = Message("system", _SYSTEM)
        self.flag("system_before_result", [system, *history], [_SYSTEM, *words])
        self.flag("user_after_tool", [*history, _ASKS_AGAIN], [*words, _ASKED])
        self.flag("function", [*history[:-1], Message("function", _RESULT, name=_NAME)], words)
        self.flag("null_content", [_ASKS, Message("assistant"), _ASKS_AGAIN], [_USER, _ASKED])

    def _find_call_form(self, history: Sequence[Message], words: Sequence[str]) -> None:
        if self.found.arguments is Arguments.OBJECT:
            as_object = self.prompt(history, self.found)
            as_text = self.prompt(history, replace(self.found, arguments=Arguments.TEXT))
            if as_text is None:
                self.found = replace(self.found, arguments=Arguments.OBJECT_ONLY)
            elif as_text == as_object:
                self.found = replace(self.found, arguments=Arguments.AS_SENT)
        if self.found.empty_content is EmptyContent.EMPTY and self.shows(
            history, words, empty_content=EmptyContent.NULL
        ):
            self.found = replace(self.found, empty_content=EmptyContent.AS_SENT)
        # Some show the text of the first call only, or of none before an answer.
        again = Message("assistant", _ADDED, tool_calls=[_call(_VALUE_2, _ID_2)])
        rounds = [_ASKS, _SAYS_AND_CALLS, _result(), again, _result(_RESULT_2, _ID_2)]
        answered = [*rounds, Message("assistant", _ANSWERED), _ASKS_AGAIN]
        said = [*words, _SAID, _ADDED, _VALUE_2, _RESULT_2, _ANSWERED, _ASKED]
        ways = list(TextWithCalls)
        if not self.shows(rounds[:3], [*words, _SAID], text_with_calls=TextWithCalls.CONTENT):
            ways.remove(TextWithCalls.CONTENT_OF_FIRST)
            ways.remove(TextWithCalls.CONTENT_UNTIL_ANSWER)
        self.choose(answered, said, [{"text_with_calls": way} for way in ways])
        calls = Message("assistant", tool_calls=[_call(), _call(_VALUE_2, _ID_2)])
        two = [_ASKS, calls, _result(), _result(_RESULT_2, _ID_2)]
        self.flag("parallel_calls", two, [*words, _VALUE_2, _RESULT_2])
        long = [_ASKS, Message("assistant", tool_calls=[_call(call_id=_LONG_ID)]), _result(call_id=_LONG_ID)]
        self.flag("long_call_ids", long, words)

    def _find_results(self, history: Sequence[Message], words: Sequence[str]) -> None:
        before = adapt(history[:-1], self.found)
        form = self._form(before, {"role": "tool", "name": _NAME, "tool_call_id": _ID})
        if form is not None:
            self.found = replace(self.found, tool_form=form)
        self.flag("results_without_name", [*history[:-1], _result(name=None)], words)

    def _find_reasoning(self) -> None:
        thinks = {"reasoning_content": _REASONING}
        calling = [_ASKS, msgspec.structs.replace(_CALLS, **thinks), _result()]
        answering = [_ASKS, msgspec.structs.replace(_SAYS, **thinks), _ASKS_AGAIN]
        ways = [{"reasoning": name} for name in REASONING_NAMES]
        if not (self.choose(calling, [_REASONING], ways) or self.choose(answering, [_REASONING], ways)):
            return
        # Some take either reasoning or text with calls.
        both = [_ASKS, msgspec.structs.replace(_SAYS_AND_CALLS, **thinks), _result()]
        ways_of_text = (self.found.text_with_calls, TextWithCalls.OWN_MESSAGE)
        words = [_USER, _SAID, _REASONING, _VALUE, _RESULT]
        self.choose(both, words, [{"text_with_calls": way} for way in ways_of_text])

    def _find_tools(self) -> None:
        if self._tools is not _TOOLS:
            return
        bare: Sequence[Mapping[str, Any]] = [{"type": "function", "function": {"name": _NAME}}]
        for takes in (self.found, replace(self.found, bare_tools=False)):
            self._tools = adapt_tools(bare, takes)
            if self._is_whole(self.prompt([_ASKS], takes), [_USER, _NAME]):
                self.found = takes
                break


def probe(
    template: ChatTemplate, has_tools: bool, monotonic: Callable[[], float] = time.thread_time
) -> TemplateCapabilities:
    """Return what a template can show in the prompts of requests with tools, or without."""
    probes = _Probes(template, has_tools, monotonic)
    try:
        probes.run()
    except _TimeOver:
        log.warning(
            "probing a chat template took more than %d ms: the remaining features follow the conventions", TIME_LIMIT_MS
        )
    return probes.found


def capabilities_of(template: ChatTemplate, has_tools: bool) -> TemplateCapabilities:
    """Return what a template can show in the prompts of requests with tools, or without; found out once."""
    known = template.capabilities.get(has_tools)
    if known is None:
        known = template.capabilities[has_tools] = probe(template, has_tools)
    return known
