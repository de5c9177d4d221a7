"""Step times follow the published formulas, or a table that says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poolgrid.kernel.wire.card import NO_STEP_TIMES
from poolgrid.server.workers.engines.registry import engine_definition
from poolgrid.server.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.server.workers.engines.server.dialects.vllm import KIND
from poolgrid.server.workers.engines.server.opening import make_card
from poolgrid.server.workers.settings import StepTimesSettings
from poolgrid.server.workers.timing import (
    DIRECTORY,
    MEASURED,
    PolynomialTiming,
    ScaledTiming,
    TableError,
    TableTiming,
    shipped_timing,
    timing_model,
)


@pytest.mark.parametrize(
    ("tokens", "ms"),
    [
        (0, 0.0),
        (1, 4.209989e-7 + 1.518344e-2 + 16.50142),
        (8192, 4.209989e-7 * 8192**2 + 1.518344e-2 * 8192 + 16.50142),
    ],
)
def test_prefill_follows_the_published_polynomial(tokens: int, ms: float) -> None:
    assert PolynomialTiming().prefill_ms(tokens) == pytest.approx(ms, rel=1e-7)


@pytest.mark.parametrize(("share", "ms"), [(-1.0, 5.74), (0.0, 5.74), (0.5, 26.31), (1.0, 34.01), (2.0, 34.01)])
def test_decode_follows_the_published_polynomial_and_clamps_the_share(share: float, ms: float) -> None:
    assert PolynomialTiming().decode_ms(share) == pytest.approx(ms, rel=1e-12)


def test_a_table_is_interpolated_and_prefill_goes_on_beyond_it() -> None:
    timing = TableTiming.from_json(b'{"prefill": [[100, 10], [200, 30]], "decode": [[0.2, 5], [0.6, 9]]}')

    assert [timing.prefill_ms(tokens) for tokens in (0, 50, 100, 150, 200, 300)] == [0, 10, 10, 20, 30, 50]
    assert [timing.decode_ms(share) for share in (0.0, 0.2, 0.4, 1.0)] == pytest.approx([5, 5, 7, 9])


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("{", "the table"),
        ({"prefill": [[1, 1]]}, "decode"),
        ({"prefill": [], "decode": [[0, 1]]}, "prefill is empty"),
        ({"prefill": [[1, 1], [1, 2]], "decode": [[0, 1]]}, r"prefill\[1\] has tokens 1.0 after 1.0"),
        ({"prefill": [[1, 0]], "decode": [[0, 1]]}, r"prefill\[0\] has 0.0 ms"),
        ({"prefill": [[1, 1]], "decode": [[0, 1], [1.5, 2]]}, r"decode\[1\] has used_share 1.5"),
        ({"prefill": [[1, "x"]], "decode": [[0, 1]]}, r"\$.prefill\[0\]\[1\]"),
        ({"prefill": [[1, 1]], "decode": [[0, 1]], "prefil": []}, "prefil"),
    ],
)
def test_a_wrong_table_is_refused_naming_the_place(table: object, place: str) -> None:
    data = table.encode() if isinstance(table, str) else json.dumps(table).encode()

    with pytest.raises(TableError, match=place):
        TableTiming.from_json(data)


def test_every_shipped_measurement_has_a_name_and_says_where_it_is_from() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.json")} == set(MEASURED)
    for name in MEASURED:
        timing = shipped_timing(name)
        assert "vLLM" in timing.source
        assert 0 < timing.prefill_ms(1000) < timing.prefill_ms(16_000)
        assert 0 < timing.decode_ms(0.1) < timing.decode_ms(0.9)


def test_the_measured_h100_times_are_those_of_the_table() -> None:
    timing = timing_model("h100-qwen3-8b")

    assert timing.prefill_ms(8192) == 220.72
    assert timing.decode_ms(0.4379) == 13.664


def test_times_that_engine_check_measured_over_http_are_near_those_measured_in_the_engine() -> None:
    inside, over_http = timing_model("h100-qwen3-8b"), timing_model("h200-qwen3-8b")

    for tokens in (512, 1024, 4096, 8192, 16_000):
        assert over_http.prefill_ms(tokens) / inside.prefill_ms(tokens) == pytest.approx(1.15, abs=0.25)
    for share in (0.1, 0.5, 0.9):
        assert over_http.decode_ms(share) / inside.decode_ms(share) == pytest.approx(0.7, abs=0.3)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(TableError, match="'h200' is unknown, there are published, h100-qwen3-8b, h200-qwen3-8b"):
        shipped_timing("h200")


def test_a_table_is_named_by_its_path(tmp_path: Path) -> None:
    table = tmp_path / "own.json"
    table.write_text('{"prefill": [[1, 2]], "decode": [[0, 3]], "source": "here"}')

    assert timing_model(str(table)).prefill_ms(1) == 2


def test_a_speedup_divides_every_time() -> None:
    timing = ScaledTiming(PolynomialTiming(), 10.0)

    assert timing.prefill_ms(500) == PolynomialTiming().prefill_ms(500) / 10
    assert timing.decode_ms(0.3) == PolynomialTiming().decode_ms(0.3) / 10
    with pytest.raises(ValueError, match="speedup is 0"):
        ScaledTiming(PolynomialTiming(), 0)


OWN = {"prefill": [[1, 10.0], [1000, 60.0]], "decode": [[0.0, 5.0], [1.0, 20.0]]}


def test_a_measurement_of_ones_own_is_said(tmp_path: Path) -> None:
    table = tmp_path / "own.json"
    table.write_text(json.dumps(OWN))

    times = StepTimesSettings(timing=str(table)).step_times()

    assert dict(times.prefill)[1] == 10.0
    assert dict(times.decode)[0.5] == 12.5


@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_a_table_that_cannot_be_used_is_refused_before_an_engine_is_loaded(engine: str, tmp_path: Path) -> None:
    table = tmp_path / "own.json"
    table.write_text(json.dumps({**OWN, "prefill": [[1, -3.0]]}))

    with pytest.raises(ValueError, match=r"own\.json: prefill\[0\] has -3"):
        engine_definition(engine).settings(model_path="m", timing=str(table))


def test_the_card_of_a_worker_before_a_server_says_them() -> None:
    settings = engine_definition("vllm").settings(engine_url=("http://127.0.0.1:8001",), timing="h200-qwen3-8b")

    card = make_card(settings, ServerFacts("vllm", model="m", block_size=16), KIND, 5000, 5001)

    assert card.step_times == settings.step_times() != NO_STEP_TIMES
