"""A release can be made from this tree: versions agree, notes are short, and a forge would accept its files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lab import release
from poolgrid import __version__

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ENTRY_WORDS_MAX = 25


def test_a_forge_accepts_the_workflows() -> None:
    assert WORKFLOWS
    assert _schema_faults("vendor.github-workflows", *WORKFLOWS) == ""


def test_a_forge_accepts_the_dependency_updates() -> None:
    assert _schema_faults("vendor.dependabot", ROOT / ".github" / "dependabot.yml") == ""


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_has_labelled_fields_with_names_of_their_own(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {"name", "description", "body"} <= set(form)
    assert len({field["id"] for field in fields}) == len(fields) >= 3
    assert all(field["attributes"]["label"] for field in fields)


def test_workflows_run_only_commands_that_exist() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    used = {*re.findall(r"make ([a-z-]+)", text), *nightly["jobs"]["long"]["strategy"]["matrix"]["target"]}
    assert used <= targets


def test_a_tag_of_the_packages_version_has_no_fault_but_missing_notes_before_the_release() -> None:
    assert set(release.faults(f"v{__version__}")) <= {f"CHANGELOG.md: no section ## [{__version__}]"}


def test_a_tag_of_another_version_is_refused() -> None:
    expected = f"the tag is v9.9.9, the package's version is {__version__} (src/poolgrid/__init__.py)"
    assert expected in release.faults("v9.9.9")


def test_notes_are_the_section_of_their_version() -> None:
    text = "# Changelog\n\n## [0.2.0] - 2027-01-01\n\n- new\n\n## [0.1.0] - 2026-12-01\n\n- old\n"
    assert [release.notes(version, text) for version in ("0.2.0", "0.1.0", "0.3.0")] == ["- new\n", "- old\n", ""]


def test_changelog_sections_and_entries_are_short() -> None:
    sections = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    entries = re.findall(r"^- (.*)$", CHANGELOG, re.MULTILINE)
    assert all(section.count("\n") <= release.NOTES_LINES_MAX for section in sections)
    assert not [entry for entry in entries if len(entry.split()) > ENTRY_WORDS_MAX]


def _schema_faults(schema: str, *paths: Path) -> str:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr
