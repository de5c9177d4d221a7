"""Calls and reasoning of each family of models, as its published template has them: read right however they are cut."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.plugins.parsers.formats import (
    CALL_NAMES,
    REASONING_NAMES,
    call_aliases,
    call_format,
    reasoning_aliases,
    reasoning_format,
)
from poolgrid.plugins.parsers.output_format import OutputFormat
from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind
from poolgrid.server.frontend.tool_use import ToolUse
from poolgrid.server.process.parser_names import AUTO
from tests.cases import for_each
from tests.examples import examples
from tests.parsers.samples import SAMPLES, SCHEMAS, USE, Call
from tests.parsers.test_golden import answer_of, read
from tests.parsers.transcripts import Answer
from tests.parsers.writers import WRITERS, Writer

FORMS = [
    pytest.param(name, writer, id=name if number == 0 else f"{name}-{number + 1}")
    for name, writers in WRITERS.items()
    for number, writer in enumerate(writers)
]
forms = pytest.mark.parametrize(("name", "writer"), FORMS)
IN_TAGS = ("tagged", "elements")


def fresh(name: str, use: ToolUse = USE, reasoning: str = "") -> OutputParser:
    parser = OutputFormat(name if name == "harmony" else reasoning, name).parser(use)
    assert parser is not None
    return parser


def cuts(text: str, seeds: int = 3) -> Iterator[Sequence[str]]:
    yield [text]
    yield list(text)
    for seed in range(seeds):
        generator = random.Random(seed)
        places = sorted(generator.sample(range(1, len(text)), min(len(text) - 1, generator.randrange(1, 40))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def decoded(answer: Answer) -> list[Call]:
    return [Call(name, json.loads(arguments)) for name, arguments in answer.calls]


def test_each_format_has_a_writer() -> None:
    assert set(WRITERS) == set(CALL_NAMES)
    assert len(SAMPLES) >= 20


@forms
@for_each("sample", SAMPLES)
def test_calls_are_read_as_they_were_meant_however_they_are_cut(name: str, writer: Writer, sample: str) -> None:
    text = writer(SAMPLES[sample])
    for parts in cuts(text):
        answer = read(fresh(name), parts)
        assert decoded(answer) == list(SAMPLES[sample]), parts
        assert answer.content == ""


@forms
def test_arguments_come_while_they_are_written(name: str, writer: Writer) -> None:
    """A line of a long text, or an item of a long list, arrives before the second one after it is written."""
    lines = [f"line {number:03}" for number in range(200)]
    for call, told in (
        (Call("write_file", {"path": "a", "content": "\n".join(lines)}), lines),
        (Call("edit", {"path": "a", "edits": [{"old": line, "new": "x"} for line in lines]}), lines),
        (Call("get_weather", {"city": "x", "place": {"floors": list(range(1000, 1200))}}), range(1000, 1200)),
    ):
        parser = fresh(name)
        heard = written = ""
        rest = deque(map(str, told))
        begun: list[str] = []
        for character in writer([call]):
            written += character
            heard += "".join(text for kind, text in parser.feed(character) if kind is PieceKind.ARGUMENTS)
            if character in "\n,":
                while rest and rest[0] in written:
                    begun.append(rest.popleft())
                assert len(begun) < 3 or begun[-3] in heard, written[-100:]
        assert json.loads(heard) == call.arguments


@pytest.mark.parametrize("named", ["", "write_file"])
def test_arguments_of_forced_calls_come_while_they_are_written(named: str) -> None:
    lines = [f"line {number:03}" for number in range(50)]
    call = Call("write_file", {"path": "a", "content": "\n".join(lines)})
    parser = OutputFormat("", "gemma4").parser(ToolUse(USE.names, required=not named, named=named, schemas=SCHEMAS))
    assert parser is not None
    arguments = json.dumps(call.arguments)
    heard = written = ""
    for character in arguments if named else f'[{{"name": "write_file", "parameters": {arguments}}}]':
        written += character
        heard += "".join(text for kind, text in parser.feed(character) if kind is PieceKind.ARGUMENTS)
        begun = [line for line in lines if line in written]
        assert len(begun) < 3 or begun[-2] in heard
    assert json.loads(heard) == call.arguments


@forms
def test_text_around_calls_is_content(name: str, writer: Writer) -> None:
    text = writer(SAMPLES["two"])
    after = "" if call_format(name).bare and not text.startswith("<") else "\n\nDone."
    before = "" if call_format(name).bare and not text.startswith("<") else "I look.\n\n"
    if name == "harmony":
        before, after = "<|channel|>final<|message|>I look.<|end|><|start|>assistant", ""
    for parts in cuts(before + text + after):
        answer = read(fresh(name), parts)
        assert decoded(answer) == list(SAMPLES["two"])
        assert answer.content == ("I look." if before else "") + after.strip()


@forms
def test_a_function_that_the_request_does_not_declare_is_content(name: str, writer: Writer) -> None:
    use = ToolUse(frozenset({"get_time"}), schemas={"get_time": SCHEMAS["get_time"]})
    text = writer([Call("write_file", {"path": "a.txt", "content": "some text"})])
    for parts in cuts(text):
        answer = read(fresh(name, use), parts)
        assert answer.calls == ()
        for word in ("write_file", "a.txt", "some text"):
            assert word in answer.content


@forms
def test_one_call_at_most_where_the_request_says_so(name: str, writer: Writer) -> None:
    use = ToolUse(USE.names, parallel=False, schemas=SCHEMAS)
    assert decoded(read(fresh(name, use), [writer(SAMPLES["two"])])) == [SAMPLES["two"][0]]


@forms
def test_an_answer_cut_in_its_calls_has_the_calls_before_and_the_beginning_of_the_last(
    name: str, writer: Writer
) -> None:
    calls = (*SAMPLES["two"], *SAMPLES["list of objects"])
    text = writer(calls)
    whole = read(fresh(name), [text]).calls
    by_letter, heard = fresh(name), list[AnswerPiece]()
    for at in range(len(text)):
        found = read(fresh(name), [text[:at]])
        assert answer_of([*heard, *copy.deepcopy(by_letter).finish()]) == found
        heard += by_letter.feed(text[at])
        for (name_found, arguments), (name_meant, meant) in zip(found.calls, whole, strict=False):
            assert name_found == name_meant
            certain = arguments[: max(0, len(arguments) - TAIL_CHARS)]
            assert meant.startswith(certain), (arguments, meant)
        assert [json.loads(arguments) for _, arguments in found.calls[:-1]] == [
            dict(call.arguments) for call in calls[: len(found.calls[:-1])]
        ]


@pytest.mark.parametrize(("name", "writer"), [form for form in FORMS if call_format(form.values[0]).form in IN_TAGS])
def test_a_call_cut_before_a_further_argument_is_not_complete(name: str, writer: Writer) -> None:
    one, two = (writer([Call("write_file", arguments)]) for arguments in ({"path": "a"}, {"path": "a", "content": "b"}))
    shared = next(at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    for at in range(shared + 1, two.index("content") + len("content")):
        [(_, arguments)] = read(fresh(name), [two[:at]]).calls
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


TAIL_CHARS = 64
"""The end of arguments that were cut may be a tag with a key, or a piece of a mark, an escape or a number."""


@given(st.sampled_from([each.values for each in FORMS]), st.sampled_from(sorted(SAMPLES)), st.data())
@settings(max_examples=examples(60))
def test_damaged_calls_are_read_the_same_however_they_are_cut(
    form: tuple[str, Writer], sample: str, data: st.DataObject
) -> None:
    name, writer = form
    text = writer(SAMPLES[sample])[:400]
    for _ in range(data.draw(st.integers(1, 3))):
        a = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        inserted = data.draw(
            st.sampled_from(("", "<", ">", '"', "'", "\\", "{", "}", "]", ",", "\n", text[:20], text[-20:]))
        )
        text = text[:a] + inserted + text[a + length :]
    whole = read(fresh(name), [text])
    assert read(fresh(name), list(text)) == whole
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert read(fresh(name), [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == whole
    for called, arguments in whole.calls:
        assert called in SCHEMAS
        assert arguments.startswith("{")


# Reasoning

REASONING = [name for name in REASONING_NAMES if name != "harmony"]


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_told_from_the_answer_however_it_is_cut(name: str) -> None:
    known = reasoning_format(name)
    for opener, closer in zip(known.openers, known.closers, strict=True):
        drops = known.drops[:2] if len(known.drops) >= 2 else ("", "")
        for text, prompt_end in (
            (f"{opener}\nI think: 1 < 2.\n{closer}\n\n{drops[0]}Yes.{drops[1]}", ""),
            (f"I think: 1 < 2.{closer}\n{drops[0]}Yes.{drops[1]}", f"assistant\n{opener}\n"),
        ):
            for parts in cuts(text):
                parser = OutputFormat(name).parser(None, prompt_end)
                assert parser is not None
                assert read(parser, parts) == Answer("Yes.", "I think: 1 < 2.")
        for text in ("Yes.", f"{drops[0]}Yes.{drops[1]}"):
            for parts in cuts(text):
                parser = OutputFormat(name).parser(None, f"{opener}\n\n{closer}\n\n")
                assert parser is not None
                assert read(parser, parts) == Answer("Yes.")


FAMILIES = {
    "Apertus": ("apertus", "apertus"),
    "Command A": ("cohere_command3", "cohere_command3"),
    "DeepSeek V3.2, V4": ("deepseek_r1", "deepseek_v32"),
    "Ernie 4.5": ("ernie45", "hermes"),
    "Gemma 4": ("gemma4", "gemma4"),
    "Hunyuan A13B": ("hunyuan_a13b", "hunyuan_a13b"),
    "Hy3": ("hy_v3", "hy_v3"),
    "Kimi K2": ("qwen3", "kimi_k2"),
    "Kimi K3": ("kimi_k3", "kimi_k3"),
    "LFM2.5": ("qwen3", "lfm2"),
    "MiniMax M2": ("deepseek_r1", "minimax_m2"),
    "MiniMax M3": ("minimax_m3", "minimax_m3"),
    "Nemotron Nano v2": ("qwen3", "nemotron_json"),
    "Olmo 3": ("qwen3", "olmo3"),
    "Phi-4": ("qwen3", "phi4_mini_json"),
    "Seed-OSS": ("seed_oss", "seed_oss"),
    "Step 3": ("deepseek_r1", "step3"),
    "Step 3.5, MiMo, Nemotron 3": ("qwen3", "qwen3_coder"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_content_and_calls_of_one_answer_are_told_apart(family: str) -> None:
    reasoning, tools = FAMILIES[family]
    known = reasoning_format(reasoning)
    for writer in WRITERS[tools]:
        text = f"{known.openers[-1]}\nI think.\n{known.closers[-1]}\n\nI look.\n{writer(SAMPLES['two'])}"
        for parts in cuts(text):
            answer = read(fresh(tools, reasoning=reasoning), parts)
            assert decoded(answer) == list(SAMPLES["two"])
            assert (answer.reasoning, answer.content) == ("I think.", "I look.")


# Detection and names


@pytest.mark.parametrize("name", CALL_NAMES)
def test_a_format_is_chosen_by_its_own_marks_and_tells_them(name: str) -> None:
    for signs in call_format(name).signs:
        chosen = OutputFormat.choose(AUTO, AUTO, "{% if tools %} " + " … ".join(signs) + " {% endif %}")
        assert chosen.tools == name
        assert chosen.signs[1] == signs
    for token in call_format(name).vocabulary:
        chosen = OutputFormat.choose(AUTO, AUTO, "", (token,))
        assert chosen.tools == name
        assert chosen.signs[1] == (token,)


@pytest.mark.parametrize(
    ("template", "token", "name"),
    [
        ('<tool_call>{"name": …}</tool_call>', "[TOOL_CALLS]", "hermes"),
        ("<|tool|>…<|/tool|>", "<|tool_call|>", "phi4_mini_json"),
        ('{"name": …, "parameters": …}', "[TOOL_CALLS]", "mistral"),
    ],
)
def test_a_templates_marks_count_more_than_the_vocabulary_but_for_json_without_any(
    template: str, token: str, name: str
) -> None:
    assert OutputFormat.choose(AUTO, AUTO, template, (token,)).tools == name


@pytest.mark.parametrize("name", REASONING_NAMES)
def test_reasoning_is_chosen_by_its_own_marks(name: str) -> None:
    known = reasoning_format(name)
    for signs in known.signs:
        assert OutputFormat.choose(AUTO, AUTO, " … ".join(signs)).reasoning == name
    for token in known.vocabulary:
        assert OutputFormat.choose(AUTO, AUTO, "", (token,)).reasoning == name


CALLS_ELSEWHERE = {
    # vLLM 0.33
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32",
    "cohere_command4": "cohere_command3",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "poolside_v1": "glm45",
    "hunyuan_a13b": "hunyuan_a13b",
    "hy_v3": "hy_v3",
    "jamba": "hunyuan_a13b",
    "kimi_k3": "kimi_k3",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "openai": "harmony",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "apertus": "apertus",
    # SGLang 0.5.23
    "apertus2509": "apertus",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "glm": "glm45",
    "gpt-oss": "harmony",
    "hunyuan": "hy_v3",
    "ling3": "glm45",
    "llama3": "llama3_json",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "muse": "muse_glimmer",
    "qwen": "hermes",
    "qwen25": "hermes",
    # Dynamo 1.7
    "deepseek_v3_1": "deepseek_v3",
    "deepseek_v3_2": "deepseek_v32",
    "nemotron_deci": "nemotron_json",
    "nemotron_nano": "qwen3_coder",
    "phi4": "phi4_mini_json",
}
REASONING_ELSEWHERE = {
    "deepseek-r1": "deepseek_r1",
    "deepseek_v3": "deepseek_r1",
    "deepseek-v4": "deepseek_r1",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "gpt-oss": "harmony",
    "openai_gptoss": "harmony",
    "hunyuan": "hy_v3",
    "kimi": "kimi",
    "kimi_k2": "qwen3",
    "cohere_command4": "cohere_command3",
    "mimo": "qwen3",
    "minimax_m2": "deepseek_r1",
    "minimax-m3": "minimax_m3",
    "nemotron_3": "qwen3",
    "nemotron_v3": "qwen3",
    "olmo3": "qwen3",
    "qwen3-thinking": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
    "basic": "qwen3",
    "kimi_k25": "deepseek_r1",
    "nemotron_deci": "qwen3",
}


def test_the_names_of_other_engines_are_taken() -> None:
    for written, name in CALLS_ELSEWHERE.items():
        assert OutputFormat.choose("none", written.replace("-", "_"), "").tools == name
    for written, name in REASONING_ELSEWHERE.items():
        assert OutputFormat.choose(written.replace("-", "_"), "none", "").reasoning == name


def test_no_name_stands_for_two_formats() -> None:
    for names, aliases, known in (
        (CALL_NAMES, call_aliases(), call_format),
        (REASONING_NAMES, reasoning_aliases(), reasoning_format),
    ):
        assert not set(names) & set(aliases)
        assert len(aliases) == sum(len(known(name).aliases) for name in names)
        assert all(known(name).models for name in names)


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"tool call parser: 'plamo', allowed are auto, none, apertus, cohere_command3,"
    ):
        OutputFormat.choose("none", "plamo", "")
