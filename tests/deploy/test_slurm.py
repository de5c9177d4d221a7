"""The job scripts of ``deploy/slurm``, as far as they can be tried without Slurm; ``make slurm`` runs them on one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "deploy" / "slurm").iterdir() if path.is_file())
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not there")


def bash(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert BASH is not None
    return subprocess.run([BASH, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash(script: Path) -> None:
    assert bash("-n", str(script)).stderr == ""


@pytest.mark.parametrize(("statuses", "runs"), [("0", 1), ("2", 1), ("1 137 0", 3), ("1 1 2", 3)])
def test_a_command_that_fails_is_started_again_and_one_that_ended_in_order_is_not(
    tmp_path: Path, statuses: str, runs: int
) -> None:
    (tmp_path / "statuses").write_text("\n".join(statuses.split()) + "\n")
    program = """
        source "$1/lib.sh"
        sleep() { :; }
        once() {
            echo run >>"$PLACE/runs"
            exit "$(sed -n "$(wc -l <"$PLACE/runs")p" "$PLACE/statuses")"
        }
        PLACE=$2
        keep once with arguments
    """

    found = bash("-c", program, "bash", str(SCRIPTS[0].parent), str(tmp_path))

    assert (tmp_path / "runs").read_text().count("run") == runs
    assert found.returncode == int(statuses.split()[-1])
    assert found.stderr.count("is started again") == runs - 1


def test_the_page_and_the_scripts_name_the_same_variables() -> None:
    page = (ROOT / "docs" / "bare_metal.md").read_text()
    cells = re.findall(r"^\| (`[A-Z].*?) \|", page, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell)} | {"CONFIG", "POOLS", "POOLGRID"}
    text = "\n".join(path.read_text() for path in SCRIPTS)
    given = set(re.findall(r"\$\{([A-Z_]+):[-?]", text))

    assert {name for name in given if not name.startswith("SLURM")} == named
