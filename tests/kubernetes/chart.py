"""Where the chart is, what it is rendered with, and what the committed manifests were rendered from."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "poolgrid"
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))
MANIFESTS = KUBERNETES / "manifests"
NAMESPACE = "llm"
DIGEST_LINE = "# Written by `make kubernetes`, from a chart and values with the digest "


def digest(example: Path) -> str:
    """Return the digest of all that the manifests of an example are made from."""
    made_from = hashlib.sha256()
    for path in (*sorted(each for each in CHART.rglob("*") if each.is_file()), example):
        made_from.update(f"{path.relative_to(KUBERNETES)}\0".encode() + path.read_bytes() + b"\0")
    return made_from.hexdigest()[:16]


def manifest_text(example: Path, rendered: dict[str, str]) -> str:
    """Return the file that is committed for an example."""
    head = (
        f"# {example.name} as plain manifests, for `kubectl apply -n {NAMESPACE} -f`; do not edit.\n"
        f"{DIGEST_LINE}{digest(example)}.\n"
    )
    parts = [text.strip().removeprefix("---").strip() for _, text in sorted(rendered.items())]
    return head + "".join(f"---\n{part}\n" for part in parts if part)
