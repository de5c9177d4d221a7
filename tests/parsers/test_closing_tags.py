"""Closing tags that a model leaves out, writes into a value, or adds: calls are the same, however the text is cut."""

from __future__ import annotations

import json

import pytest

from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.answer_pieces import PieceKind
from poolgrid.server.frontend.tool_use import ToolUse

SCHEMA = {
    "type": "object",
    "properties": {"v": {"type": "string"}, "w": {"type": "string"}},
    "required": ["v", "w"],
}
USE = ToolUse(frozenset({"f"}), schemas={"f": SCHEMA})


def read(name: str, text: str, size: int) -> tuple[str, list[str]]:
    """Return the content and the arguments of the calls of a text that arrives in pieces of some size."""
    parser = OutputFormat("", name).parser(USE)
    assert parser is not None
    pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
    content, calls = "", []
    for kind, part in [*pieces, *parser.finish()]:
        if kind is PieceKind.CALL:
            assert part == "f"
            calls.append("")
        elif kind is PieceKind.ARGUMENTS:
            calls[-1] += part
        else:
            content += part
    return content, calls


def coder(inner: str, end: str = "</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=f>\n{inner}{end}"


def glm(inner: str, end: str = "</tool_call>") -> str:
    return f"<tool_call>f\n{inner}{end}"


A, B = "<parameter=v>\na\n</parameter>\n", "<parameter=w>\nb\n</parameter>\n"
GLM_A, GLM_B = "<arg_key>v</arg_key>\n<arg_value>a</arg_value>\n", "<arg_key>w</arg_key>\n<arg_value>b</arg_value>\n"

CASES: list[tuple[str, str, str, list[dict[str, str]]]] = [
    ("no </parameter> before </function>", "qwen3_coder", coder("<parameter=v>\na\n"), [{"v": "a"}]),
    ("no </parameter> before <parameter=", "qwen3_coder", coder(f"<parameter=v>\na\n{B}"), [{"v": "a", "w": "b"}]),
    ("no </function>", "qwen3_coder", coder(A, "</tool_call>"), [{"v": "a"}]),
    ("nothing after </parameter>", "qwen3_coder", coder(A.rstrip(), ""), [{"v": "a"}]),
    ("nothing after the second </parameter>", "qwen3_coder", coder(A + B, ""), [{"v": "a", "w": "b"}]),
    ("no </tool_call>", "qwen3_coder", coder(A, "</function>"), [{"v": "a"}]),
    ("no </function>, another call", "qwen3_coder", f"{coder(A, '</tool_call>')}\n{coder(A)}", [{"v": "a"}] * 2),
    ("a second call that ends after </parameter>", "qwen3_coder", f"{coder(A)}\n{coder(A, '')}", [{"v": "a"}] * 2),
    ("</parameter> in a value", "qwen3_coder", coder("<parameter=v>\nx </parameter> y\n</parameter>\n"),
     [{"v": "x </parameter> y"}]),
    ("</tool_call> in a value", "qwen3_coder", coder("<parameter=v>\nx </tool_call> y\n</parameter>\n"),
     [{"v": "x </tool_call> y"}]),
    ("nothing after </arg_value>", "glm45", glm(GLM_A.rstrip(), ""), [{"v": "a"}]),
    ("nothing after the second </arg_value>", "glm45", glm(GLM_A + GLM_B, ""), [{"v": "a", "w": "b"}]),
    ("no </arg_value> before </tool_call>", "glm45", glm("<arg_key>v</arg_key>\n<arg_value>a"), [{"v": "a"}]),
    ("[/TOOL_CALLS] after a list", "mistral",
     '[TOOL_CALLS][{"name": "f", "arguments": {"v": "a"}}][/TOOL_CALLS]', [{"v": "a"}]),
    ("[/TOOL_CALLS] after white space", "mistral",
     '[TOOL_CALLS] [{"name": "f", "arguments": {"v": "a"}}] [/TOOL_CALLS]\n', [{"v": "a"}]),
    ("[/TOOL_CALLS] after a name and arguments", "mistral",
     '[TOOL_CALLS]f[ARGS]{"v": "a"}[/TOOL_CALLS]', [{"v": "a"}]),
    ("[/TOOL_CALLS] after each of two", "mistral",
     '[TOOL_CALLS]f[ARGS]{"v": "a"}[/TOOL_CALLS][TOOL_CALLS]f[ARGS]{"v": "b"}[/TOOL_CALLS]', [{"v": "a"}, {"v": "b"}]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("name", "text", "right"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_calls_are_whole_and_no_tag_is_content(name: str, text: str, right: list[dict[str, str]], size: int) -> None:
    content, calls = read(name, text, size)
    assert (content, [json.loads(call) for call in calls]) == ("", right)


@pytest.mark.parametrize("end", ["<parameter=w>", "<parameter=w>\nb", "<parame", "</paramete"])
def test_call_that_breaks_off_within_an_argument_does_not_look_whole(end: str) -> None:
    text = coder(A, end)
    content, calls = read("qwen3_coder", text, 1)
    if calls:
        with pytest.raises(json.JSONDecodeError):
            json.loads(calls[0])
    else:
        assert content == text


def test_closing_marker_without_a_call_is_content() -> None:
    assert read("mistral", "so [/TOOL_CALLS] it is", 1) == ("so [/TOOL_CALLS] it is", [])
