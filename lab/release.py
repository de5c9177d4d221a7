"""Build and check a release: ``python -m lab.release build`` and ``python -m lab.release check v0.1.0``.

``build`` writes to ``build/release``: the sdist, the wheel, ``sbom.json`` (CycloneDX, of the wheel with dependencies),
``NOTES.md`` (the version's section of CHANGELOG.md) and ``SHA256SUMS``. ``check`` compares a tag with the version of
the package, the chart and the changelog. Needs the extra ``release``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from poolgrid import __version__

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "release"
CHART = ROOT / "deploy" / "kubernetes" / "poolgrid" / "Chart.yaml"
NOTES_LINES_MAX = 60


def notes(version: str, changelog: str) -> str:
    """Return a version's section of the changelog without its heading; empty when there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() + "\n" if found else ""


def faults(tag: str) -> list[str]:
    """Return why this tag cannot be released; empty when it can."""
    chart = yaml.safe_load(CHART.read_text())
    text = notes(__version__, (ROOT / "CHANGELOG.md").read_text())
    found = []
    if tag != f"v{__version__}":
        found.append(f"the tag is {tag}, the package's version is {__version__} (src/poolgrid/__init__.py)")
    where = CHART.relative_to(ROOT)
    fields = [field for field in ("version", "appVersion") if chart[field] != __version__]
    found += [f"{where}: {field} is {chart[field]}, the package's version is {__version__}" for field in fields]
    if not text:
        found.append(f"CHANGELOG.md: no section ## [{__version__}]")
    elif text.count("\n") > NOTES_LINES_MAX:
        found.append(f"CHANGELOG.md: {text.count(chr(10))} lines for {__version__}, allowed are {NOTES_LINES_MAX}")
    return found


def build() -> None:
    """Write everything that a release publishes."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", OUTPUT, ROOT], check=True)
    (wheel,) = OUTPUT.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([Path(folder, "bin", "pip"), "install", "-q", wheel], check=True)
        command = [sys.executable, "-m", "cyclonedx_py", "environment", str(Path(folder, "bin", "python"))]
        subprocess.run([*command, "--output-reproducible", "-o", str(OUTPUT / "sbom.json")], check=True)
    (OUTPUT / "NOTES.md").write_text(notes(__version__, (ROOT / "CHANGELOG.md").read_text()))
    files = sorted(path for path in OUTPUT.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (OUTPUT / "SHA256SUMS").write_text("".join(sums))
    sys.stdout.write("".join(f"{path}\n" for path in [*files, OUTPUT / "SHA256SUMS"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write build/release")
    commands.add_parser("check", help="compare a tag with the versions").add_argument("tag")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build()
        return 0
    found = faults(arguments.tag)
    sys.stderr.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
