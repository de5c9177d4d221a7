"""Logits processors: what the built-in ones do, who may be registered, what a request may ask for."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from poolgrid.kernel.wire.limits import LOGITS_PROCESSORS_MAX
from poolgrid.kernel.wire.requests import LogitsProcessorCall, RefusalKind
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnsupportedError
from poolgrid.plugins.trtllm.logits_registry import (
    BUILT_IN,
    FailureChannel,
    LogitsProcessorRegistry,
    LogitsRow,
    RegistrationError,
    RequestFacts,
)

FACTS = RequestFacts(isl=3, vocabulary_size=8)


def make(name: str, arguments: bytes = b"", facts: RequestFacts = FACTS) -> Any:
    return LogitsProcessorRegistry().make([LogitsProcessorCall(name, arguments)], facts)[0]


def row() -> Any:
    return np.arange(8, dtype=np.float32)


def test_banned_tokens_can_never_be_chosen() -> None:
    logits = row()
    make("banned_tokens", b'{"token_ids": [7, 2]}')([1, 2, 3], logits)
    assert [token for token in range(8) if math.isinf(logits[token])] == [2, 7]
    assert logits.argmax() == 6


def test_an_answer_begins_with_the_forced_prefix_and_goes_on_freely() -> None:
    processor = make("forced_prefix", b'{"token_ids": [5, 0]}')
    tokens = [1, 2, 3]
    for _ in range(3):
        logits = row()
        processor(tokens, logits)
        tokens.append(int(logits.argmax()))
    assert tokens[3:] == [5, 0, 7]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (b"", "'token_ids' is wrong"),
        (b'{"token_ids": []}', "1 to 65536"),
        (b'{"token_ids": [8]}', r"token_ids\[0\] is 8, allowed are token ids from 0 to 7"),
        (b'{"token_ids": [1, true]}', r"token_ids\[1\] is True"),
        (b'{"token_ids": [1], "tokens": 1}', "'tokens' is unknown, allowed are token_ids"),
        (b"[1]", "array"),
        (b"{", "truncated"),
    ],
)
def test_wrong_arguments_are_refused_with_their_place(name: str, arguments: bytes, word: str) -> None:
    with pytest.raises(RefusedError, match=word) as refusal:
        make(name, arguments)
    assert f"logits_processors[0] ({name})" in refusal.value.reason
    assert refusal.value.kind is RefusalKind.INVALID


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnsupportedError, match="'nope', this worker has allowed_tokens, banned_tokens, forced_prefix"):
        make("nope")


def test_a_request_has_a_bounded_number_of_processors() -> None:
    calls = [LogitsProcessorCall("banned_tokens", b'{"token_ids":[1]}')] * (LOGITS_PROCESSORS_MAX + 1)
    with pytest.raises(RefusedError, match="has 9 entries, allowed are 8"):
        LogitsProcessorRegistry().make(calls, FACTS)


def favourite(arguments: Mapping[str, Any], facts: RequestFacts) -> Any:
    """Stand for an operator's own factory."""

    def prefer(token_ids: Sequence[int], logits: LogitsRow) -> None:
        logits[arguments["token_id"]] = 100.0

    return prefer


def test_an_operator_adds_processors_by_name() -> None:
    registry = LogitsProcessorRegistry.from_settings([f"favourite={__name__}:favourite"])
    logits = row()
    registry.make([LogitsProcessorCall("favourite", b'{"token_id": 3}')], FACTS)[0]([], logits)
    assert logits.argmax() == 3
    assert registry.names == ("allowed_tokens", "banned_tokens", "favourite", "forced_prefix")


def test_an_operators_processor_that_raises_refuses_the_request_only() -> None:
    def broken(arguments: Mapping[str, Any], facts: RequestFacts) -> Any:
        raise ZeroDivisionError("so it goes")

    with pytest.raises(RefusedError, match=r"logits_processors\[0\] \(broken\): so it goes"):
        LogitsProcessorRegistry({"broken": broken}).make([LogitsProcessorCall("broken")], FACTS)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("favourite", "allowed is NAME=package.module:factory"),
        ("Big=json:loads", "allowed is NAME=package.module:factory"),
        ("x=json", "allowed is NAME=package.module:factory"),
        ("x=nowhere_at_all:f", "cannot be loaded"),
        ("x=json:nothing_there", "cannot be loaded"),
        ("x=json:__doc__", "is not callable"),
        ("banned_tokens=json:loads", "twice"),
    ],
)
def test_a_wrong_registration_stops_the_start(word: str, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        LogitsProcessorRegistry.from_settings([word])


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_processors_can_travel_to_the_engines_process(name: str) -> None:
    processor = pickle.loads(pickle.dumps(make(name, b'{"token_ids": [5]}')))
    logits = row()
    processor([1, 2, 3], logits)
    assert (int(logits.argmax()) == 5) is (name != "banned_tokens")


def test_failures_in_the_engines_process_reach_the_worker() -> None:
    async def run() -> list[str]:
        heard: list[str] = []
        all_here = asyncio.Event()

        def hear(name: str) -> None:
            heard.append(name)
            if len(heard) == 2:
                all_here.set()

        channel = FailureChannel(hear)
        try:
            reporter = pickle.loads(pickle.dumps(channel.reporter))
            reporter.report("favourite")
            reporter.report("other")
            await asyncio.wait_for(all_here.wait(), 120)
        finally:
            channel.close()
        reporter.report("after the end")  # nobody listens: nothing happens
        return heard

    assert asyncio.run(run()) == ["favourite", "other"]
