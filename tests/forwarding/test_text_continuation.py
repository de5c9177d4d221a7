"""A text that another server continues has no seam, and what is more than text is not continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.continuation import ContinuationError
from poolgrid.server.forwarding.event_filter import AnswerNotes
from poolgrid.server.forwarding.text_continuation import CHAT, COMPLETIONS, TextContinuation, continue_text
from tests.forwarding.answer_streams import DONE, chat, completion, event, folded, renamed

MESSAGES = [{"role": "user", "content": "hé"}]


def pieces(*texts: str) -> list[tuple[str, str]]:
    return [("content", text) for text in texts]


def continued(
    path: str = CHAT, kind: str = "vllm", had: bytes = b"", tokens: int | None = 3, **more: Any
) -> TextContinuation:
    body: dict[str, Any] = {"model": "m", "stream": True, **more}
    body.setdefault("messages" if path == CHAT else "prompt", MESSAGES if path == CHAT else "hé")
    raw = json.dumps(body, ensure_ascii=False).encode()
    values: Mapping[str, msgspec.Raw] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return continue_text(path, kind, raw, values, had, lambda _: tokens)


def started(path: str, *texts: str) -> bytes:
    """A stream that broke off behind some texts."""
    write, behind = (chat, 3) if path == CHAT else (completion, 2)
    return b"".join(write(pieces(*texts), [1], 1)[:-behind])


@pytest.mark.parametrize(
    ("path", "kind", "text", "changes"),
    [
        (
            CHAT,
            "vllm",
            "Hello",
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": "Hello"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            CHAT,
            "vllm",
            " a é\n \n",
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": " a é"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            CHAT,
            "sglang",
            " a\n",
            {"messages": [*MESSAGES, {"role": "assistant", "content": " a\n"}], "continue_final_message": True},
        ),
        (COMPLETIONS, "vllm", "Hello\n", {"prompt": "héHello\n"}),
        (COMPLETIONS, "sglang", "Hello", {"prompt": "héHello"}),
        (COMPLETIONS, "trtllm-serve", "Hello", {"prompt": "héHello"}),
    ],
)
def test_text_so_far_is_the_end_of_the_prompt(path: str, kind: str, text: str, changes: dict[str, Any]) -> None:
    found = continued(path, kind, started(path, text), max_tokens=10, max_completion_tokens=None, temperature=0.5)

    body = {"model": "m", "stream": True, "messages": MESSAGES, "prompt": "hé", "temperature": 0.5}
    body["max_completion_tokens"] = None
    del body["prompt" if path == CHAT else "messages"]
    assert json.loads(found.body) == {**body, **changes, "max_tokens": 7}


UNFIT: dict[str, tuple[str, dict[str, Any], bytes | None, str]] = {
    "a chat of trtllm-serve": (CHAT, {"kind": "trtllm-serve"}, None, "trtllm-serve"),
    "a chat of an unknown server": (CHAT, {"kind": "openai"}, None, "openai"),
    "another API": ("/v1/messages", {}, None, "/v1/messages"),
    "a field that is not known": (CHAT, {"anything": 1}, None, "anything"),
    "two choices": (CHAT, {"n": 2}, None, "n is"),
    "log probabilities": (COMPLETIONS, {"logprobs": 0}, None, "logprobs"),
    "a stop string": (CHAT, {"stop": ["x"]}, None, "stop"),
    "tools": (CHAT, {"tools": [{}]}, None, "tools"),
    "a prompt of token ids": (COMPLETIONS, {"prompt": [1, 2]}, None, "prompt"),
    "several prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, None, "prompt"),
    "a request that ends with an answer": (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, None, "ends"),
    "messages that are none": (CHAT, {"messages": "x"}, None, "messages"),
    "no messages": (CHAT, {"messages": []}, None, "messages"),
    "a text of the longest length": (CHAT, {"max_tokens": 3}, None, "as long"),
    "a limit that is no number": (CHAT, {"max_tokens": "x"}, None, "limit"),
    "no tokenizer": (CHAT, {"tokens": None}, None, "tokenizer"),
    "a control token": (CHAT, {}, started(CHAT, "a<|im_end|>"), "template"),
    "a thought": (CHAT, {}, started(CHAT, "<think>a"), "template"),
    "white space": (CHAT, {}, started(CHAT, " \n"), "template"),
    "no text": (CHAT, {}, b"", "template"),
    "reasoning": (CHAT, {}, b"".join(chat([("reasoning", "a")], [1], 1)[:2]), "reasoning"),
    "a call": (CHAT, {}, b"".join(chat([("call0", "{")], [1], 1)[:2]), "tool_calls"),
    "the end": (CHAT, {}, b"".join(chat(pieces("a"), [1], 1)[:3]), "end"),
    "another choice": (CHAT, {}, event({"choices": [{"index": 1, "delta": {"content": "a"}}]}), "more than one"),
    "an error": (CHAT, {}, event({"error": {"message": "x"}}), "more than one"),
    "no JSON": (CHAT, {}, b"data: x\n\n", "no text"),
}


@pytest.mark.parametrize("case", UNFIT.values(), ids=UNFIT.keys())
def test_what_is_more_than_text_is_not_continued(case: tuple[str, dict[str, Any], bytes | None, str]) -> None:
    path, more, had, why = case

    with pytest.raises(ContinuationError, match=why):
        continued(path, had=started(path, "Hello") if had is None else had, **more)


def test_fields_with_their_common_values_are_no_hindrance() -> None:
    plain: dict[str, Any] = {"n": 1, "stop": None, "tools": None, "logprobs": False, "presence_penalty": 0}
    plain |= {"response_format": {"type": "text"}, "seed": None, "logit_bias": {"7": -1}, "user": "u"}

    assert continued(had=started(CHAT, "Hello"), **plain).body


@pytest.mark.parametrize(
    ("kind", "ids"), [("vllm", {"kv_transfer_params": {"prompt_token_ids": [1, 2]}}), ("sglang", {"input_ids": [1, 2]})]
)
def test_token_ids_that_the_router_sent_with_the_prompt_are_not_those_of_its_continuation(
    kind: str, ids: dict[str, Any]
) -> None:
    """A server with ids does not look at the messages, and would answer from the beginning."""
    asked: dict[str, Any] = {"messages": MESSAGES}
    values = msgspec.json.decode(json.dumps(asked), type=dict[str, msgspec.Raw])
    sent = json.dumps({**ids, **asked}).encode()

    found = continue_text(CHAT, kind, sent, values, started(CHAT, "Hello"), len)

    assert [json.loads(found.body)[name] for name in ids] == [None]


texts = st.text(st.sampled_from('ab é😀"\\\n'), min_size=1, max_size=4)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "vllm"), (CHAT, "sglang"), (COMPLETIONS, "vllm")])
@given(first=st.lists(texts, min_size=1, max_size=5), rest=st.lists(texts, max_size=5), size=st.sampled_from([0, 1, 9]))
def test_client_gets_one_text(path: str, kind: str, first: list[str], rest: list[str], size: int) -> None:
    """The server writes what follows the text that it was sent."""
    write = chat if path == CHAT else completion
    had = b"".join(write(pieces(*first), [1], 1)[: len(first) + (path == CHAT)])
    try:
        found = continued(path, kind, had)
    except ContinuationError:
        assert not "".join(first).strip()
        return
    body = json.loads(found.body)
    sent = body["messages"][-1]["content"] if path == CHAT else body["prompt"].removeprefix("hé")
    missing = "".join(first).removeprefix(sent)
    second = b"".join(write(pieces(*missing, *rest), [2], 2))

    parts = [second[at : at + size] for at in range(0, len(second), size)] if size else [second]
    got = had + b"".join(map(found.feed, parts))
    found.finish()

    whole, answer = folded(b"".join(write(pieces(*first, *rest), [1], 1))), folded(renamed(got))
    for name in ("content", "text", "role", "finish", "ends", "ids"):
        assert answer.get(name) == whole.get(name)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (chat(pieces("x"), [1], 2), "differs"),
        (chat(pieces(" ", "x"), [1], 2), "differs"),
        (chat([], [1], 2), "differs"),
        ([DONE], "differs"),
        (chat([("reasoning", " \n")], [1], 2), "reasoning"),
        (chat([("call0", "{")], [1], 2), "tool_calls"),
    ],
)
def test_answer_that_does_not_continue_the_text_ends_the_stream(second: list[bytes], why: str) -> None:
    found = continued(had=started(CHAT, "a \n"))

    with pytest.raises(ContinuationError, match=why):
        found.feed(b"".join(second))


def test_text_so_far_counts_as_answer_not_as_prompt() -> None:
    found = continued(had=started(CHAT, "Hello"), tokens=3)
    usage = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14, "prompt_tokens_details": None}

    passed = found.feed(event({"id": "x", "choices": [], "usage": usage}))
    notes = AnswerNotes(prompt_tokens=10, completion_tokens=4)
    found.correct(notes)

    counts = json.loads(passed.partition(b"data: ")[2])["usage"]
    assert counts == {**usage, "prompt_tokens": 7, "completion_tokens": 7}
    assert (notes.prompt_tokens, notes.completion_tokens) == (7, 7)
