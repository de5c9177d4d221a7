"""Traces: what is accepted, what is refused with which words, and what a perfect cache would reuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.plugins.bench.prompt import PlannedRequest, PromptMaker
from poolgrid.plugins.bench.trace import (
    TRACE_BLOCK_TOKENS,
    TraceError,
    TraceRow,
    ideal_cached_token_ratio,
    ideal_cached_tokens,
    parse_row,
    parse_trace,
    plan_trace,
    read_trace,
)

CONVERSATION = Path(__file__).parents[1] / "data" / "conversation_1000.jsonl"


def row(*hash_ids: int, last: int = TRACE_BLOCK_TOKENS, at: float = 0, osl: int = 1) -> TraceRow:
    return TraceRow(at, (len(hash_ids) - 1) * TRACE_BLOCK_TOKENS + last, osl, hash_ids)


@st.composite
def rows_of_a_tree(draw: st.DrawFn) -> list[TraceRow]:
    """Rows like the published ones: an id names its whole prefix, and how many tokens its block has."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        partial = draw(st.sampled_from([100, 300, 512]))
        hash_ids = []
        for end in range(1, len(path) + 1):
            name = (*path[:end], partial if end == len(path) else TRACE_BLOCK_TOKENS)
            hash_ids.append(ids.setdefault(name, len(ids)))
        rows.append(row(*hash_ids, last=partial, osl=draw(st.integers(0, 2000))))
    return rows


class TestParsing:
    def test_a_row_is_read(self) -> None:
        line = b'{"timestamp": 27, "input_length": 600, "output_length": 52, "hash_ids": [0, 7], "later": 1}'

        assert parse_row(line, "t, line 1") == TraceRow(27, 600, 52, (0, 7))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"timestamp": -1}, r"timestamp"),
            ({"timestamp": "now"}, r"timestamp"),
            ({"input_length": 0}, r"input_length"),
            ({"input_length": 2.5}, r"input_length"),
            ({"input_length": None}, r"input_length"),
            ({"output_length": -3}, r"output_length"),
            ({"hash_ids": [0, -1]}, r"hash_ids"),
            ({"hash_ids": "0"}, r"hash_ids"),
            ({"hash_ids": [0]}, r"hash_ids has 1 entries, input_length 600 needs 2"),
            ({"hash_ids": [0, 1, 2]}, r"hash_ids has 3 entries, input_length 600 needs 2"),
        ],
    )
    def test_a_wrong_field_is_named_with_its_line(self, change: dict[str, object], words: str) -> None:
        good = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
        lines = [json.dumps(good).encode(), json.dumps(good | change).encode()]

        with pytest.raises(TraceError, match=rf"^t\.jsonl, line 2: .*{words}"):
            parse_trace(lines, "t.jsonl")

    @pytest.mark.parametrize("missing", ["timestamp", "input_length", "output_length", "hash_ids"])
    def test_a_missing_field_is_named(self, missing: str) -> None:
        fields = {"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}
        del fields[missing]

        with pytest.raises(TraceError, match=f"line 1: .*`{missing}`"):
            parse_trace([json.dumps(fields).encode()], "t")

    @pytest.mark.parametrize("line", [b"{", b"[]", b"nothing", b"\xff\xfe", b"[" * 100_000])
    def test_what_is_no_json_object_is_refused(self, line: bytes) -> None:
        with pytest.raises(TraceError, match="t, line 1: "):
            parse_row(line, "t, line 1")

    @given(st.binary(max_size=200))
    def test_random_bytes_are_refused_with_the_one_error(self, line: bytes) -> None:
        with pytest.raises(TraceError):
            parse_row(line, "t, line 1")

    def test_times_that_go_backwards_are_refused(self) -> None:
        line = '{{"timestamp": {}, "input_length": 5, "output_length": 5, "hash_ids": [0]}}'

        with pytest.raises(TraceError, match=r"line 2: timestamp is 4.0, the row before has 5.0"):
            parse_trace([line.format(5).encode(), line.format(4).encode()], "t")

    @pytest.mark.parametrize("lines", [[], [b"\n", b"  \n"]])
    def test_an_empty_trace_is_refused(self, lines: list[bytes]) -> None:
        with pytest.raises(TraceError, match="t: no requests in it"):
            parse_trace(lines, "t")

    def test_only_the_wanted_rows_are_read(self) -> None:
        good = b'{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}'

        assert len(parse_trace([good, good, b"broken"], "t", requests=2)) == 2

    def test_the_real_slice_is_read(self) -> None:
        rows = read_trace(CONVERSATION)

        assert len(rows) == 1000
        assert {row.hash_ids[0] for row in rows} == {0}


class TestPlanning:
    def test_unscaled_requests_are_as_written(self) -> None:
        rows = read_trace(CONVERSATION)

        planned = plan_trace(rows)

        assert [(p.isl, p.osl, p.block_ids, p.at_ms) for p in planned] == [
            (r.input_length, r.output_length, r.hash_ids, r.timestamp) for r in rows
        ]

    @pytest.mark.parametrize(
        ("scale", "isl", "block_tokens", "osl"), [(1, 700, 512, 40), (0.5, 350, 256, 20), (1 / 32, 22, 16, 1)]
    )
    def test_lengths_scale_with_their_blocks(self, scale: float, isl: int, block_tokens: int, osl: int) -> None:
        (planned,) = plan_trace([row(0, 1, last=188, osl=40)], length_scale=scale)

        assert (planned.isl, planned.block_tokens, planned.osl) == (isl, block_tokens, osl)

    def test_caps_cut_ids_with_the_prompt(self) -> None:
        (planned,) = plan_trace([row(4, 5, 6, osl=100)], isl_max=600, osl_max=7)

        assert (planned.isl, planned.osl, planned.block_ids) == (600, 7, (4, 5))

    def test_a_scale_without_tokens_is_refused(self) -> None:
        with pytest.raises(TraceError, match=r"length scale is 0.0001"):
            plan_trace([row(0)], length_scale=0.0001)

    @given(rows=rows_of_a_tree(), scale=st.sampled_from([1.0, 0.37, 1 / 16, 1 / 64, 2.0]))
    def test_prompts_share_exactly_the_tokens_of_their_common_leading_ids(
        self, rows: list[TraceRow], scale: float
    ) -> None:
        prompts = PromptMaker(16, 255)
        planned = plan_trace(rows, length_scale=scale)
        tokens = [prompts.token_ids(request) for request in planned]

        for one, one_tokens in zip(planned, tokens, strict=True):
            for other, other_tokens in zip(planned, tokens, strict=True):
                shared_ids = _common(one.block_ids, other.block_ids)
                shared_tokens = _common(one_tokens, other_tokens)
                floor = min(shared_ids * one.block_tokens, one.isl, other.isl)

                # Blocks of different ids may begin alike by chance, but never for as long as their ids are written.
                assert floor <= shared_tokens < floor + 5

    @given(rows=rows_of_a_tree(), scale=st.sampled_from([1.0, 0.37, 1 / 16]))
    def test_the_ideal_ratio_is_the_same_at_every_scale(self, rows: list[TraceRow], scale: float) -> None:
        whole = ideal_cached_token_ratio(plan_trace(rows))
        scaled = ideal_cached_token_ratio(plan_trace(rows, length_scale=scale))

        assert whole is not None
        assert scaled == pytest.approx(whole, abs=0.02)


def _common(one: list[int] | tuple[int, ...], other: list[int] | tuple[int, ...]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


class TestIdeal:
    @pytest.mark.parametrize(
        ("rows", "cached"),
        [
            ([], 0),
            ([row(0)], 0),
            ([row(0), row(0)], 512),
            ([row(0, last=100), row(0, last=100)], 100),
            ([row(0, 1), row(0, 2), row(0, 1, 3)], 512 + 1024),
            ([row(0, 1), row(5, 1)], 0),
            ([row(0, 1, 2), row(0, 9, 2)], 512),
        ],
    )
    def test_counts_leading_blocks_seen_before(self, rows: list[TraceRow], cached: int) -> None:
        assert ideal_cached_tokens(plan_trace(rows)) == cached

    def test_of_the_real_slice(self) -> None:
        """Counted independently: block by block as the traces' own script does, weighted with tokens."""
        seen: set[int] = set()
        hit = total = 0
        for line in CONVERSATION.read_text().splitlines():
            fields = json.loads(line)
            ids, length = fields["hash_ids"], fields["input_length"]
            lead = 0
            while lead < len(ids) and ids[lead] in seen:
                lead += 1
            hit, total = hit + min(lead * 512, length), total + length
            seen.update(ids)

        found = ideal_cached_token_ratio(plan_trace(read_trace(CONVERSATION)))

        assert found == hit / total
        assert round(hit / total, 4) == 0.2157

    @given(rows=rows_of_a_tree())
    def test_equals_an_infinite_token_cache(self, rows: list[TraceRow]) -> None:
        """A naive cache that remembers every (prefix of ids) it has seen, token for token."""
        requests: list[PlannedRequest] = plan_trace(rows)
        known: set[tuple[int, ...]] = set()
        cached = 0
        for request in requests:
            for end in range(len(request.block_ids), 0, -1):
                if request.block_ids[:end] in known:
                    cached += min(end * request.block_tokens, request.isl)
                    break
            known.update(request.block_ids[:end] for end in range(1, len(request.block_ids) + 1))

        assert ideal_cached_tokens(requests) == cached
