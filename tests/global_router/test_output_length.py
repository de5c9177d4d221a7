"""Expected output lengths: the client's, the learned, the default."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.grid_document import OutputLengthSettings
from poolgrid.kernel.pool_grids.request_hints import ExpectedOutput, OutputLengths

SETTINGS = OutputLengthSettings(default_tokens=256, learn_after_requests=3, memory_requests=10)


def test_the_default_is_used_until_enough_is_known() -> None:
    lengths = OutputLengths(SETTINGS)
    for tokens in (100, 200):
        lengths.finished("m", tokens)
    assert lengths.expected("m") == ExpectedOutput(256, "default of the document")

    lengths.finished("m", 300)

    assert lengths.expected("m") == ExpectedOutput(200, "mean of m")
    assert lengths.expected("other") == ExpectedOutput(256, "default of the document")


def test_the_clients_word_comes_first_and_the_limit_last() -> None:
    lengths = OutputLengths(SETTINGS)

    assert lengths.expected("m", osl=0) == ExpectedOutput(0, "nvext.agent_hints.osl")
    assert lengths.expected("m", osl=900, max_tokens=50) == ExpectedOutput(50, "the request's own limit")
    assert lengths.expected("m", max_tokens=5000) == ExpectedOutput(256, "default of the document")


def test_the_mean_follows_a_change_of_traffic() -> None:
    lengths = OutputLengths(SETTINGS)
    for _ in range(1000):
        lengths.finished("m", 10)
    for _ in range(100):
        lengths.finished("m", 1000)

    assert lengths.expected("m").tokens == 1000


def test_the_number_of_models_is_bounded() -> None:
    lengths = OutputLengths(SETTINGS, models_max=2)
    for model in ("a", "b", "a", "c"):
        for _ in range(3):
            lengths.finished(model, 7)

    assert len(lengths) == 2
    assert lengths.expected("a").tokens == 7
    assert lengths.expected("b").tokens == 256


@given(tokens=st.lists(st.integers(-5, 2**70), min_size=1, max_size=50))
def test_the_expectation_lies_within_what_was_seen(tokens: list[int]) -> None:
    lengths = OutputLengths(OutputLengthSettings(default_tokens=0, learn_after_requests=1, memory_requests=7))
    for length in tokens:
        lengths.finished("m", length)

    seen = [min(length, 2**31 - 1) for length in tokens if length >= 0] or [0]
    assert min(seen) - 1 <= lengths.expected("m").tokens <= max(seen) + 1
