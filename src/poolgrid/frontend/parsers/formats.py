"""Which parsers a model's answers need: by name, or from what its template and vocabulary show.

``harmony`` is one format for both; its analysis and its calls are read by the same parser.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poolgrid.frontend.parsers import call_guides, tool_calls
from poolgrid.frontend.parsers.call_guides import CallsGuide, Part
from poolgrid.frontend.parsers.harmony import MARKERS as HARMONY_MARKERS
from poolgrid.frontend.parsers.harmony import Harmony
from poolgrid.frontend.parsers.pieces import OutputParser
from poolgrid.frontend.parsers.reasoning import (
    Begins,
    FurtherReasoning,
    MarkedReasoning,
    begins_after,
    granite,
    magistral,
    think_tags,
)
from poolgrid.frontend.parsers.reasoning_and_calls import ReasoningAndCalls
from poolgrid.frontend.parsers.tool_calls import ToolCalls, calls_of, first_call

AUTO = "auto"
NONE = "none"
HARMONY = "harmony"

PROMPT_END_CHARS = 64
"""How much of the end of a prompt is looked at for an open or closed stretch of reasoning."""


@dataclass(frozen=True, slots=True)
class _Reasoning:
    make: Callable[[Begins, Sequence[str]], MarkedReasoning]
    opener: str
    closer: str
    begins: Begins
    """How an answer begins at a turn's beginning that has neither marker."""
    markers: tuple[str, ...] = ()
    """Markers that may be special tokens of the vocabulary, which the text does not show otherwise."""


@dataclass(frozen=True, slots=True)
class _Tools:
    make: Callable[[ToolUse], ToolCalls]
    guide: CallsGuide | None
    """Calls as a part of a structural tag; ``None`` = they are JSON and have no marker."""
    markers: tuple[str, ...] = ()


_THINK = ("<think>", "</think>")

_REASONING: Mapping[str, _Reasoning] = {
    "deepseek_r1": _Reasoning(think_tags, *_THINK, Begins.REASONING, _THINK),
    "qwen3": _Reasoning(think_tags, *_THINK, Begins.OPEN, _THINK),
    "granite": _Reasoning(granite, *_THINK, Begins.OPEN, (*_THINK, "<response>", "</response>")),
    "mistral": _Reasoning(magistral, "[THINK]", "[/THINK]", Begins.OPEN, ("[THINK]", "[/THINK]")),
}

_TOOLS: Mapping[str, _Tools] = {
    "hermes": _Tools(lambda use: tool_calls.hermes(use.declared), call_guides.hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": _Tools(lambda use: tool_calls.llama3_json(use.allowed), None, ("<|python_tag|>",)),
    "mistral": _Tools(
        lambda use: tool_calls.mistral(use.declared), call_guides.mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    ),
    "pythonic": _Tools(
        lambda use: tool_calls.pythonic(use.allowed), call_guides.pythonic, ("<|python_start|>", "<|python_end|>")
    ),
    "deepseek_v3": _Tools(
        lambda use: tool_calls.deepseek_v3(use.declared),
        call_guides.deepseek_v3,
        tuple(f"<｜tool▁{what}｜>" for what in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    ),
    "kimi_k2": _Tools(
        lambda use: tool_calls.kimi_k2(use.declared),
        call_guides.kimi_k2,
        tuple(
            f"<|tool_call{what}|>" for what in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
        ),
    ),
    "qwen3_coder": _Tools(
        lambda use: tool_calls.qwen3_coder(use.declared), call_guides.qwen3_coder, ("<tool_call>", "</tool_call>")
    ),
    "glm45": _Tools(
        lambda use: tool_calls.glm45(use.declared),
        call_guides.glm45,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "granite": _Tools(
        lambda use: tool_calls.granite(use.declared),
        call_guides.granite,
        ("<|tool_call|>", "<tool_call>", "</tool_call>"),
    ),
}

REASONING_NAMES = (*_REASONING, HARMONY)
TOOL_NAMES = (*_TOOLS, HARMONY)


_ANY: Mapping[str, Any] = {}
"""The schema of a function without one."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request asks of tools. ``named``: the function that must be called; ``required``: some function must."""

    names: frozenset[str]
    """The functions that may be called."""
    parallel: bool = True
    required: bool = False
    named: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON schema of each function's parameters, by its name; also of those that may not be called."""

    @property
    def allowed(self) -> dict[str, Mapping[str, Any]]:
        """Return the schemas of the functions that may be called, in the order of the request."""
        return {name: schema for name, schema in self.declared.items() if name in self.names}

    @property
    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the schemas of all functions of the request, empty for one without."""
        if self.names <= self.schemas.keys():
            return self.schemas
        return {**self.schemas, **{name: _ANY for name in self.names if name not in self.schemas}}

    @property
    def guided(self) -> bool:
        """Return whether the engine is told to write calls and nothing else."""
        return self.required or bool(self.named)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The parsers of one model by name; an empty name = none."""

    reasoning: str = ""
    tools: str = ""
    turn_beginnings: tuple[str, ...] = ()
    """How prompts end that leave the answer to a user's message to the model; empty = not known."""

    @classmethod
    def choose(cls, reasoning: str, tools: str, template: str, vocabulary: Collection[str] = ()) -> OutputFormat:
        """Resolve ``auto`` and ``none``. ``template`` is the source of the chat template(s), ``vocabulary`` the
        tokens that were added to the model's vocabulary; raises ``ValueError`` for a name that there is not."""
        for what, name, names in (("reasoning", reasoning, REASONING_NAMES), ("tool call", tools, TOOL_NAMES)):
            if name not in (AUTO, NONE, *names):
                raise ValueError(f"choosing a {what} parser: {name!r}, allowed are auto, none, {', '.join(names)}")
        return cls(
            _reasoning_of(template, vocabulary) if reasoning == AUTO else "" if reasoning == NONE else reasoning,
            _tools_of(template, vocabulary) if tools == AUTO else "" if tools == NONE else tools,
        )

    def markers(self, tools: ToolUse | None) -> frozenset[str]:
        """Return the markers that the parsers of a request must see in the text, special tokens or not."""
        if HARMONY in (self.reasoning, self.tools):
            return frozenset(HARMONY_MARKERS)
        markers: set[str] = set()
        if self.reasoning:
            markers.update(_REASONING[self.reasoning].markers)
        if tools is not None and self.tools and not tools.guided:
            markers.update(_TOOLS[self.tools].markers)
        return frozenset(markers)

    def active(self, tools: ToolUse | None) -> bool:
        return bool(self.reasoning) or (tools is not None and (bool(self.tools) or tools.guided))

    def parser(
        self,
        tools: ToolUse | None,
        prompt_end: str = "",
        guided: bool = False,
        continued: str | None = None,
    ) -> OutputParser | None:
        """Return a fresh parser for one answer, or ``None`` when it is all content.

        ``prompt_end`` is the end of the rendered prompt (``PROMPT_END_CHARS``); ``guided`` says that the engine was
        told to write JSON, or JSON or calls; ``continued`` is what the assistant has said already, when the answer goes
        on with it.
        """
        if not self.active(tools):
            return None
        guided_calls = tools is not None and tools.guided
        if HARMONY in (self.reasoning, self.tools) and not guided_calls:
            declared = tools.declared if tools is not None and self.tools == HARMONY else None
            read = Harmony(reasoning=self.reasoning == HARMONY, declared=declared)
            return read if tools is None else _let_through(read, tools)
        calls: OutputParser | None = None
        beginnings: tuple[str, ...] = ()
        if tools is not None and (self.tools or guided_calls):
            if tools.named:
                found = tool_calls.named(tools.named, tools.declared)
            elif tools.required:
                found = tool_calls.required(tools.allowed)
            else:
                found = _TOOLS[self.tools].make(tools)
            beginnings = found.beginnings
            calls = _let_through(found, tools)
        if not self.reasoning or self.reasoning == HARMONY:
            return calls
        known = _REASONING[self.reasoning]
        if continued is None:
            new_turn = not self.turn_beginnings or prompt_end.rstrip().endswith(self.turn_beginnings)
            # Else the prompt goes on with a turn, after a tool's result perhaps, in which the reasoning came before.
            begins = begins_after(prompt_end, known.opener, known.closer) or (known.begins if new_turn else Begins.OPEN)
        else:
            inside = continued.rfind(known.opener) > continued.rfind(known.closer)
            begins = Begins.REASONING if inside else Begins.CONTENT
        told: tuple[str, ...] = ()
        if guided or guided_calls:
            told = (*_JSON, *_TOOLS[self.tools].markers) if tools is not None and self.tools in _TOOLS else _JSON
        further = FurtherReasoning(known.opener, known.closer)
        return ReasoningAndCalls(known.make(begins, told), further, calls, beginnings)

    def calls_guide(self, tools: ToolUse, template: str) -> Part | None:
        """Return calls as a part of a structural tag; ``None`` where they are JSON without a marker, or not read."""
        make = call_guides.harmony if self.tools == HARMONY else _TOOLS[self.tools].guide if self.tools else None
        return None if make is None else make(tools.allowed, tools.parallel, template)


TURN_BEGINNING_CHARS = 32
"""Longest end of a prompt that is compared: the marks of a role, and of reasoning."""

_PROBE = "probe"


def turn_beginning(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """Return what a template writes between a user's message and the answer; empty where it does not render one."""
    after = render([{"role": "user", "content": _PROBE}]).rpartition(_PROBE)[2]
    return after.rstrip()[-TURN_BEGINNING_CHARS:]


_JSON = ("{", "[", '"')
"""How a JSON object, list or string begins."""


def _let_through(calls: OutputParser, tools: ToolUse) -> OutputParser:
    """Return a parser without the calls that a request does not want."""
    if len(tools.names) < len(tools.schemas):
        calls = calls_of(tools.names, calls)
    return calls if tools.parallel else first_call(calls)


def _reasoning_of(template: str, vocabulary: Collection[str]) -> str:
    if "<|channel|>" in template or "<|channel|>" in vocabulary:
        return HARMONY
    if "thought process" in template:
        return "granite"
    if "</think>" in template and "<｜Assistant｜>" in template:
        return "deepseek_r1"
    if "[THINK]" in template or "[THINK]" in vocabulary:
        return "mistral"
    if "</think>" in template or "</think>" in vocabulary:
        return "qwen3"
    return ""


def _tools_of(template: str, vocabulary: Collection[str]) -> str:
    if "<|channel|>" in template or "<|channel|>" in vocabulary:
        return HARMONY
    if "<｜tool▁call▁begin｜>" in template or "<｜tool▁call▁begin｜>" in vocabulary:
        return "deepseek_v3"
    if "[TOOL_CALLS]" in template or "[TOOL_CALLS]" in vocabulary:
        return "mistral"
    if "<|tool_call|>" in template or "<|tool_call|>" in vocabulary:
        return "granite"
    if "<|tool_call_argument_begin|>" in template or "<|tool_call_argument_begin|>" in vocabulary:
        return "kimi_k2"
    if "<arg_key>" in template:
        return "glm45"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<function=" in template:
        return ""  # another format with tags, which no parser reads
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3_json"
    return ""
