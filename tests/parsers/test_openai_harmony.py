"""Our reading of harmony against the package of those who made the format, where its vocabulary is at hand.

``openai-harmony`` reads token ids of a vocabulary that it downloads, or finds as ``o200k_base.tiktoken`` in the
directory that ``TIKTOKEN_ENCODINGS_BASE`` names. Without it these tests are skipped: CI has no network.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from poolgrid.plugins.parsers.output_format import OutputFormat
from tests.examples import examples
from tests.parsers.test_golden import read
from tests.parsers.transcripts import HARMONY, TOOLS, Answer

harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
if not os.path.isfile(os.path.join(os.environ.get("TIKTOKEN_ENCODINGS_BASE", ""), "o200k_base.tiktoken")):
    pytest.skip("TIKTOKEN_ENCODINGS_BASE names no directory with o200k_base.tiktoken", allow_module_level=True)

TEXTS = (
    "Hm.",
    "The sum is 4 < 5.",
    "Ünïcode 🙂 and\nlines",
    "a | b |> c <",
    "x" * 300,
    '{"city": "Paris"}',
    "  spaces  ",
)
ARGUMENTS = ('{"city":"Paris"}', "{}", '{"text":"a \\"quoted\\" 🙂"}')


@pytest.fixture(scope="module")
def encoding() -> Any:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def written_by_a_model(source: random.Random) -> str:
    """A well-formed answer: analysis, perhaps a preamble, then calls or a final message."""
    text = "".join(
        f"<|channel|>analysis<|message|>{source.choice(TEXTS)}<|end|><|start|>assistant"
        for _ in range(source.randrange(3))
    )
    if source.random() < 0.4:
        text += f"<|channel|>commentary<|message|>{source.choice(TEXTS)}<|end|><|start|>assistant"
    if source.random() < 0.5:
        return text + f"<|channel|>final<|message|>{source.choice(TEXTS)}<|return|>"
    for number in range(source.randrange(1, 3)):
        name = source.choice(("get_weather", "get_time"))
        header = source.choice(
            (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json",
                f" to=functions.{name}<|channel|>commentary json",
            )
        )
        start = "<|start|>assistant" if number else ""
        text += f"{start}{header}<|message|>{source.choice(ARGUMENTS)}<|call|>"
    return text


def as_the_package_reads(encoding: Any, text: str) -> Answer:
    tokens = encoding.encode(text, allowed_special="all")
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, str]] = []
    for message in encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT):
        body = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient.startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), body))
        elif message.channel == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return Answer("\n".join(content), "\n".join(reasoning), tuple(calls))


@pytest.mark.parametrize("seed", range(examples(60)))
def test_both_read_an_answer_the_same_way_wherever_it_is_cut(encoding: Any, seed: int) -> None:
    source = random.Random(seed)
    text = written_by_a_model(source)
    cuts = sorted(source.randrange(len(text)) for _ in range(source.randrange(6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = OutputFormat(HARMONY.reasoning, HARMONY.tools).parser(TOOLS, "", False)
    assert parser is not None
    assert read(parser, parts) == as_the_package_reads(encoding, text), text
