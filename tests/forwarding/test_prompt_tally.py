"""Why prompts were placed by their text is counted by model, and named with what to change."""

from __future__ import annotations

import pytest

from poolgrid.server.forwarding.prompt_tally import (
    BY_TEXT_ABOVE,
    EVIDENCE_CHARS_MAX,
    LEAST_BY_TEXT,
    LENGTHS_DIFFER_ABOVE,
    MODELS_MAX,
    WINDOW,
    PromptTally,
    TextCause,
    cause_of,
)

CAUSES = [
    ("chat_template_error", TextCause.TEMPLATE),
    ("no_chat_template", TextCause.TEMPLATE),
    ("no_prompt_model", TextCause.TOKENIZER_MISSING),
    ("tokenizer_busy", TextCause.TOKENIZER_BUSY),
    ("media", TextCause.MEDIA),
    ("kept", TextCause.KEPT_AT_SERVER),
    ("context_length_exceeded", TextCause.TOO_LONG),
    ("another API", TextCause.OTHER_API),
    ("invalid_value", TextCause.UNKNOWN_PART),
    ("invalid_json", TextCause.UNKNOWN_PART),
]


@pytest.mark.parametrize(("code", "cause"), CAUSES)
def test_each_reason_has_a_cause(code: str, cause: TextCause) -> None:
    assert cause_of(code) is cause


def test_a_model_whose_prompts_are_known_has_no_finding() -> None:
    tally = PromptTally()
    tally.note("m", None)

    assert tally.findings() == []


def test_causes_are_counted_by_model_with_the_last_detail() -> None:
    tally = PromptTally()
    for model, cause, detail in (
        ("a", TextCause.TEMPLATE, "roles must alternate"),
        ("a", TextCause.TEMPLATE, "x" * 1000),
        ("a", None, ""),
        ("a", TextCause.MEDIA, ""),
        ("b", TextCause.UNKNOWN_PART, "messages[0].content[1].type"),
    ):
        tally.note(model, cause, detail)

    assert [(each.model, each.cause, each.evidence) for each in tally.findings()] == [
        (
            "a",
            "by-text-template",
            ["2 of the last 4 prompts were placed by their text", "last: " + "x" * EVIDENCE_CHARS_MAX],
        ),
        ("a", "by-text-media", ["1 of the last 4 prompts were placed by their text"]),
        (
            "b",
            "by-text-unknown-part",
            ["1 of the last 1 prompts were placed by their text", "last: messages[0].content[1].type"],
        ),
    ]


@pytest.mark.parametrize("cause", TextCause)
def test_only_a_cause_that_can_be_changed_is_a_fault_and_only_if_it_is_frequent(cause: TextCause) -> None:
    few, many = PromptTally(), PromptTally()
    for _ in range(LEAST_BY_TEXT - 1):
        few.note("m", cause)
    for number in range(WINDOW):
        many.note("m", cause if number <= BY_TEXT_ABOVE * WINDOW else None)

    assert not few.findings()[0].is_fault
    assert many.findings()[0].is_fault is cause.is_fault
    for _ in range(2):
        many.note("m", None)  # the first ones leave the window
    assert not many.findings()[0].is_fault


def test_models_are_bounded() -> None:
    tally = PromptTally()
    for number in range(2 * MODELS_MAX):
        tally.note(f"{number:04}", TextCause.TEMPLATE)

    assert len(tally.findings()) == MODELS_MAX
    assert tally.findings()[-1].model == f"{2 * MODELS_MAX - 1:04}"


def test_lengths_that_an_engine_counts_otherwise_are_named() -> None:
    tally = PromptTally()
    for number in range(WINDOW):
        tally.note_length("equal", number, number)
        tally.note_length("seldom", number, number + (number < LENGTHS_DIFFER_ABOVE * WINDOW))
        tally.note_length("often", number, number + (number <= LENGTHS_DIFFER_ABOVE * WINDOW))
    tally.note_length("few", 5, 6)

    found = {each.model: each for each in tally.findings()}
    assert {model: each.is_fault for model, each in found.items()} == {"few": False, "often": True, "seldom": False}
    assert found["few"].cause == "prompt-lengths-differ"
    assert found["few"].evidence == [
        "1 of the last 1 prompts",
        "a prompt has 5 tokens at the router and 6 at the engine",
    ]
