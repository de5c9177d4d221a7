"""Which bodies may have their prompt's ids sent along, and what proves that engines make the same ones."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from poolgrid.server.forwarding.event_filter import AnswerNotes, TakenIds
from poolgrid.server.forwarding.prompt_ids import (
    CHAT,
    CHECKED_EVERY,
    COMPLETIONS,
    KINDS_MAX,
    MESSAGES,
    OFF_MAX,
    PROOFS,
    RESPONSES,
    SILENT_MAX,
    IdForm,
    IdKind,
    IdProofs,
    Sending,
    compare,
    id_form,
    ids_json,
    may_carry,
)

SHOWN, COUNTED = IdForm("input_ids", "", "return_ids", TakenIds.NULL), IdForm("prompt")
IDS = (5, 6, 7, 8)
PACKED = struct.pack("<4I", *IDS)

FORMS = [
    ("vllm", "0.27.0", CHAT, "kv_transfer_params", "return_token_ids"),
    ("vllm", "0.33.0", CHAT, "kv_transfer_params", "return_token_ids"),
    ("vllm", "0.32.0+cpu", MESSAGES, "kv_transfer_params", ""),
    ("vllm", "1.0.0rc1.dev3+g1234", RESPONSES, "kv_transfer_params", ""),
    ("vllm", "0.27.0", COMPLETIONS, "prompt", "return_token_ids"),
    ("vllm", "0.26.0", CHAT, None, None),
    ("vllm", "0.9.2", MESSAGES, None, None),
    ("vllm", "0.26.0", COMPLETIONS, "prompt", ""),
    ("vllm", "", CHAT, None, None),
    ("vllm", "dev", CHAT, None, None),
    ("vllm", "0.33.0", CHAT + "/batch", None, None),
    ("vllm", "0.33.0", "/v1/embeddings", None, None),
    ("sglang", "0.5.23", CHAT, "input_ids", "return_input_ids_in_sglext"),
    ("sglang", "0.5.22", CHAT, None, None),
    ("sglang", "0.5.23", COMPLETIONS, "prompt", "return_token_ids"),
    ("sglang", "0.6.0", MESSAGES, None, None),
    ("sglang", "0.6.0", RESPONSES, None, None),
    ("trtllm-serve", "1.4.0", CHAT, None, None),
    ("trtllm-serve", "1.4.0", COMPLETIONS, "prompt", ""),
    ("openai", "", CHAT, None, None),
    ("openai", "", COMPLETIONS, "prompt", ""),
]


@pytest.mark.parametrize(("kind", "version", "path", "member", "asked"), FORMS)
def test_servers_take_ids_where_their_version_does(
    kind: str, version: str, path: str, member: str | None, asked: str | None
) -> None:
    form = id_form(kind, version, path)

    assert (form and form.member, form and form.asked) == (member, asked)


CARRIED = [
    (CHAT, b'{"model":"m","messages":[],"tools":[],"tool_choice":"auto","stream":true,"n":2,"logprobs":true}', True),
    (CHAT, b'{"model":"m","messages":[],"tool_choice":"none"}', False),
    (CHAT, b'{"model":"m","messages":[],"echo":false}', False),
    (CHAT, b'{"model":"m","messages":[],"prompt_logprobs":1}', False),
    (CHAT, b'{"model":"m","messages":[],"chat_template":"x"}', False),
    (CHAT, b'{"model":"m","messages":[],"truncate_prompt_tokens":9}', False),
    (CHAT, b'{"model":"m","messages":[],"kv_transfer_params":null}', False),
    (CHAT, b'{"model":"m","messages":[],"return_token_ids":true}', False),
    (CHAT, b'{"model":"m","messages":[],"input_ids":[1]}', False),
    (CHAT, b'{"model":"m","messages":[],"system":"x"}', False),
    (COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":3,"logprobs":2}', True),
    (COMPLETIONS, b'{"model":"m","prompt":[1,2]}', False),
    (COMPLETIONS, b'{"model":"m","prompt":["x"]}', False),
    (COMPLETIONS, b'{"model":"m","prompt":"x","suffix":"y"}', False),
    (COMPLETIONS, b'{"model":"m"}', False),
    (MESSAGES, b'{"model":"m","messages":[],"system":"s","thinking":{},"max_tokens":3}', True),
    (MESSAGES, b'{"model":"m","messages":[],"max_tokens":3,"context_management":{}}', False),
    (RESPONSES, b'{"model":"m","input":"x","instructions":"y","reasoning":{},"store":false}', True),
    (RESPONSES, b'{"model":"m","input":"x","previous_response_id":"r"}', False),
    (RESPONSES, b'{"model":"m","input":"x","truncation":"auto"}', False),
    ("/v1/embeddings", b'{"model":"m","input":"x"}', False),
]


@pytest.mark.parametrize(("path", "body", "may"), CARRIED)
def test_bodies_whose_prompt_is_more_than_its_ids_are_left_alone(path: str, body: bytes, may: bool) -> None:
    assert may_carry(path, msgspec.json.decode(body, type=dict[str, Raw])) is may


def test_ids_are_written_as_a_json_array() -> None:
    assert ids_json(struct.pack("<3I", 0, 1, 4_294_967_295)) == b"[0,1,4294967295]"


def kind_of(model: str = "m", **more: Any) -> IdKind:
    members = frozenset({"messages"})
    values = {"url": "http://a", "version": "1", "path": CHAT, "members": members, "after_tool": False, **more}
    return IdKind(model, **values)


def prove(proofs: IdProofs, kind: IdKind) -> None:
    for _ in range(PROOFS):
        assert proofs.sending(kind) is Sending.CHECKED
        proofs.equal(kind)


def test_ids_are_sent_after_some_equal_requests_and_one_in_some_hundreds_is_compared_for_ever() -> None:
    proofs, kind = IdProofs(), kind_of()
    prove(proofs, kind)

    for _ in range(3):
        assert [proofs.sending(kind) for _ in range(CHECKED_EVERY - 1)] == [Sending.IDS] * (CHECKED_EVERY - 1)
        # Until one of them has shown something.
        assert [proofs.sending(kind) for _ in range(3)] == [Sending.CHECKED] * 3
        proofs.equal(kind)


@pytest.mark.parametrize(
    "other",
    [
        {"url": "http://b"},
        {"version": "2"},
        {"path": MESSAGES},
        {"members": frozenset({"messages", "tools"})},
        {"after_tool": True},
    ],
)
def test_each_kind_is_proven_by_itself(other: dict[str, Any]) -> None:
    proofs = IdProofs()
    prove(proofs, kind_of())

    assert proofs.sending(kind_of(**other)) is Sending.CHECKED
    assert proofs.sending(kind_of()) is Sending.IDS


def test_requests_that_show_nothing_prove_nothing() -> None:
    proofs = IdProofs()

    assert {proofs.sending(kind_of()) for _ in range(10 * PROOFS)} == {Sending.CHECKED}


@pytest.mark.parametrize("was_proven", [False, True])
def test_a_server_that_does_not_show_its_ids_gets_text_and_is_seldom_asked(was_proven: bool) -> None:
    proofs, kind = IdProofs(), kind_of()
    if was_proven:
        prove(proofs, kind)
        for _ in range(CHECKED_EVERY - 1):
            proofs.sending(kind)
    for _ in range(SILENT_MAX):
        assert proofs.sending(kind) is Sending.CHECKED
        proofs.silent(kind)

    asked = [proofs.sending(kind) for _ in range(4 * CHECKED_EVERY)]
    assert asked.count(Sending.TEXT) == len(asked) - asked.count(Sending.CHECKED)
    assert asked.count(Sending.CHECKED) in (4, 5)

    proofs.equal(kind)
    assert proofs.sending(kind) is (Sending.IDS if was_proven else Sending.CHECKED)


@pytest.mark.parametrize("was_proven", [False, True])
def test_one_difference_ends_it_for_all_kinds_of_the_model(was_proven: bool) -> None:
    proofs = IdProofs()
    if was_proven:
        prove(proofs, kind_of())
    prove(proofs, kind_of("other"))

    proofs.differ(kind_of(), "id 3 of 4 is 1, at the router 2")
    proofs.equal(kind_of())
    proofs.differ(kind_of(), "another")

    assert {proofs.sending(kind_of()), proofs.sending(kind_of(path=MESSAGES))} == {Sending.TEXT}
    assert proofs.sending(kind_of("other")) is Sending.IDS
    (found,) = proofs.findings()
    assert (found.model, found.cause, found.is_fault) == ("m", "prompt-ids-differ", True)
    assert found.evidence == [f"{CHAT} at http://a: id 3 of 4 is 1, at the router 2"]


def test_a_refusal_ends_it_for_the_model() -> None:
    proofs = IdProofs()
    prove(proofs, kind_of())

    proofs.refused(kind_of(), 422)

    assert proofs.sending(kind_of()) is Sending.TEXT
    assert proofs.findings()[0].cause == "prompt-ids-refused"
    assert "422" in proofs.findings()[0].evidence[0]


def test_kinds_and_models_are_bounded_and_the_kinds_used_last_stay() -> None:
    proofs = IdProofs()
    prove(proofs, kind_of())
    for number in range(2 * KINDS_MAX):
        proofs.sending(kind_of(members=frozenset({str(number)})))
        if number % 1000 == 0:
            assert proofs.sending(kind_of()) in (Sending.IDS, Sending.CHECKED)
            proofs.equal(kind_of())
    assert len(proofs._proofs) == KINDS_MAX
    assert proofs.sending(kind_of()) is Sending.IDS

    for number in range(2 * OFF_MAX):
        proofs.differ(kind_of(str(number)), "x")
    assert len(proofs.findings()) == OFF_MAX


VERDICTS = [
    (SHOWN, AnswerNotes(prompt_token_ids=b"[5,6,7,8]", prompt_tokens=4), 0, True, ""),
    (SHOWN, AnswerNotes(prompt_token_ids=b"[5, 6,7,8]"), 0, True, ""),
    (SHOWN, AnswerNotes(prompt_token_ids=b"[5,6,9,8]", prompt_tokens=5), 0, False, "id 2 of 4 is 9, at the router 7"),
    (SHOWN, AnswerNotes(prompt_token_ids=b"[5,6,7]"), 0, False, "it has 3 ids, the router 4"),
    (SHOWN, AnswerNotes(prompt_token_ids=b"[5,6,7,8,9]"), 0, False, "it has 5 ids, the router 4"),
    (SHOWN, AnswerNotes(prompt_tokens=4, cached_tokens=4), 4, None, ""),
    (SHOWN, AnswerNotes(prompt_token_ids=b'["a"]'), 0, None, ""),
    (SHOWN, AnswerNotes(prompt_tokens=5), 0, False, "it counts 5 prompt tokens, the router 4"),
    (SHOWN, AnswerNotes(), 0, None, ""),
    (COUNTED, AnswerNotes(prompt_tokens=4, cached_tokens=3), 3, True, ""),
    (COUNTED, AnswerNotes(prompt_tokens=4, cached_tokens=2), 2, True, ""),
    (COUNTED, AnswerNotes(prompt_tokens=4, cached_tokens=1), 1, None, ""),
    (COUNTED, AnswerNotes(prompt_tokens=4, cached_tokens=2), 3, None, ""),
    (COUNTED, AnswerNotes(prompt_tokens=4, cached_tokens=3), 0, None, ""),
    (COUNTED, AnswerNotes(prompt_tokens=4), 3, None, ""),
    (COUNTED, AnswerNotes(cached_tokens=3), 3, None, ""),
    (COUNTED, AnswerNotes(prompt_tokens=3, cached_tokens=3), 3, False, "it counts 3 prompt tokens, the router 4"),
]


@pytest.mark.parametrize(("form", "notes", "promised", "is_equal", "why"), VERDICTS)
def test_an_answer_shows_whether_the_prompts_are_equal(
    form: IdForm, notes: AnswerNotes, promised: int, is_equal: bool | None, why: str
) -> None:
    assert tuple(compare(form, PACKED, notes, promised)) == (is_equal, why)
