"""Golden transcripts: what models write, format by format, and what clients are to get of it."""

from __future__ import annotations

from typing import NamedTuple

from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.tool_use import ToolUse

TOOLS = ToolUse(
    frozenset({"get_weather", "get_time", "search", "f", "g"}),
    schemas={
        "get_weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "metric": {"type": "boolean"},
                "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "zone": {"$ref": "#/$defs/Zone"},
            },
            "$defs": {"Zone": {"enum": ["north", "5"]}},
        }
    },
)


class Answer(NamedTuple):
    """A whole answer: content, reasoning, calls as (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class Transcript(NamedTuple):
    name: str
    format: OutputFormat
    text: str
    answer: Answer
    tools: ToolUse | None = TOOLS
    prompt_end: str = ""
    guided_json: bool = False


PARIS = '{"city": "Paris", "days": [1, 2.5e3, -0], "note": "a \\"}{\\u00e9\\n ü😀"}'
HERMES = OutputFormat(tools="hermes")
LLAMA = OutputFormat(tools="llama3_json")
MISTRAL = OutputFormat(tools="mistral")
PYTHONIC = OutputFormat(tools="pythonic")
DEEPSEEK = OutputFormat(tools="deepseek_v3")
HARMONY = OutputFormat(reasoning="harmony", tools="harmony")
QWEN3 = OutputFormat(reasoning="qwen3", tools="hermes")
R1 = OutputFormat(reasoning="deepseek_r1")
QWEN_CODER = OutputFormat(tools="qwen3_coder")
GLM = OutputFormat(reasoning="qwen3", tools="glm45")
KIMI = OutputFormat(tools="kimi_k2")
GRANITE = OutputFormat(reasoning="granite", tools="granite")

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _qwen(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def _glm(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters)
    return f"<tool_call>{name}\n{body}</tool_call>"


def _kimi(head: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


_VALUES = (
    ("city", 'a "<b>"\n\n  é😀 </parameter '),
    ("days", " [1, 2] "),
    ("metric", "True"),
    ("limit", "1.5"),
    ("note", "null"),
    ("zone", "5"),
    ("other", "7"),
    ("words", '"quoted"'),
)
_READ = (
    '{"city": "a \\"<b>\\"\\n\\n  é😀 </parameter ", "days": [1, 2], "metric": true, "limit": 1.5, "note": null, '
    '"zone": "5", "other": 7, "words": "\\"quoted\\""}'
)


TRANSCRIPTS: list[Transcript] = [
    # qwen3_coder
    Transcript(
        "qwen3_coder: values of every kind",
        QWEN_CODER,
        f"I look.\n\n{_qwen('get_weather', *_VALUES)}\n{_qwen('get_time')}\nDone.",
        Answer("I look.Done.", calls=(("get_weather", _READ), ("get_time", "{}"))),
    ),
    Transcript(
        "qwen3_coder: without the outer tag and line breaks",
        QWEN_CODER,
        "<function=get_weather><parameter=city></parameter><parameter=days>soon</parameter></function>",
        Answer(calls=(("get_weather", '{"city": "", "days": "soon"}'),)),
    ),
    Transcript(
        "qwen3_coder: line breaks of the value itself",
        QWEN_CODER,
        _qwen("get_weather", ("city", "\na\n")),
        Answer(calls=(("get_weather", '{"city": "\\na\\n"}'),)),
    ),
    Transcript(
        "qwen3_coder: an object that is not JSON, and no Infinity",
        QWEN_CODER,
        _qwen("search", ("q", "{'a': 1}"), ("r", "Infinity"), ("s", '{"a": [1, {}]}')),
        Answer(calls=(("search", '{"q": "{\'a\': 1}", "r": "Infinity", "s": {"a": [1, {}]}}'),)),
    ),
    Transcript(
        "qwen3_coder: cut in a string",
        QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</para",
        Answer(calls=(("get_weather", '{"city": "Paris\\n'),)),
    ),
    Transcript(
        "qwen3_coder: cut before an argument",
        QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parame",
        Answer(calls=(("get_weather", '{"city": "Paris"'),)),
    ),
    Transcript(
        "qwen3_coder: cut in the end",
        QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</func",
        Answer(calls=(("get_weather", '{"city": "Paris"}'),)),
    ),
    Transcript(
        "qwen3_coder: talk of tags",
        QWEN_CODER,
        "Write <function=f> and <tool_call>{} or <function=>.",
        Answer("Write <function=f> and <tool_call>{} or <function=>."),
    ),
    Transcript(
        "qwen3_coder: one call at most",
        QWEN_CODER,
        f"{_qwen('get_time')}\n{_qwen('get_time')}",
        Answer(calls=(("get_time", "{}"),)),
        ToolUse(TOOLS.names, parallel=False),
    ),
    # glm45
    Transcript(
        "glm45: values of every kind",
        GLM,
        f"<think>Hm</think>\nI look.\n{_glm('get_weather', *_VALUES)}{_glm('get_time')}",
        Answer("I look.", "Hm", (("get_weather", _READ), ("get_time", "{}"))),
    ),
    Transcript(
        "glm45: without line breaks",
        GLM,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>\nA\n</arg_value></tool_call>",
        Answer(calls=(("get_weather", '{"city": "\\nA\\n"}'),)),
    ),
    Transcript(
        "glm45: a word after the name",
        GLM,
        "<tool_call>get time</tool_call>",
        Answer("<tool_call>get time</tool_call>"),
    ),
    Transcript(
        "glm45: a key without a value",
        GLM,
        "<tool_call>get_time<arg_key>a</arg_key>b",
        Answer("<tool_call>get_time<arg_key>a</arg_key>b"),
    ),
    # kimi_k2
    Transcript(
        "kimi_k2: content and two calls",
        KIMI,
        f"I look.<|tool_calls_section_begin|>{_kimi('functions.get_weather:0', PARIS)}"
        f"{_kimi(' get_time:1 ', '{}')}<|tool_calls_section_end|>",
        Answer("I look.", calls=(("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript(
        "kimi_k2: a name without a number",
        KIMI,
        _kimi("functions.get_time", "{}"),
        Answer(calls=(("get_time", "{}"),)),
    ),
    Transcript(
        "kimi_k2: no head",
        KIMI,
        _kimi("", "{}"),
        Answer("<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ),
    # hermes
    Transcript("hermes: one call", HERMES, _hermes("get_weather", PARIS), Answer(calls=(("get_weather", PARIS),))),
    Transcript(
        "hermes: content, two calls, content",
        HERMES,
        f"Let me look.\n\n{_hermes('get_weather', PARIS)}\n{_hermes('get_time', '{}')}\n Done. ",
        Answer("Let me look.Done. ", calls=(("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript("hermes: only content", HERMES, "  a < b <tool_ca ll> \n", Answer("  a < b <tool_ca ll> \n")),
    Transcript(
        "hermes: arguments before the name",
        HERMES,
        f'<tool_call>{{"id": 3, "arguments": {PARIS}, "name": "f"}}</tool_call>',
        Answer(calls=(("f", PARIS),)),
    ),
    Transcript(
        "hermes: arguments in a string",
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer(calls=(("f", '{"a": 1}'),)),
    ),
    Transcript(
        "hermes: no arguments and null",
        HERMES,
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"arguments": null, "name": "g"}</tool_call>',
        Answer(calls=(("f", "{}"), ("g", "{}"))),
    ),
    Transcript(
        "hermes: a call that the limit cut has the arguments so far",
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        Answer(calls=(("f", '{"a": "b'),)),
    ),
    Transcript(
        "hermes: cut before the arguments",
        HERMES,
        'Hm <tool_call>\n{"name": "f", "argu',
        Answer('Hm <tool_call>\n{"name": "f", "argu'),
    ),
    Transcript("hermes: only the opener", HERMES, "<tool_call>", Answer("<tool_call>")),
    Transcript(
        "hermes: no JSON", HERMES, "Use <tool_call> tags </tool_call>!", Answer("Use <tool_call> tags </tool_call>!")
    ),
    Transcript(
        "hermes: malformed, then a good call",
        HERMES,
        f'a <tool_call>{{"name": f}}</tool_call> {_hermes("get_time", "{}")}',
        Answer('a <tool_call>{"name": f}</tool_call>', calls=(("get_time", "{}"),)),
    ),
    Transcript(
        "hermes: arguments that stop being JSON",
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call> x',
        Answer("x", calls=(("f", '{"a": 1, b: 2}}'),)),
    ),
    Transcript(
        "hermes: arguments that are no object",
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        Answer('<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ),
    Transcript(
        "hermes: no name",
        HERMES,
        '<tool_call>{"arguments": {}}</tool_call>',
        Answer('<tool_call>{"arguments": {}}</tool_call>'),
    ),
    Transcript(
        "hermes: one call at most",
        HERMES,
        f"{_hermes('get_weather', PARIS)}\n{_hermes('get_time', '{}')}",
        Answer(calls=(("get_weather", PARIS),)),
        ToolUse(TOOLS.names, parallel=False),
    ),
    # llama3
    Transcript(
        "llama3: one call",
        LLAMA,
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        Answer(calls=(("get_weather", PARIS),)),
    ),
    Transcript(
        "llama3: two calls after the tag",
        LLAMA,
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}; '
        '{"name": "get_time", "parameters": {}}',
        Answer(calls=(("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript(
        "llama3: a list",
        LLAMA,
        '[{"name": "get_time", "parameters": {}}, {"name": "search", "arguments": {"q": "]"}}]',
        Answer(calls=(("get_time", "{}"), ("search", '{"q": "]"}'))),
    ),
    Transcript(
        "llama3: JSON that is the answer",
        LLAMA,
        ' {"name": "Ada", "parameters": {}} ',
        Answer(' {"name": "Ada", "parameters": {}} '),
    ),
    Transcript("llama3: text; then braces", LLAMA, 'See {"name": "get_time"}', Answer('See {"name": "get_time"}')),
    Transcript(
        "llama3: code after the tag",
        LLAMA,
        '<|python_tag|>brave_search.call(query="x")',
        Answer('<|python_tag|>brave_search.call(query="x")'),
    ),
    # mistral
    Transcript(
        "mistral: a list of calls",
        MISTRAL,
        f'Sure. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "g", "arguments": {{}}}}]',
        Answer("Sure.", calls=(("get_weather", PARIS), ("g", "{}"))),
    ),
    Transcript(
        "mistral: names and arguments",
        MISTRAL,
        f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        Answer(calls=(("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript("mistral: names without a marker", MISTRAL, '[TOOL_CALLS]f{"a": 1}', Answer(calls=(("f", '{"a": 1}'),))),
    Transcript("mistral: an empty list", MISTRAL, "[TOOL_CALLS][]", Answer("[TOOL_CALLS][]")),
    Transcript(
        "mistral: a list that the limit cut",
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, ',
        Answer(calls=(("f", '{"a": 1}'),)),
    ),
    Transcript(
        "mistral: cut inside the second call",
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na',
        Answer(', {"na', calls=(("f", "{}"),)),
    ),
    # pythonic
    Transcript(
        "pythonic: two calls",
        PYTHONIC,
        "[get_weather(city=\"Pa)'ris\", days=[1, 2], deep={'a': None, 'b': true}), get_time()]",
        Answer(
            calls=(
                ("get_weather", '{"city": "Pa)\'ris", "days": [1, 2], "deep": {"a": null, "b": true}}'),
                ("get_time", "{}"),
            )
        ),
    ),
    Transcript(
        "pythonic: markers and escapes",
        PYTHONIC,
        "<|python_start|>[search(q='it\\'s \\\\', n=-3)]<|python_end|>",
        Answer(calls=(("search", '{"q": "it\'s \\\\", "n": -3}'),)),
    ),
    Transcript("pythonic: a list of numbers", PYTHONIC, "[1, 2, 3]", Answer("[1, 2, 3]")),
    Transcript("pythonic: an unknown function", PYTHONIC, "[foo(a=1)] is it", Answer("[foo(a=1)] is it")),
    Transcript("pythonic: a known prefix", PYTHONIC, "[get_times(a=1)]", Answer("[get_times(a=1)]")),
    Transcript("pythonic: positional", PYTHONIC, '[search("x")]', Answer('[search("x")]')),
    Transcript("pythonic: not literal", PYTHONIC, "[search(q=open('x'))]", Answer("[search(q=open('x'))]")),
    Transcript("pythonic: not Python", PYTHONIC, "[search(q=1 2)]", Answer("[search(q=1 2)]")),
    Transcript(
        "pythonic: cut", PYTHONIC, "[get_time(), search(q='", Answer(", search(q='", calls=(("get_time", "{}"),))
    ),
    # deepseek
    Transcript(
        "deepseek v3: two calls",
        DEEPSEEK,
        f"Yes.{_BEGIN}{_CALL}function{_SEP}get_weather\n```json\n{PARIS}\n```{_CALLED}\n"
        f"{_CALL}function{_SEP}get_time\n```json\n{{}}\n```{_CALLED}{_END}",
        Answer("Yes.", calls=(("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript(
        "deepseek v3.1: two calls",
        DEEPSEEK,
        f"{_BEGIN}{_CALL}get_weather{_SEP}{PARIS}{_CALLED}{_CALL}get_time{_SEP}{{}}{_CALLED}{_END}",
        Answer(calls=(("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript(
        "deepseek v3: no call",
        DEEPSEEK,
        f"{_BEGIN}{_CALL}function{_SEP}what is this? {{}}{_CALLED}{_END} x",
        Answer(f"{_CALL}function{_SEP}what is this? {{}}{_CALLED} x"),
    ),
    Transcript(
        "deepseek v3: no head at all",
        DEEPSEEK,
        f"{_CALL}{'a' * 600}{{}}",
        Answer(f"{_CALL}{'a' * 600}{{}}"),
    ),
    # granite
    Transcript(
        "granite: reasoning in words",
        GRANITE,
        "Here is my thought process:\n Two is even. \n\nHere is my response:\n\nYes.\n",
        Answer("Yes.\n", "Two is even."),
    ),
    Transcript(
        "granite: reasoning in tags",
        GRANITE,
        "<think>Even.</think>\n<response>Yes.</response>",
        Answer("Yes.", "Even."),
    ),
    Transcript("granite: none", GRANITE, "Here is my answer.", Answer("Here is my answer.")),
    Transcript(
        "granite: calls",
        GRANITE,
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]',
        Answer(calls=(("get_weather", PARIS),)),
    ),
    # think tags
    Transcript("r1: no opening tag", R1, "Hmm.\n</think>\n\nYes.", Answer("Yes.", "Hmm."), None),
    Transcript("r1: with one", R1, "<think>\nHmm.\n</think>\n\nYes.", Answer("Yes.", "Hmm."), None),
    Transcript("r1: nothing thought", R1, "<think>\n\n</think>\n\nYes.", Answer("Yes."), None),
    Transcript("r1: cut while thinking", R1, "<think>Hmm </thi", Answer("", "Hmm </thi"), None),
    Transcript(
        "r1: closed by the prompt", R1, "Yes. </think>", Answer("Yes. </think>"), None, "<｜Assistant｜></think>"
    ),
    Transcript("r1: guided JSON", R1, '{"a": 1}', Answer('{"a": 1}'), None, "<think>\n", True),
    Transcript("r1: guided JSON after thinking", R1, "Hm</think>{}", Answer("{}", "Hm"), None, "<think>\n", True),
    Transcript("qwen3: none", QWEN3, "Yes. <think>", Answer("Yes. <think>")),
    Transcript("qwen3: only white space", QWEN3, " \n ", Answer(" \n ")),
    Transcript("qwen3: half a tag", QWEN3, " <thin", Answer(" <thin")),
    Transcript(
        "qwen3: opened by the prompt", QWEN3, "Hm</think>Yes", Answer("Yes", "Hm"), TOOLS, "assistant\n<think>\n"
    ),
    Transcript(
        "qwen3: reasoning, content and a call",
        QWEN3,
        f"<think>\nI should look: <tool_call> \n</think>\n\nOne moment.\n{_hermes('get_weather', PARIS)}",
        Answer("One moment.", "I should look: <tool_call>", (("get_weather", PARIS),)),
    ),
    # guided calls
    Transcript(
        "required: a list",
        QWEN3,
        '[{"name": "get_time", "parameters": {}}, {"name": "search", "parameters": {"q": 1}}]',
        Answer(calls=(("get_time", "{}"), ("search", '{"q": 1}'))),
        ToolUse(TOOLS.names, required=True),
        "<think>\n",
    ),
    Transcript(
        "named: the arguments",
        OutputFormat(),
        f" {PARIS}",
        Answer(calls=(("get_weather", PARIS),)),
        ToolUse(TOOLS.names, named="get_weather"),
    ),
    Transcript(
        "named: an engine that was not guided",
        OutputFormat(),
        "I will not.",
        Answer("I will not."),
        ToolUse(TOOLS.names, named="get_weather"),
    ),
    # harmony
    Transcript(
        "harmony: reasoning and answer",
        HARMONY,
        "<|channel|>analysis<|message|>Easy. <|end|><|start|>assistant<|channel|>final<|message|>4 < 5<|return|>",
        Answer("4 < 5", "Easy. "),
    ),
    Transcript(
        "harmony: preamble and two calls",
        HARMONY,
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>analysis<|message|>Twice.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{PARIS}<|call|><|start|>assistant to=functions.get_time<|channel|>commentary json<|message|><|call|>",
        Answer("I look.", "Look.\nTwice.", (("get_weather", PARIS), ("get_time", "{}"))),
    ),
    Transcript("harmony: without markers", HARMONY, "Just text.", Answer("Just text.")),
    Transcript("harmony: cut in a header", HARMONY, "<|channel|>anal", Answer("<|channel|>anal")),
    Transcript("harmony: cut in a body", HARMONY, "<|channel|>final<|message|>So <|en", Answer("So <|en")),
    Transcript(
        "harmony: an end forgotten",
        HARMONY,
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes",
        Answer("Yes", "Hm"),
    ),
    Transcript(
        "harmony: text between messages",
        HARMONY,
        "<|channel|>final<|message|>A<|end|>\n stray <|end|>",
        Answer("A\n\n stray "),
    ),
    Transcript(
        "harmony: a tool of its own",
        HARMONY,
        "<|channel|>analysis to=python<|message|>1+1<|call|>",
        Answer("", "1+1"),
    ),
    Transcript("harmony: an endless header", HARMONY, "<|channel|>" + "x" * 1100, Answer("<|channel|>" + "x" * 1100)),
    Transcript(
        "harmony: reasoning as content",
        OutputFormat(tools="harmony"),
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        Answer("Hm\nYes"),
    ),
    # What models write beside their formats.
    Transcript(
        "hermes: a function that the request does not have",
        HERMES,
        f"{_hermes('remove', '{}')}\n{_hermes('functions.get_time', '{}')}",
        Answer(_hermes("remove", "{}"), calls=(("get_time", "{}"),)),
    ),
    Transcript(
        "hermes: an object as Python prints it",
        HERMES,
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': \"L'Aquila\", 'metric': True, 'note': None,}}",
        Answer(calls=(("get_weather", '{"city": "L\'Aquila", "metric": true, "note": null}'),)),
    ),
    Transcript(
        "hermes: a line break in a string, and an escape that JSON does not have",
        HERMES,
        '<tool_call>{"name": "search", "arguments": {"q": "a\nb\\d+"}}</tool_call>',
        Answer(calls=(("search", '{"q": "a\\nb\\\\d+"}'),)),
    ),
    Transcript(
        "hermes: text where the schema has other types",
        HERMES,
        _hermes("get_weather", '{"city": "5", "days": "[1, 2]", "metric": "True", "limit": "2.5"}'),
        Answer(calls=(("get_weather", '{"city": "5", "days": [1, 2], "metric": true, "limit": 2.5}'),)),
    ),
    Transcript(
        "hermes: the last brace is missing before the closing tag",
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> x',
        Answer("x", calls=(("f", '{"a": 1}'),)),
    ),
    Transcript(
        "hermes: the last brace is missing at the end",
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        Answer(calls=(("f", '{"a": 1}'),)),
    ),
    Transcript(
        "hermes: no closing tag before the next call",
        HERMES,
        '<tool_call>{"name": "f"}<tool_call>{"name": "g"}\n{"name": "get_time"}',
        Answer(calls=(("f", "{}"), ("g", "{}"), ("get_time", "{}"))),
    ),
    Transcript(
        "hermes: an opener twice",
        HERMES,
        f"<tool_call>\n{_hermes('f', '{}')}",
        Answer("<tool_call>", calls=(("f", "{}"),)),
    ),
    Transcript(
        "hermes: tags in a string",
        HERMES,
        _hermes("f", '{"a": "</tool_call><tool_call>"}'),
        Answer(calls=(("f", '{"a": "</tool_call><tool_call>"}'),)),
    ),
    Transcript(
        "hermes: a list that the tag ends",
        HERMES,
        '<tool_call>[{"name": "f"}, {"name": "g"}, </tool_call>x',
        Answer("x", calls=(("f", "{}"), ("g", "{}"))),
    ),
    Transcript(
        "pythonic: a list that the marker ends",
        PYTHONIC,
        "<|python_start|>[f(a=1), g()<|python_end|>x",
        Answer("x", calls=(("f", '{"a": 1}'), ("g", "{}"))),
    ),
    Transcript(
        "mistral: a list that the next marker ends",
        MISTRAL,
        '[TOOL_CALLS][{"name": "f"}[TOOL_CALLS]g[ARGS]{}',
        Answer(calls=(("f", "{}"), ("g", "{}"))),
    ),
    Transcript(
        "llama3: calls one below the other",
        LLAMA,
        '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}',
        Answer(calls=(("f", "{}"), ("g", "{}"))),
    ),
    Transcript(
        "kimi_k2: ids that a client cleaned",
        KIMI,
        "".join(_kimi(head, "{}") for head in ("functions_get_weather_1", "functions.get_time_3", "get_time:2", "f-0")),
        Answer(calls=(("get_weather", "{}"), ("get_time", "{}"), ("get_time", "{}"), ("f", "{}"))),
    ),
    Transcript(
        "kimi_k2: an unknown function, then a known one",
        KIMI,
        _kimi("functions.remove:0", "{}") + _kimi("functions.f:1", "{}"),
        Answer(_kimi("functions.remove:0", "{}"), calls=(("f", "{}"),)),
    ),
    Transcript(
        "deepseek v3: a head that another call cuts",
        DEEPSEEK,
        f"{_CALL}get{_CALL}get_time{_SEP}{{}}{_CALLED}",
        Answer(f"{_CALL}get", calls=(("get_time", "{}"),)),
    ),
    Transcript(
        "qwen3_coder: values as Python prints them",
        QWEN_CODER,
        _qwen("get_weather", ("days", "[1, 2,]"), ("metric", "TRUE"), ("limit", "None"), ("zone", "north")),
        Answer(calls=(("get_weather", '{"days": [1, 2], "metric": true, "limit": null, "zone": "north"}'),)),
    ),
    Transcript(
        "qwen3_coder: tags in a value",
        QWEN_CODER,
        _qwen("get_weather", ("city", "a </parameter> b </function> c <parameter=x> </tool_call> d"), ("note", "e")),
        Answer(
            calls=(
                (
                    "get_weather",
                    '{"city": "a </parameter> b </function> c <parameter=x> </tool_call> d", "note": "e"}',
                ),
            )
        ),
    ),
    Transcript(
        "qwen3_coder: closing tags are missing",
        QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=note>\nx\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=search>\n<parameter=q>\n1\n</parameter>\n</tool_call>\n"
        "<tool_call>\n<function=search>\n<parameter=q>\n2\n</parameter>",
        Answer(
            calls=(
                ("get_weather", '{"city": "Paris", "note": "x"}'),
                ("search", '{"q": 1}'),
                ("search", '{"q": 2}'),
            )
        ),
    ),
    Transcript(
        "qwen3_coder: an unknown function",
        QWEN_CODER,
        f"{_qwen('remove', ('a', '1'))}\n{_qwen('get_time')}",
        Answer(_qwen("remove", ("a", "1")), calls=(("get_time", "{}"),)),
    ),
    Transcript("qwen3_coder: a call as hermes writes it", QWEN_CODER, _hermes("f", "{}"), Answer(calls=(("f", "{}"),))),
    Transcript(
        "glm45: closing tags are missing",
        GLM,
        "<tool_call>get_weather\n<arg_key>city<arg_value>Paris\n<arg_key>note</arg_key>\n<arg_value>x</tool_call>"
        "<tool_call>get_time\n<arg_key>a</arg_key><arg_value>1</arg_value>",
        Answer(calls=(("get_weather", '{"city": "Paris\\n", "note": "x"}'), ("get_time", '{"a": 1}'))),
    ),
    Transcript(
        "glm45: tags in a value",
        GLM,
        _glm("get_weather", ("city", "a </arg_value> b </tool_call> c")),
        Answer(calls=(("get_weather", '{"city": "a </arg_value> b </tool_call> c"}'),)),
    ),
    Transcript(
        "harmony: an unknown function",
        HARMONY,
        "<|channel|>commentary to=functions.remove <|constrain|>json<|message|>{}<|call|>",
        Answer("<|channel|>commentary to=functions.remove <|constrain|>json<|message|>{}"),
    ),
    Transcript(
        "harmony: arguments that are no object, and a call that the limit cut",
        HARMONY,
        "<|channel|>commentary to=functions.f<|message|>[1]<|call|>"
        '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": ',
        Answer(
            "<|channel|>commentary to=functions.f<|message|>[1]\n"
            'assistant<|channel|>commentary to=functions.f<|message|>{"a": '
        ),
    ),
    Transcript(
        "harmony: a recipient without a namespace",
        HARMONY,
        "<|channel|>commentary to=f<|message|>{'a': True}<|call|>",
        Answer(calls=(("f", '{"a": true}'),)),
    ),
    Transcript(
        "reasoning: a call inside that is never closed",
        QWEN3,
        f"<think>\nI look. <tool_call> is it.\n{_hermes('f', '{}')}\n{_hermes('g', '{}')}\nDone.",
        Answer("Done.", "I look. <tool_call> is it.", (("f", "{}"), ("g", "{}"))),
        TOOLS,
    ),
    Transcript(
        "reasoning: closed after the call, and nothing follows",
        QWEN3,
        f"I look.\n{_hermes('f', '{}')}\n</think>\n\n",
        Answer("", "I look.", (("f", "{}"),)),
        TOOLS,
        "<think>\n",
    ),
    Transcript(
        "reasoning: a call that it only considers",
        QWEN3,
        f"<think>Maybe {_hermes('f', '{}')} or not.</think>No. {_hermes('g', '{}')}",
        Answer("No.", f"Maybe {_hermes('f', '{}')} or not.", (("g", "{}"),)),
    ),
    Transcript(
        "reasoning: cut in a call",
        QWEN3,
        '<think>Hm.\n<tool_call>{"name": "f", "arguments": {"a',
        Answer("", 'Hm.\n<tool_call>{"name": "f", "arguments": {"a'),
    ),
    Transcript(
        "reasoning: a section of Kimi's calls inside",
        OutputFormat("qwen3", "kimi_k2"),
        f"<think>Hm.<|tool_calls_section_begin|>{_kimi('functions.f:0', '{}')}<|tool_calls_section_end|>",
        Answer("", "Hm.", (("f", "{}"),)),
    ),
    Transcript(
        "reasoning: several stretches",
        QWEN3,
        f"<think>a</think>\n<think>b</think>\n\nText <think>c</think> more.\n{_hermes('f', '{}')}\n<think>d</think>End",
        Answer("Text more.End", "abcd", (("f", "{}"),)),
    ),
    Transcript(
        "reasoning: another stretch that the limit cut",
        QWEN3,
        f"<think>a</think>{_hermes('f', '{}')}\n<think>b",
        Answer("", "ab", (("f", "{}"),)),
    ),
    Transcript(
        "reasoning: tags that are talked about",
        QWEN3,
        "<think>The tag `</think>` ends it.</think>Write '<think>':\n```\n<think>x</think>\n```\nor <think> first.",
        Answer("Write '<think>':\n```\n<think>x</think>\n```\nor <think> first.", "The tag `</think>` ends it."),
    ),
    Transcript(
        "reasoning: tags in the arguments of a call",
        QWEN3,
        "<think>a</think>" + _hermes("f", '{"a": "<think>b</think>"}'),
        Answer("", "a", (("f", '{"a": "<think>b</think>"}'),)),
    ),
    Transcript(
        "reasoning: although the prompt has closed it",
        QWEN3,
        "<think>Hm</think>Yes",
        Answer("Yes", "Hm"),
        TOOLS,
        "<think>\n\n</think>\n\n",
    ),
    Transcript("reasoning: closed at once", QWEN3, "</think>\n\nYes </think>", Answer("Yes </think>")),
    Transcript("reasoning: closed at once in R1", R1, "\n</think>\n\nYes", Answer("Yes"), None),
    Transcript("reasoning: half a closing tag", QWEN3, "</thi", Answer("</thi")),
]
