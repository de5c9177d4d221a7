from __future__ import annotations

import functools

from tokenizers import Tokenizer

from lab.benchmarks.chat_text import ChatText
from lab.benchmarks.chat_trace import ChatRequest, chat_requests, shared_tokens
from poolgrid.plugins.bench.trace import TraceRow
from poolgrid.server.frontend.models import TINY_MODEL_PATH

WORDS = ["alpha", "request", "worker", "prefix", "token", "block", "model", "cache"]
BOUNDS = {"requests": 100, "isl_min": 1150, "isl_max": 3000}


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))


def _count(text: str) -> int:
    return len(_tokenizer().encode(text, add_special_tokens=False).ids)


def _row(isl: int, osl: int, *ids: int) -> TraceRow:
    return TraceRow(timestamp=0, input_length=isl, output_length=osl, hash_ids=ids)


ROWS = [
    _row(1200, 100, 0, 1, 2),
    _row(1300, 50, 0, 10, 11),
    _row(1500, 30, 0, 1, 3),
    _row(2400, 40, 0, 1, 30, 4, 5),
    _row(1500, 30, 0, 10, 12),
    _row(1100, 30, 0, 20, 22),
    _row(1300, 30, 0, 20, 21),
    _row(1400, 30, 0, 1, 6),
]
"""Four turns of one conversation, the last begun anew from the first; two of another; a third one begun too short."""


def _made(seed: int = 0) -> list[ChatRequest]:
    return chat_requests(ROWS, ChatText(WORDS, _count), seed=seed, **BOUNDS)


def test_a_later_turn_sends_the_messages_of_the_earlier_one_again() -> None:
    made = {request.row: request for request in _made()}

    for earlier, later in ((0, 2), (2, 3), (1, 4)):
        messages = made[earlier].messages
        assert made[later].messages[: len(messages)] == messages
        assert [role for role, _ in made[later].messages[len(messages) :]] == ["assistant", "user"]
        assert made[later].is_later_turn
    assert not made[0].is_later_turn


def test_rows_that_share_blocks_share_the_text_in_them_and_others_do_not() -> None:
    made = {request.row: request for request in _made()}

    assert made[0].messages[0] == made[1].messages[0]
    assert made[0].messages[1] != made[1].messages[1]
    # Begun anew after the first turn: the same first two messages, then an answer and a question of its own.
    assert made[7].messages[:2] == made[0].messages
    assert made[7].messages[2:] != made[2].messages[2:]


def test_requests_outside_the_bounds_are_left_out_but_not_forgotten() -> None:
    made = {request.row: request for request in _made()}

    assert 5 not in made
    # The turn that was too short is in its successor, which is a first turn for whoever did not see it.
    assert [role for role, _ in made[6].messages] == ["system", "user", "assistant", "user"]
    assert not made[6].is_later_turn


def test_shared_tokens_are_those_of_leading_blocks_seen_before() -> None:
    made = [request for request in _made() if request.row in (0, 2)]

    assert shared_tokens(made) == 1024
