"""The short form of the catalogue against real processes: nobody but the attacker notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def test_the_short_form_holds(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "-m", "lab.attacks", "--short", "--json", str(table)]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(table.read_text())
    assert {row["verdict"] for row in rows} == {"held"}
    assert len(rows) >= 8
    asked = {row["attack"]: row["requests"] for row in rows if row["attack"] != "refused networks"}
    assert all(count > 5 for count in asked.values()), asked
