"""Published chat templates, each with many conversations, against plain Jinja as transformers runs it.

The templates are no part of the project: they are looked for beside the checkout.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from poolgrid.plugins.parsers.formats import call_format
from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prompts import look_up
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.parser_names import AUTO
from tests.frontend.fake_backend import TINY, FakeBackend
from tests.frontend.plain_jinja import NOW, SPECIAL_TOKENS, PlainTemplate
from tests.parsers.samples import SAMPLES, SCHEMAS, USE
from tests.parsers.test_golden import read

DIRECTORY = Path(__file__).parents[3] / "shared" / "chat_templates"
FILES = sorted(DIRECTORY.glob("*/*.jinja"))
PLAIN = dataclasses.replace(TINY, encoder=None)

needs_templates = pytest.mark.skipif(not FILES, reason=f"no published chat templates in {DIRECTORY}")
templates = pytest.mark.parametrize(
    "file", [pytest.param(file, id=f"{file.parent.name}-{file.stem}") for file in FILES]
)

Conversation = list[dict[str, Any]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look up.",
            "parameters": {
                "type": "object",
                "properties": {"wkey": {"type": "string", "description": "What.", "enum": ["a", "b"]}},
                "required": ["wkey"],
            },
        },
    }
    for name in ("wfunction", "wother")
]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(value: str = "wvalue1", call_id: str = "abcdef012", name: str = "wfunction", text: bool = False) -> Any:
    arguments: Any = {"wkey": value}
    if text:
        arguments = json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(content: Any, *calls: Any, results: Sequence[Any] = ("wresult1",), **more: Any) -> Conversation:
    return [
        said("user", "wuser1"),
        said("assistant", content, tool_calls=list(calls), **more),
        *(
            said("tool", result, tool_call_id=each["id"], name=each["function"]["name"])
            for each, result in zip(calls, results, strict=True)
        ),
    ]


TURNS = [said("user", "wuser1"), said("assistant", "wsaid1"), said("user", "wuser2")]
TWO_CALLS = (call(), call("wvalue2", "abcdef013", "wother"))
CONVERSATIONS: dict[str, Conversation] = {
    "plain": [said("user", "wuser1")],
    "system": [said("system", "wsystem1"), said("user", "wuser1")],
    "developer": [said("developer", "wsystem1"), said("user", "wuser1")],
    "turns": [said("system", "wsystem1"), *TURNS],
    "two system": [said("system", "wsystem1"), said("system", "wsystem2"), said("user", "wuser1")],
    "system and developer": [said("system", "wsystem1"), said("developer", "wsystem2"), said("user", "wuser1")],
    "late system": [said("system", "wsystem1"), *TURNS[:2], said("system", "wsystem2"), said("user", "wuser2")],
    "lone late system": [*TURNS[:2], said("system", "wsystem2"), TURNS[2]],
    "last system": [*TURNS, said("system", "wsystem2")],
    "late developer": [said("developer", "wsystem1"), *TURNS, said("developer", "wsystem2")],
    "system after result": [*called("", call()), said("system", "wsystem2")],
    "user in a row": [*TURNS, said("user", "wuser3")],
    "assistant in a row": [*TURNS[:2], said("assistant", "wsaid2"), said("user", "wuser2")],
    "user parts": [said("user", parts("wuser1", "wuser2"))],
    "parts everywhere": [
        said("system", parts("wsystem1")),
        said("user", parts("wuser1")),
        said("assistant", parts("wsaid1", "wsaid2")),
        said("user", "wuser2"),
    ],
    "tag in content": [*TURNS[:1], said("assistant", "wthought</think>wsaid1"), said("user", "wuser2")],
    "both tags in content": [*TURNS[:1], said("assistant", "<think>\nwthought\n</think>\n\nwsaid1"), TURNS[2]],
    "two calls": called(None, *TWO_CALLS, results=("wresult1", "wresult2")),
    "two calls, results in other order": [
        *called("", *TWO_CALLS, results=("wresult1", "wresult2"))[:2],
        said("tool", "wresult2", tool_call_id="abcdef013", name="wother"),
        said("tool", "wresult1", tool_call_id="abcdef012", name="wfunction"),
    ],
    "two calls in text": called("wsaid1", call(text=True), call("wvalue2", "abcdef013", text=True), results=("r", "s")),
    "two rounds of calls": [*called(None, call()), *called("", call("wvalue2"), results=("wresult2",))[1:]],
    "function calls": [
        *TURNS,
        said("assistant", None, function_call={"name": "wfunction", "arguments": '{"wkey": "wvalue1"}'}),
        said("function", "wresult1", name="wfunction"),
        said("assistant", "wsaid2", function_call={"name": "wfunction", "arguments": '{"wkey": "wvalue2"}'}),
        said("function", "wresult2", name="wfunction"),
    ],
    "long id": called(None, call(call_id="call_00ff00ff00ff00ff")),
    "result without name": [*called(None, call())[:2], said("tool", "wresult1", tool_call_id="abcdef012")],
    "result in parts": called(None, call(), results=(parts("wresult1", "wresult2"),)),
    "text in parts and call": called(parts("wsaid1"), call(text=True)),
    "answer after result": [*called(None, call()), said("assistant", "wsaid1"), said("user", "wuser2")],
    "user after result": [*called(None, call()), said("user", "wuser2")],
    "history without tools": [*called(None, call(text=True)), said("user", "wuser2")],
    "call without arguments": called(None, {**call(), "function": {"name": "wfunction", "arguments": ""}}),
    "call that broke off": called(None, {**call(), "function": {"name": "wfunction", "arguments": '{"wkey": "wv'}}),
    "arguments that are a list": called(
        None, {**call(), "function": {"name": "wfunction", "arguments": '["wvalue1"]'}}
    ),
    **{
        f"{content!r} with {'text' if text else 'object'}": called(content, call(text=text))
        for content in (None, "", "wsaid1")
        for text in (False, True)
    },
    **{
        f"{name} with {content!r}": called(content, call(text=True), **{name: "wreason1"})
        for name in ("reasoning_content", "reasoning", "thinking")
        for content in (None, "", "wsaid1")
    },
    "reasoning without call": [TURNS[0], said("assistant", "wsaid1", reasoning_content="wreason1"), TURNS[2]],
}
ADAPTED = {"call without arguments", "call that broke off", "arguments that are a list"}
"""Conversations that are rewritten for most templates though plain Jinja shows them somehow."""

WITHOUT_TOOLS = {"history without tools"}

NO_CONVERSATION = {
    "firefunction-v2-70b": "needs the variables functions and datetime",
    "hf__fireworks-ai_firefunction-v1": "needs a message of the role functions",
    "hf__CohereForAI_c4ai-command-r-v01": "takes tools in Cohere's own form only",
    "shieldgemma-27b": "judges one message, needs the variable guideline",
    "llama-guard3-1b": "judges the last message",
    "llama-guard3-8b": "judges the last message",
    "hf__meta-llama_Llama-Guard-3-11B-Vision": "judges the last message",
    "granite3-guardian-2b": "judges the last message",
}
"""Templates that no chat is made with, and why; the prompt is compared with plain Jinja's and no more."""


def render(file: Path, conversation: Conversation, tools: Any) -> str:
    """Return the prompt that a request gets."""
    body = {"model": "tiny", "messages": conversation} | ({"tools": tools} if tools else {})
    job = preparation(file).chat(json.dumps(body).encode())
    assert look_up(job, 60_000) is not None
    return job.texts[0].text


@cache
def preparation(file: Path) -> Preparation:
    template = ChatTemplate(file.read_text(), SPECIAL_TOKENS, now=lambda: NOW)
    model = dataclasses.replace(PLAIN, template=template)
    return Preparation(FakeBackend(), {"tiny": model}, FrontendSettings())


def with_objects(conversation: Conversation) -> Conversation:
    """Return a conversation with the arguments of its calls as objects."""

    def parsed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            pass
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": list(map(parsed, message["tool_calls"]))} if "tool_calls" in message else message
        for message in conversation
    ]


def words_of(value: Any) -> set[str]:
    """Return the words of a conversation that its prompt must have."""
    return set(re.findall(r"\bw(?:user|system|said|result|value|reason)[0-9]", json.dumps(value)))


def is_whole(text: str | None, conversation: Conversation, plain: str | None) -> bool:
    """Return whether a prompt needs nothing: no word is lost, no value is printed as Python or JSON quotes it."""
    return (
        text is not None
        and all(word in text for word in words_of(conversation))
        and text.count("None") <= (plain or "").count("None")
        and not any(sign in text for sign in ("{'wkey'", '\\"wkey', "'text'", '"text"'))
    )


def dropped_by_design(file: Path, conversation: Conversation, plain: PlainTemplate, tools: Any) -> set[str]:
    """Return the words that a template leaves out of any conversation: reasoning that it does not show there.

    Whether it does is asked of plain Jinja, under each name, with calls in every form that templates take.
    """
    for name in ("reasoning_content", "reasoning", "thinking"):
        for content in (None, "", "wsaid1"):
            for text in (False, True):
                asked = [
                    {
                        "role": message["role"],
                        "content": content if "tool_calls" in message else message["content"],
                        **({name: "wreason1"} if message["role"] == "assistant" else {}),
                        **({"tool_calls": [call(text=text)]} if "tool_calls" in message else {}),
                        **({"tool_call_id": "abcdef012", "name": "wfunction"} if message["role"] == "tool" else {}),
                    }
                    for message in conversation
                ]
                if "wreason1" in (plain.render(asked, tools) or ""):
                    return set()
    return {"wreason1"}


@needs_templates
@templates
def test_tools_without_description_and_parameters_are_served(file: Path) -> None:
    bare = [{"type": "function", "function": {"name": "wfunction"}}]
    plain = PlainTemplate(file.read_text())
    reference = plain.render(CONVERSATIONS["plain"], bare)
    if reference is not None:
        assert "wuser1" not in reference or render(file, CONVERSATIONS["plain"], bare) == reference
    elif plain.render(CONVERSATIONS["plain"], TOOLS) is not None:
        assert "wfunction" in render(file, CONVERSATIONS["plain"], bare)


@needs_templates
@templates
def test_no_request_fails_and_no_text_is_lost(file: Path) -> None:
    plain = PlainTemplate(file.read_text())
    faults: list[str] = []
    for name, conversation in CONVERSATIONS.items():
        tools = None if name in WITHOUT_TOOLS else TOOLS if "tool_calls" in json.dumps(conversation) else None
        reference = plain.render(conversation, tools)
        try:
            prompt = render(file, conversation, tools)
        except RequestError as error:
            if reference is not None or file.stem not in NO_CONVERSATION:
                faults.append(f"{name}: {error}")
            continue
        names_developer = "'developer'" in file.read_text() or '"developer"' in file.read_text()
        own = plain.render([said("user", "x")], tools)
        if is_whole(reference, conversation, own):
            objects = plain.render(with_objects(conversation), tools)
            if name == "last system" and plain.render(CONVERSATIONS["lone late system"], tools) is None:
                continue  # shown by accident: roles must alternate, and a system message passes for an assistant's
            if name in ADAPTED or ("developer" in json.dumps(conversation) and not names_developer):
                continue
            if is_whole(objects, conversation, own) and objects != reference:
                reference = objects  # of two forms of arguments, the one that the template formats itself
            if prompt != reference:
                faults.append(f"{name}: not plain Jinja's prompt\n{reference}\n---\n{prompt}")
        elif file.stem not in NO_CONVERSATION:
            lost = {word for word in words_of(conversation) if word not in prompt}
            if "wreason1" in lost:
                lost -= dropped_by_design(file, conversation, plain, tools)
            if lost:
                faults.append(f"{name}: {sorted(lost)} lost\n{prompt}")
    assert not faults, "\n".join(faults)


CALLED = {name: calls[0] for name, calls in SAMPLES.items() if len(calls) == 1 and calls[0].arguments}
AMBIGUOUS = {"text that looks like JSON", "code", "html", "backslashes", "quotes"}
"""Calls in which the templates of LFM2.5 leave quotes and backslashes unescaped."""


@needs_templates
@templates
def test_a_call_that_a_template_shows_is_read_as_it_was_made(file: Path) -> None:
    source = file.read_text()
    chosen = OutputFormat.choose(AUTO, AUTO, source)
    if not chosen.tools:
        pytest.skip("the template shows no format of calls")
    template = PlainTemplate(source)
    tools = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    shown = 0
    for sample, made in CALLED.items():
        function = {"name": made.name, "arguments": dict(made.arguments)}
        each = {"id": f"functions.{made.name}:0", "type": "function", "function": function}
        if chosen.tools == "mistral":
            each["id"] = "abcdef012"
        prompt = template.render(
            [said("user", "wuser1"), said("assistant", "", tool_calls=[each])], tools, add_generation_prompt=False
        )
        text = (prompt or "").rpartition("wuser1")[2]
        if made.name not in text or (chosen.tools == "lfm2" and sample in AMBIGUOUS):
            continue
        shown += 1
        if call_format(chosen.tools).bare:
            text = text[text.index("{") :]
        parser = OutputFormat("", chosen.tools).parser(USE) if chosen.tools != "harmony" else chosen.parser(USE)
        assert parser is not None
        [(name, arguments)] = read(parser, [text]).calls
        assert (name, json.loads(arguments)) == made, text
    if not shown:
        pytest.skip("the template shows no calls, or fails")
