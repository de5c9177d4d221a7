"""What ``test_shape.py`` limits, measured: ``python -m tests.shape`` prints it."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import httpx

from lab.website.configuration_page import SECTIONS
from tests.e2e.processes import Process, eventually
from tests.exported_metrics import exported

ROOT = Path(__file__).parents[1]
PRODUCT = ("router", "global_router", "workers")
PLUGINS = (
    *("src/poolgrid/tools", "src/poolgrid/fleet_page", "src/poolgrid/nats", "src/poolgrid/kubernetes"),
    *("workers/engines/simulated", "workers/engines/trtllm", "router/endpoint_picker", "router/policies"),
)
"""Folders for some users only; what is not in them is the core."""


@cache
def product() -> dict[str, str]:
    """Return the source of each installed module by its path."""
    own = (path for path in (ROOT / "src").rglob("*.py") if not path.is_symlink())
    linked = (path for name in PRODUCT for path in (ROOT / name).rglob("*.py"))
    paths = {path.resolve() for path in (*own, *linked)}
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


def _lines(sources: dict[str, str]) -> int:
    return sum(source.count("\n") for source in sources.values())


@cache
def figures() -> dict[str, int]:
    """Return what has a budget, by its name there."""
    core = {path: source for path, source in product().items() if not path.startswith(PLUGINS)}
    tests = {str(path): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    names = Counter(name.partition(":")[2] for name in classes())
    return {
        "product_lines": _lines(product()),
        "core_lines": _lines(core),
        "test_lines": _lines(tests),
        "modules": len(product()),
        "settings": len({name for section in SECTIONS for model in section.models for name in model.model_fields}),
        "metrics": len({each.family.name for each in exported()}),
        "class_names_used_twice": sum(1 for name, count in names.items() if count > 1 and not name.startswith("_")),
    }


@cache
def classes() -> dict[str, int]:
    """Return the lines of each class, by ``path:name``."""
    found = {}
    for path, source in product().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[f"{path}:{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    return found


def complexity(most: int) -> dict[str, int]:
    """Return each function whose cyclomatic complexity is above a limit, by ``path:name``, as ruff counts it."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "concise", "--no-cache"]
    limit = ["--config", f"lint.mccabe.max-complexity={most}", "src", *PRODUCT]
    done = subprocess.run([*command, *limit], cwd=ROOT, capture_output=True, text=True, check=False)
    rows = re.findall(r"^(\S+?):\d+:\d+: C901 `(\w+)` is too complex \((\d+) >", done.stdout, re.MULTILINE)
    return {f"{path}:{name}": int(figure) for path, name, figure in rows}


def modules_loaded(module: str) -> list[str]:
    """Return the modules of ours that a fresh process has after it imported one."""
    program = f"import sys, {module}; print(*(name for name in sys.modules if name.startswith('poolgrid.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def modules_run_by_a_request() -> list[str]:
    """Return the modules of ours that a router runs for one chat request: in each of a dozen, so timers fall out."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPATH": str(ROOT / "tests" / "request_trace"), "REQUEST_TRACE": folder}
        with Process("up", "--port", "0", "--workers", "1", "--speedup", "50", environment=environment) as up:
            up.wait_ready()
            router = up.child("router")
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 32}
            runs = []
            with httpx.Client(base_url=up.url, timeout=30) as client:
                client.post("/v1/chat/completions", json=body).raise_for_status()  # loads what is missing
                for number in range(1, 13):
                    router.send_signal(signal.SIGUSR1)
                    client.post("/v1/chat/completions", json=body).raise_for_status()
                    router.send_signal(signal.SIGUSR2)
                    path = Path(folder, f"{router.pid}.{number}")
                    eventually("the router has written which modules it ran", path.exists)
                    runs.append(set(path.read_text().splitlines()))
            return sorted(set.intersection(*runs))


def base_classes_of_other_packages() -> set[str]:
    """Return base classes from another package whose own name or module is private there, or all of uvicorn's."""
    found = set()
    for path, source in product().items():
        tree = ast.parse(source)
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("poolgrid")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    name = imported.get(ast.unparse(base).partition(".")[0], "")
                    private = any(part.startswith("_") and part != "__future__" for part in name.split("."))
                    if private or name.startswith("uvicorn."):
                        found.add(f"{path}:{node.name}({name})")
    return found


def upper_pins() -> set[str]:
    """Return the required dependencies that have an upper bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w.-]", line)[0] for line in project["dependencies"] if "<" in line.partition(";")[0]}


if __name__ == "__main__":
    for name, figure in figures().items():
        sys.stdout.write(f"{name} = {figure}\n")
    for name, lines in classes().items():
        if lines > 400:
            sys.stdout.write(f'"{name}" = {lines}\n')
    for name, figure in complexity(25).items():
        sys.stdout.write(f'"{name}" = {figure}\n')
    sys.stdout.write(f"router = {len(modules_loaded('poolgrid.router.bootstrap'))}\n")
    sys.stdout.write(f"request = {len(modules_run_by_a_request())}\n")
    sys.stdout.write(f"foreign bases: {sorted(base_classes_of_other_packages())}\n")
    sys.stdout.write(f"upper pins: {sorted(upper_pins())}\n")
