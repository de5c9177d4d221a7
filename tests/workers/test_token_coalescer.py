"""Output that is sent together, of requests whose answer nobody reads before its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, TokenDelta, TokenLogprobs
from poolgrid.kernel.worker_protocol.push_stream import TokenCoalescer
from tests.workers.builders import make_request


def sent(joined: TokenCoalescer, *deltas: TokenDelta) -> list[TokenDelta]:
    ready: list[TokenDelta] = []
    for delta in deltas:
        joined.add(delta, ready)
    return ready


def token(position: int, request_id: str = "r") -> TokenDelta:
    return TokenDelta(request_id, position, pack_tokens([100 + position]))


def joining(tokens_together: int = 3, logprobs: int | None = None) -> TokenCoalescer:
    joined = TokenCoalescer()
    joined.begin(make_request("r", tokens_together=tokens_together, logprobs=logprobs))
    return joined


def test_the_first_delta_and_the_end_go_at_once_and_tokens_between_them_together() -> None:
    joined = joining()
    first = TokenDelta("r", 0, pack_tokens([100]), cached_tokens=16)

    assert sent(joined, first) == [first]
    assert sent(joined, token(1), token(2)) == []
    assert sent(joined, token(3)) == [TokenDelta("r", 1, pack_tokens([101, 102, 103]))]
    assert sent(joined, token(4)) == []
    assert sent(joined, TokenDelta("r", 5, pack_tokens([105]), FinishReason.LENGTH)) == [
        TokenDelta("r", 4, pack_tokens([104, 105]), FinishReason.LENGTH)
    ]


def test_an_end_after_which_another_worker_goes_on_follows_what_was_kept() -> None:
    for reason, kind in ((FinishReason.CANCELLED, None), (FinishReason.ERROR, RefusalKind.DRAINING)):
        joined = joining()
        ending = TokenDelta("r", 2, b"", reason, error="drained", refusal=kind)
        assert sent(joined, token(0), token(1), ending) == [TokenDelta("r", 0, pack_tokens([100, 101])), ending]


def test_requests_that_are_read_as_they_come_or_want_log_probabilities_are_left_alone() -> None:
    for joined in (joining(tokens_together=1), joining(logprobs=0), TokenCoalescer()):
        deltas = [token(0), TokenDelta("r", 1, pack_tokens([101]), logprobs=(TokenLogprobs(101, -0.5),))]
        assert sent(joined, *deltas) == deltas
        assert len(joined) == 0


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR]),
)
def test_whatever_the_steps_were_the_pieces_make_the_same_output(
    together: int, steps: list[tuple[int, bool]], ending: FinishReason
) -> None:
    joined = joining(together)
    output: list[int] = []
    ready: list[TokenDelta] = []
    for tokens, says_more in steps:
        new = [len(output) + number for number in range(tokens)]
        joined.add(TokenDelta("r", len(output), pack_tokens(new), cached_tokens=0 if says_more else None), ready)
        output += new
        assert len(output) - sum(len(delta.token_ids) for delta in ready) // 4 < together
    joined.add(TokenDelta("r", len(output), b"", ending), ready)

    position = 0
    for delta in ready:
        assert delta.position == position
        position += len(delta.token_ids) // 4
    assert b"".join(delta.token_ids for delta in ready) == pack_tokens(output)
    assert ready[-1].finish_reason == ending
