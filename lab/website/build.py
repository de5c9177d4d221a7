"""Build the site: ``python -m lab.website.build [--version NAME] [--out DIRECTORY]``, or ``make site``.

Each version has a folder of its own under the output; ``latest`` is a copy of the one that was built last, and the
first page leads to it. Links of alerts and boards go to ``latest``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from lab.website.navigation import HOME, NAVIGATION
from poolgrid import __version__

ROOT = Path(__file__).parents[2]
LATEST = "latest"
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">{0}</a>\n'
)


def build(version: str, out: Path) -> Path:
    """Build the pages of a version; returns their folder. Raises ``CalledProcessError`` at the first bad link."""
    folder = out / version
    arguments = ["-W", "-q", "-b", "html", "-d", str(ROOT / "build/doctrees"), "-c", str(ROOT / "lab/website")]
    subprocess.run([sys.executable, "-m", "sphinx", *arguments, str(ROOT), str(folder)], cwd=ROOT, check=True)
    description = served_description()
    (folder / "openapi.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
    (folder / "openapi.html").write_text(openapi_page(description), encoding="utf-8")
    (folder / "llms.txt").write_text(llms_text(), encoding="utf-8")
    shutil.rmtree(out / LATEST, ignore_errors=True)
    shutil.copytree(folder, out / LATEST)
    (out / "index.html").write_text(REDIRECT.format(LATEST), encoding="utf-8")
    versions = sorted(path.name for path in out.iterdir() if (path / "index.html").exists())
    (out / "versions.json").write_text(json.dumps(versions), encoding="utf-8")
    return folder


def served_description() -> dict[str, Any]:
    """Return what a router answers at ``/openapi.json``."""
    command = [sys.executable, "-m", "poolgrid", "router", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as router:
        try:
            assert router.stdout is not None
            url = router.stdout.readline().split()[1]
            with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as answer:
                description: dict[str, Any] = json.load(answer)
        finally:
            router.terminate()
    return description


def openapi_page(description: Mapping[str, Any]) -> str:
    """Return an OpenAPI description as a page without scripts: operations, parameters, bodies and answers."""
    lines = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        "<title>poolgrid HTTP API</title>",
        "<style>body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{overflow:auto;"
        "background:#f4f4f4;padding:.5rem}summary{cursor:pointer}code{font-weight:600}</style>",
        f"<h1>{escape(description['info']['title'])} {escape(description['info']['version'])}</h1>",
        '<p><a href="docs/http_api.html">Guide to the HTTP API</a> · <a href="openapi.json">openapi.json</a></p>',
    ]
    for path, methods in sorted(description["paths"].items()):
        for method, operation in methods.items():
            lines += _operation(path, method, operation)
    lines.append("<h2>Schemas</h2>")
    for name, schema in sorted(description.get("components", {}).get("schemas", {}).items()):
        lines.append(
            f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
        )
    return "\n".join([*lines, "</html>", ""])


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(operation.get("summary", ""))
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> {summary}</summary>"
    if text := operation.get("description", ""):
        yield f"<p>{escape(text)}</p>"
    for part in ("parameters", "requestBody", "responses"):
        if operation.get(part):
            yield f"<h4>{part}</h4>{_json(operation[part])}"
    yield "</details>"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"


def llms_text() -> str:
    """Return ``llms.txt`` (llmstxt.org): each page by group, with its first sentence."""
    lines = ["# poolgrid", "", f"> {first_sentence(HOME)}", ""]
    for group, names in NAVIGATION.items():
        lines += [f"## {group}", ""]
        lines += [f"- [{title(name)}]({name}.html): {first_sentence(name)}" for name in names]
        lines.append("")
    return "\n".join(lines)


def title(name: str) -> str:
    """Return the heading of a page."""
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def first_sentence(name: str) -> str:
    """Return the first sentence of a page's first paragraph, as one line."""
    for line in (ROOT / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#<|!-[`>":
            return line.partition(". ")[0].rstrip(".") + "."
    return ""


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("--version", default=__version__, help="Name the folder of this version.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="Build into this directory.")
    chosen = parser.parse_args()
    folder = build(chosen.version, chosen.out)
    print(folder / "index.html")


if __name__ == "__main__":
    main()
