"""The functions behind `poolgrid config`, on real files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from poolgrid.server.cli import config
from poolgrid.server.global_router.document.reader import load_document
from tests.global_router.documents import ROOT, changed, disagg, dynamo_agg, dynamo_disagg

EXAMPLE = ROOT / "pool_configs" / "long_context.json"
PROFILES = ROOT / "pool_configs" / "profiles" / "two_by_two.profiles.json"


@pytest.fixture
def dynamo_file(tmp_path: Path) -> Path:
    path = tmp_path / "dynamo.json"
    path.write_text(json.dumps(dynamo_disagg()))
    return path


def test_check_of_a_valid_document_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.check([EXAMPLE]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "ok, aggregated with 3 pools over 4 × 2 × 2 cells" in err


def test_check_prints_every_problem_on_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    raw = changed(disagg(), ("prefill", "mapping", 0, 0), True)
    raw["defaults"] = {"itl_target_ms": 99, "note": "x" * 500}
    path.write_text(json.dumps(raw))

    assert config.check([path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("$.prefill.mapping[0][0]: is true")
    assert lines[1] == "$.defaults.note: is not a known key"
    assert lines[2].startswith("$.defaults.itl_target_ms: warning: is 99")


@pytest.mark.parametrize("what", ["missing", "directory"])
def test_a_file_that_cannot_be_read_is_a_problem(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path if what == "directory" else tmp_path / "none.json"

    for command in (lambda one: config.check([one]), config.show, config.convert):
        assert command(path) == 1
        assert capsys.readouterr().out.startswith("$: cannot be read: ")


def test_show_draws_every_grid_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.show(EXAMPLE) == 0
    out = capsys.readouterr().out
    for words in ("TTFT (ms)", "ITL (ms)", "ISL (tokens) ≥\u00a096,000", "medium", "16 / h"):
        assert words in out


def test_show_tells_programs_the_bounds_and_the_pool_of_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    document = load_document(EXAMPLE.read_bytes()).document
    assert config.show(EXAMPLE, as_json=True) == 0
    (name, grid), *others = json.loads(capsys.readouterr().out).items()

    stage = document.stages[name]
    assert not others
    assert [(axis["name"], axis["unit"], len(axis["bounds"])) for axis in grid["axes"]] == [
        (axis.name, axis.unit, axis.resolution) for axis in stage.axes
    ]
    assert tuple(grid["axes"][0]["bounds"][0]) == stage.axes[0].bounds(0)
    assert {pool["name"] for pool in grid["pools"]} == {pool.name for pool in stage.pools}
    assert grid["cells"][0][1][1] == stage.pool_at((0, 1, 1))


def test_build_tells_programs_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grid.json"
    assert config.build(PROFILES, out, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)

    assert load_document(Path(told["out"]).read_bytes()).document
    assert told["cells"] == len(re.findall('"met":', Path(told["evidence"]).read_text()))
    assert told["written"]
    assert config.build(tmp_path / "none.json", out, as_json=True) == 1
    assert not json.loads(capsys.readouterr().out)["usable"]


def test_show_draws_a_large_grid_with_every_kth_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = disagg()
    mapping = [["p-fast"] * 100 + ["p-cheap"] * 100 for _ in range(100)]
    raw["prefill"].update(isl_resolution=100, ttft_resolution=200, mapping=mapping)
    path = tmp_path / "large.json"
    path.write_text(json.dumps(raw))

    assert config.show(path) == 0
    out = capsys.readouterr().out
    assert "every 3. row, every 4. column" in out
    assert "A" * 25 + "B" * 25 in out


def test_convert_rewrites_dynamos_form_into_ours(dynamo_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.json"

    assert config.convert(dynamo_file, out) == 0
    again = load_document(out.read_bytes())
    assert again.form == "poolgrid"
    assert again.document == load_document(dynamo_file.read_bytes()).document
    assert config.check([out]) == 0


def test_convert_to_standard_output_is_the_document_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agg.json"
    path.write_text(json.dumps(dynamo_agg()))

    assert config.convert(path) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["mode"] == "aggregated"
    assert "priority_overrides[1]: warning: overlaps" in err


def test_what_cannot_be_written_is_said_and_leaves_nothing(
    dynamo_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config.convert(dynamo_file, tmp_path / "none" / "x.json") == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dynamo.json"]


def test_build_writes_a_grid_with_the_evidence_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grid.json"

    assert config.build(PROFILES, out) == 0
    built = load_document(out.read_bytes())
    evidence = json.loads((tmp_path / "grid.evidence.json").read_text())
    assert built.warnings == ()
    assert len(evidence["prefill"]["cells"]) == 16
    for cell in evidence["decode"]["cells"]:
        assert built.document.decode is not None
        assert built.document.decode.pool_at(tuple(cell["cell"])) == cell["pool"]
    assert "24 cells" in capsys.readouterr().err


def test_build_prints_the_problems_of_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profiles.json"
    path.write_text('{"mode": "disagg"}')

    assert config.build(path, tmp_path / "out.json") == 1
    assert "$.load: is missing\n" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


def test_the_published_schema_is_current() -> None:
    published = ROOT / "docs" / "schemas" / "pool_grid.schema.json"

    assert published.read_text() == config.schema_text(), (
        "write config.schema_text() to docs/schemas/pool_grid.schema.json"
    )


def test_several_documents_are_checked_at_once_and_each_line_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(changed(disagg(), ("prefill", "mapping", 0, 0), True)))

    assert config.check([EXAMPLE, bad]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith(f"{bad}: $.prefill.mapping[0][0]: is true")
    assert f"{EXAMPLE}: ok" in err

    assert config.check([EXAMPLE, bad], as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert {path: row["usable"] for path, row in found.items()} == {str(EXAMPLE): True, str(bad): False}
    assert found[str(bad)]["problems"][0].startswith("$.prefill.mapping[0][0]: is true")


@pytest.mark.parametrize("columns", ["80", "50", ""])
def test_a_grid_is_drawn_with_every_pool_by_its_whole_name(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    assert config.show(EXAMPLE) == 0
    out = capsys.readouterr().out
    for stage in load_document(EXAMPLE.read_bytes()).document.stages.values():
        for pool in stage.pools:
            assert pool.name in out
    assert "…" not in out
    assert not columns or max(map(len, out.splitlines())) <= int(columns)
