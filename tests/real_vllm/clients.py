"""Client frameworks in front of a real vLLM server: what passes against the server alone passes through poolgrid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.clients.__main__ import SUITES, Row, command_of, rows_of
from tests.e2e.processes import Process
from tests.real_vllm.servers import MAKE_MODEL, START_TIMEOUT_S, VllmServer, make_model
from tests.real_vllm.transparency import STORING

CONTEXT_TOKENS = 65_536
"""An agent's first request has 20,000 to 40,000 of the tiny model's tokens."""
LONG_MODEL = MAKE_MODEL.replace("max_position_embeddings=8192", f"max_position_embeddings={CONTEXT_TOKENS}")
OPTIONS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--max-model-len", str(CONTEXT_TOKENS), "--num-gpu-blocks-override", "8000"),
    *("--override-generation-config", '{"max_new_tokens": 400}'),
)
"""Without a parser of reasoning, which would find nothing else. A model of random weights seldom ends by itself."""


class ClientsLost(Exception):
    """Checks that pass against vLLM alone fail through the router."""


def _rows(suites: Sequence[str], url: str, alone: bool) -> Iterator[tuple[str, Row]]:
    for suite in suites:
        for row in rows_of(suite, command_of(suite), url, {"CLIENTS_WITHOUT_POOL": "1"} if alone else {}):
            yield f"{suite}: {row['check']}", row


def clients(vllm: Path, directory: Path, console: Console, only: str) -> dict[str, Any]:
    """each check of the client frameworks that passes against vLLM alone passes through ``poolgrid up --engine-url``"""
    model = directory / "long-model"
    model.mkdir()
    make_model(vllm, model, LONG_MODEL)
    suites = [name for name in SUITES if only in name]
    server = VllmServer(62, vllm, model, directory, OPTIONS, STORING)
    server.start()
    try:
        server.wait()
        with Process("up", "--engine-url", server.url, "--port", "0") as pool:
            router = pool.wait_ready(START_TIMEOUT_S).url
            alone = dict(_rows(suites, server.url, alone=True))
            through = dict(_rows(suites, router, alone=False))
            once = [name for name, row in alone.items() if row["passed"] and not _passed(through, name)]
            again = dict(_rows(sorted({name.partition(":")[0] for name in once}), router, alone=False)) if once else {}
    finally:
        server.kill()
    lost = [name for name in once if not _passed(again, name)]
    for name, row in alone.items():
        if not row["passed"]:
            console.print(f"    not alone: {name}: {row['error'][:120]}", markup=False)
    for name in lost:
        console.print(f"    LOST {name}: {again.get(name, {}).get('error', 'it did not run')}", markup=False)
    kept = sum(row["passed"] for row in alone.values())
    found = {"checks": len(alone), "pass alone": kept, "pass through": kept - len(lost)}
    if lost or not kept:
        raise ClientsLost(f"{found}; lost: {lost}")
    return found


def _passed(rows: dict[str, Row], name: str) -> bool:
    return name in rows and bool(rows[name]["passed"])
