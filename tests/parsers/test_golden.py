"""Every transcript is taken apart the same way wherever it is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.plugins.parsers.formats import CALL_NAMES, REASONING_NAMES
from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind
from tests.examples import examples
from tests.parsers.transcripts import TOOLS, TRANSCRIPTS, Answer, Transcript

NAMES = [transcript.name for transcript in TRANSCRIPTS]


def parser_of(transcript: Transcript) -> OutputParser:
    parser = transcript.format.parser(transcript.tools, transcript.prompt_end, transcript.guided_json)
    assert parser is not None
    return parser


def read(parser: OutputParser, parts: Sequence[str]) -> Answer:
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return answer_of([*pieces, *parser.finish()])


def answer_of(pieces: Iterable[AnswerPiece]) -> Answer:
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for kind, text in pieces:
        if kind is PieceKind.CONTENT:
            content += text
        elif kind is PieceKind.REASONING:
            reasoning += text
        elif kind is PieceKind.CALL:
            calls.append((text, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return Answer(content, reasoning, tuple(calls))


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=NAMES)
def test_a_transcript_may_be_cut_at_any_border(transcript: Transcript) -> None:
    text = transcript.text
    for at in range(1, len(text)):
        assert read(parser_of(transcript), [text[:at], text[at:]]) == transcript.answer, text[:at]


@given(st.data())
@settings(max_examples=examples(30))
def test_a_transcript_may_be_cut_in_many_places(data: st.DataObject) -> None:
    transcript = data.draw(st.sampled_from(TRANSCRIPTS))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(transcript.text)), max_size=12)))
    parts = [transcript.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(transcript.text)], strict=True)]
    assert read(parser_of(transcript), parts) == transcript.answer


FORMATS = [
    *(OutputFormat(reasoning=name) for name in REASONING_NAMES),
    *(OutputFormat(tools=name) for name in CALL_NAMES),
    OutputFormat("qwen3", "hermes"),
    OutputFormat("harmony", "harmony"),
]
HEADER = re.compile(r"<\|(?:start|channel)\|>(?:(?!<\|(?:message|end|return|call)\|>).)*<\|message\|>", re.DOTALL)
"""What stands before a message of harmony: its words are a role, a channel and a recipient, and are not shown."""

FRAGMENTS = sorted(
    {marker for output in FORMATS for marker in output.markers(TOOLS)}
    | {
        '{"name": "',
        "get_time",
        '"',
        ', "arguments": ',
        "{}",
        "{",
        "}",
        "[",
        "]",
        ", ",
        ";",
        "(",
        ")",
        "<function=",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        ">",
        "q=1",
        "\n",
        " ",
    }
    | {
        "analysis",
        "final",
        "commentary to=functions.f",
        "assistant",
        "```json\n",
        "```",
        "function",
        "text",
        "é😀",
        "\\",
    }
)


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(FRAGMENTS), max_size=25), st.data())
@settings(max_examples=examples(80))
def test_whatever_a_model_writes_no_text_is_lost_and_cuts_do_not_matter(
    output: OutputFormat, fragments: list[str], data: st.DataObject
) -> None:
    def fresh() -> OutputParser:
        parser = output.parser(TOOLS)
        assert parser is not None
        return parser

    text = "".join(fragments)
    whole = read(fresh(), [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(fresh(), parts) == whole
    assert read(fresh(), list(text)) == whole
    shown = whole.content + whole.reasoning + "".join(name + arguments for name, arguments in whole.calls)
    # Markers, white space and the keys around a call go; what says something stays.
    for word in ("text", "é😀"):
        has_headers = "harmony" in (output.reasoning, output.tools)
        said = (HEADER.sub("", text) if has_headers else text).count(word)
        assert said <= shown.count(word) <= text.count(word)


CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "§", "days": [1]}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "§"}}, {"name": "f"}]',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "§"}}; {"name": "f", "parameters": {}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "§"}[TOOL_CALLS][{"name": "f"}]',
    "pythonic": "[get_weather(city='§', metric=True), f()]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "§"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "§"}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n§\n</parameter>\n<parameter=days>\n[1]\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>§</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>[1]</arg_value>\n</tool_call>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "§"}<|call|>',
}
"""Two calls, or one, as each format has them; ``§`` is an argument: one character, which no damage cuts in two."""


BEGINNINGS = (
    "",
    "§\n",
    "<think>§</think>§\n",
    "<think>§\n",
    "§</think>\n\n",
    "<think>§</think>§<think>§</think>",
    "<think>§ `</think>` §</think>§\n```\n<think>§</think>\n```\n",
    "[THINK]§[/THINK]§",
    "Here is my thought process: § Here is my response: §",
)


def damaged(text: str, data: st.DataObject) -> str:
    """Cut, remove, repeat or exchange parts of a text, or put markers into it."""
    for _ in range(data.draw(st.integers(0, 3))):
        a, b = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
        how = data.draw(st.sampled_from(("cut", "remove", "repeat", "insert", "exchange")))
        if how == "cut":
            text = text[:b]
        elif how == "remove":
            text = text[:a] + text[min(b, a + 8) :]
        elif how == "repeat":
            text = text[:b] + text[a:b] + text[b:]
        elif how == "insert":
            text = text[:a] + data.draw(st.sampled_from(FRAGMENTS)) + text[a:]
        else:
            text = text[:a] + data.draw(st.sampled_from("'\"{}[]<>,:\\\n")) + text[a + 1 :]
    return text


@given(st.sampled_from(sorted(CALLS)), st.sampled_from(("", "qwen3", "deepseek_r1", "mistral", "granite")), st.data())
@settings(max_examples=examples(120))
def test_damaged_output_loses_no_text_and_whole_output_has_whole_arguments(
    tools: str, reasoning: str, data: st.DataObject
) -> None:
    output = OutputFormat("harmony" if tools == "harmony" else reasoning, tools)
    prompt_end = data.draw(st.sampled_from(("", "<think>\n", "<think>\n\n</think>\n\n")))
    written = data.draw(st.sampled_from(BEGINNINGS)) + CALLS[tools]
    text = damaged(written, data)

    def fresh() -> OutputParser:
        parser = output.parser(TOOLS, prompt_end)
        assert parser is not None
        return parser

    whole = read(fresh(), [text])
    assert read(fresh(), list(text)) == whole
    for name, arguments in whole.calls:
        assert name in TOOLS.declared
        assert arguments.startswith("{")
        assert text != written or isinstance(json.loads(arguments), dict)
    shown = whole.content + whole.reasoning + "".join(name + arguments for name, arguments in whole.calls)
    said = (HEADER.sub("", text) if tools == "harmony" else text).count("§")
    assert said <= shown.count("§") <= text.count("§"), (text, whole)


@pytest.mark.parametrize("tools", sorted(CALLS))
def test_a_call_cut_at_any_place_is_whole_or_the_beginning_of_one_or_content(tools: str) -> None:
    text = CALLS[tools]

    def calls_in(text: str) -> tuple[tuple[str, str], ...]:
        parser = OutputFormat("harmony" if tools == "harmony" else "", tools).parser(TOOLS)
        assert parser is not None
        return read(parser, [text]).calls

    for at in range(len(text) + 1):
        *whole, last = calls_in(text[:at]) or [("", "{}")]
        assert last[1].startswith("{")
        assert at < len(text) or isinstance(json.loads(last[1]), dict)
        assert tuple(whole) == calls_in(text)[: len(whole)]
    for name, arguments in calls_in(text + "\n" + text):
        assert name in TOOLS.declared
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("header", ["<|start|>é😀<|message|>", "<|start|>assistant text<|channel|>final<|message|>"])
def test_what_a_header_of_harmony_says_is_not_shown_but_what_follows_is(header: str) -> None:
    parser = OutputFormat("harmony", "harmony").parser(TOOLS)
    assert parser is not None

    assert read(parser, [header, "the text"]) == Answer(content="the text")
    assert HEADER.sub("", header) == ""
