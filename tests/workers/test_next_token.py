"""The simulated model's output depends on every token before it, and on nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.wire.requests import Sampling
from poolgrid.workers.engines.simulated.core.next_token import TokenStream, Vocabulary, expected_output, expected_reply
from tests.workers.builders import VOCABULARY

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200)


@given(prompt=tokens, split=st.integers(0, 19), seed=st.none() | st.integers(-(2**63), 2**63 - 1))
def test_a_prompt_continued_with_its_own_output_goes_on_exactly(
    prompt: list[int], split: int, seed: int | None
) -> None:
    whole = expected_output(pack_tokens(prompt), Sampling(max_tokens=20, seed=seed), VOCABULARY)

    rest = expected_output(
        pack_tokens([*prompt, *whole[:split]]), Sampling(max_tokens=20 - split, seed=seed), VOCABULARY
    )

    assert whole[:split] + rest == whole


@given(prompt=tokens, at=st.integers(0, 199))
def test_changing_any_prompt_token_changes_the_output(prompt: list[int], at: int) -> None:
    changed = list(prompt)
    changed[at % len(prompt)] ^= 1
    sampling = Sampling(max_tokens=8)

    assert expected_output(pack_tokens(prompt), sampling, VOCABULARY) != expected_output(
        pack_tokens(changed), sampling, VOCABULARY
    )


def test_swapping_or_dropping_a_token_changes_what_follows() -> None:
    sampling = Sampling(max_tokens=8)
    replies = {
        expected_output(pack_tokens(prompt), sampling, VOCABULARY)
        for prompt in ([1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 4], [1, 2, 3, 3, 4], [1, 2, 3, 4, 4])
    }

    assert len(replies) == 5


def test_the_seed_of_a_request_matters_and_none_means_zero() -> None:
    prompt = pack_tokens([1, 2, 3])
    outputs = {seed: expected_output(prompt, Sampling(max_tokens=8, seed=seed), VOCABULARY) for seed in (None, 0, 1)}

    assert outputs[None] == outputs[0] != outputs[1]


def test_the_output_of_a_known_prompt_never_changes() -> None:
    """A golden value: the load generator and stored results rely on it."""
    output = expected_output(pack_tokens(range(64)), Sampling(max_tokens=6), Vocabulary(size=32_000, first_token_id=3))

    assert output == GOLDEN


GOLDEN = (20361, 13699, 8344, 13235, 18577, 29982)


@given(prompt=tokens, chunks=st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_generating_in_pieces_gives_the_same_tokens(prompt: list[int], chunks: list[int]) -> None:
    sampling = Sampling(max_tokens=30)
    stream = TokenStream(VOCABULARY, pack_tokens(prompt), sampling)
    count = 0
    for chunk in chunks:
        count += chunk
        stream.generate_to(count)

    expected = expected_output(pack_tokens(prompt), sampling, VOCABULARY)
    assert unpack_tokens(bytes(stream.output)) == expected[: min(count, 30)]


def test_tokens_stay_in_their_range() -> None:
    output = expected_output(pack_tokens([5]), Sampling(max_tokens=5000), Vocabulary(size=12, first_token_id=10))

    assert set(output) == {10, 11}


def test_an_end_of_sequence_token_ends_the_output_with_reason_stop() -> None:
    vocabulary = Vocabulary(size=1000, first_token_id=10, eos_token_id=2, eos_probability=0.1)
    output, reason = expected_reply(pack_tokens([1]), Sampling(max_tokens=10_000), vocabulary)

    assert reason == "stop"
    assert output[-1] == 2
    assert 2 not in output[:-1]


def test_end_of_sequence_comes_about_as_often_as_asked() -> None:
    vocabulary = Vocabulary(size=1000, first_token_id=10, eos_probability=0.02)
    lengths = [
        len(expected_output(pack_tokens([prompt]), Sampling(max_tokens=10_000), vocabulary)) for prompt in range(400)
    ]

    assert 40 < sum(lengths) / len(lengths) < 60


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=50, ignore_eos=True), Sampling(max_tokens=50, min_tokens=50)])
def test_end_of_sequence_can_be_forbidden(sampling: Sampling) -> None:
    vocabulary = Vocabulary(size=1000, first_token_id=10, eos_probability=0.5)

    assert expected_reply(pack_tokens([1]), sampling, vocabulary) == (
        expected_output(pack_tokens([1]), Sampling(max_tokens=50), VOCABULARY),
        "length",
    )


def test_a_stop_token_of_the_request_ends_the_output() -> None:
    free = expected_output(pack_tokens([1]), Sampling(max_tokens=20), VOCABULARY)
    stopped, reason = expected_reply(pack_tokens([1]), Sampling(max_tokens=20), VOCABULARY, (free[7],))

    assert stopped == free[: free.index(free[7]) + 1]
    assert reason == "stop"


@pytest.mark.parametrize("alternatives", [0, 1, 5])
def test_log_probabilities_are_those_of_a_distribution_led_by_the_chosen_token(alternatives: int) -> None:
    def stream() -> TokenStream:
        made = TokenStream(VOCABULARY, pack_tokens([1, 2]), Sampling(max_tokens=6, logprobs=alternatives))
        made.generate_to(6)
        return made

    report = stream().logprobs(2, 5, alternatives)

    assert [entry.token_id for entry in report] == list(unpack_tokens(bytes(stream().output)))[2:5]
    for entry in report:
        assert len(entry.alternatives) == alternatives
        assert len({token_id for token_id, _ in entry.alternatives}) == alternatives
        assert sum(math.exp(logprob) for _, logprob in entry.alternatives) <= 1.0
        assert [(entry.token_id, entry.logprob)][:alternatives] == list(entry.alternatives)[:1]
    assert report == stream().logprobs(2, 5, alternatives)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"size": 5, "first_token_id": 5}, "first_token_id is 5"),
        ({"eos_probability": 1.5}, "eos_probability is 1.5"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_an_impossible_vocabulary_is_refused(fields: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Vocabulary(**fields)  # type: ignore[arg-type]
