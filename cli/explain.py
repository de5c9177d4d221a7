"""`poolgrid explain`: one request's decisions as a tree, from a router or from a global router and its pools.

``tree`` turns answers into something to draw and touches no socket; ``explain`` fetches and prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from cli.api_key import api_key_headers
from cli.journal import journal_errors, progress_bar, survey_bytes
from router.consolidator.adapters.posix_disk import ReadOnlyDirectory
from router.decision_journal.reader import decision_directories, decisions_about

TIMEOUT_S = 5.0
"""Longest wait for one answer; routers answer from memory."""

CANDIDATES_SHOWN_MAX = 32
"""Rows of candidates drawn, cheapest first; a note counts the rest. `--json` has them all."""


def tree(answer: Mapping[str, Any], of_pools: Mapping[str, Mapping[str, Any]] | None = None) -> Tree:
    """Return the tree of an answer of ``GET /v1/decisions/{id}``; ``of_pools`` holds the pools' own answers by name."""
    root = Tree(f"[bold]request {escape(str(answer.get('request_id', '')))}[/]", guide_style="dim")
    if "placements" not in answer:
        for attempt in answer.get("attempts", ()):
            _add_attempt(root, attempt)
        return root
    hints, expected = answer.get("hints", {}), answer.get("expected_output", {})
    targets = ", ".join(f"{name} {value}" for name, value in hints.items() if value is not None) or "none given"
    root.add(
        f"model {escape(str(answer.get('model')))}, ISL {answer.get('isl')}, document revision {answer.get('revision')}"
    )
    root.add(f"hints: {targets}; expected output {expected.get('tokens')} tokens ({expected.get('source')})")
    for placement in answer["placements"]:
        _add_placement(root, placement, of_pools or {})
    for note in answer.get("notes", ()):
        root.add(escape(str(note)))
    root.add(
        f"outcome: {answer.get('outcome')}, {answer.get('output_tokens')} tokens, "
        f"TTFT {_number(answer.get('ttft_ms'))} ms, ITL {_number(answer.get('itl_ms'))} ms"
    )
    return root


def _add_placement(root: Tree, placement: Mapping[str, Any], of_pools: Mapping[str, Mapping[str, Any]]) -> None:
    branch = root.add(
        f"[bold]{escape(placement['work'])}[/] ({escape(placement['cause'])}): "
        f"pool [bold]{escape(placement['pool'])}[/] by {escape(placement['how'])}, "
        f"worker [bold]{escape(placement['worker'])}[/]"
    )
    _add_mapping(branch.add("grid"), placement.get("selection") or {})
    if placement.get("spill"):
        _add_mapping(branch.add("closed loop"), placement["spill"])
    _add_mapping(branch.add("fallback"), placement.get("fallback") or {})
    for refusal in placement.get("refusals", ()):
        branch.add(f"[yellow]refused by {escape(refusal['pool'])}[/]: {refusal['state']}, {escape(refusal['message'])}")
    branch.add(
        f"reserved in {placement['select_ms']} ms: {placement['pool_reason']}, overlap {placement['overlap_blocks']} "
        f"blocks of {placement['block_size']} tokens"
    )
    for attempt in of_pools.get(placement["pool"], {}).get("attempts", ()):
        _add_attempt(branch, attempt)


def _add_attempt(root: Tree, attempt: Mapping[str, Any]) -> None:
    reused = attempt.get("realised_cached_tokens")
    margin = attempt.get("margin")
    branch = root.add(
        f"attempt {attempt['attempt']}, {attempt.get('stage', 'whole')}: worker [bold]{escape(attempt['worker'])}[/], "
        f"{escape(attempt['reason'])} by policy {escape(attempt['policy'])} at journal offset {attempt['offset']}"
    )
    branch.add(
        f"ISL {attempt['isl']} = {attempt['isl_blocks']} blocks, {attempt['overlap_blocks']} believed to be there, "
        f"{'not known yet what' if reused is None else f'{reused} tokens'} really reused"
    )
    if attempt.get("behind_records"):
        branch.add(
            f"[yellow]the router was catching up[/]: {attempt['behind_records']} records or more of the pool's journal "
            "were not applied yet"
        )
    if margin is not None:
        name = escape(str(attempt.get("runner_up") or "not named"))
        branch.add(f"the runner-up would have cost {margin:.2f} more ({name})")
    branch.add(_candidates(attempt.get("rows", ())))
    for worker, why in attempt.get("filtered", {}).items():
        branch.add(f"[yellow]not {escape(worker)}[/]: {escape(why)}")
    for worker, why in attempt.get("untrusted", {}).items():
        branch.add(f"[yellow]overlap of {escape(worker)} predicted by the router's own choices[/]: {escape(why)}")
    recorded = attempt.get("recorded")
    if recorded:
        rules = ", ".join(f"{name} {value}" for name, value in recorded["settings"].items())
        branch.add(escape(f"recorded by {recorded['router']}, entry {recorded['entry']}; rules: {rules}"))


def _candidates(rows: Sequence[Mapping[str, Any]]) -> Table:
    terms = list(dict.fromkeys(name for row in rows for name in row.get("terms", {})))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("worker", "device", "host", "disk", "prefill tok", "blocks", "requests", *terms, "cost"):
        table.add_column(heading, justify="left" if heading == "worker" else "right")
    ordered = sorted(rows, key=lambda row: (not row["chosen"], row["cost"] or 0.0, row["worker"]))
    for row in ordered[:CANDIDATES_SHOWN_MAX]:
        table.add_row(
            f"[bold]{escape(row['worker'])}[/]" if row["chosen"] else escape(row["worker"]),
            str(row["device_overlap_blocks"]),
            str(row["host_overlap_blocks"]),
            str(row["disk_overlap_blocks"]),
            str(row["active_prefill_tokens"]),
            str(row["active_blocks"]),
            str(row["requests"]),
            *(_number(row["terms"].get(name)) for name in terms),
            _number(row["cost"]),
        )
    if len(ordered) > CANDIDATES_SHOWN_MAX:
        table.caption = f"{len(ordered) - CANDIDATES_SHOWN_MAX} more candidates"
    return table


def _add_mapping(branch: Tree, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _add_mapping(branch.add(escape(str(name))), value)
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            below = branch.add(str(name))
            for number, each in enumerate(value):
                _add_mapping(below.add(f"{number}"), each if isinstance(each, Mapping) else {"": each})
        elif value not in (None, [], {}):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            branch.add(escape(f"{name}: {text}"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def explain_from_journal(request_id: str, directory: Path, as_json: bool) -> int:
    """Print why a request went where it went, as recorded below a directory; return 1 when nothing is."""
    attempts: list[dict[str, Any]] = []
    with journal_errors():
        for path in decision_directories(directory):
            disk = ReadOnlyDirectory(path)
            with progress_bar(f"reading {path.name}", survey_bytes(disk)) as on_progress:
                found = decisions_about(disk, request_id, on_progress)
            for each in found:
                noted = each.settings
                recorded = {
                    "router": path.name,
                    "file": each.stored.file,
                    "entry": each.stored.number,
                    "settings_version": noted.settings_version if noted else "",
                    "settings": noted.settings if noted else {},
                }
                attempts.append({**each.decision.explanation(), "recorded": recorded})
    if not attempts:
        sys.stderr.write(f"explaining {request_id!r}: no decision journal in {directory} has a decision about it\n")
        return 1
    _show({"request_id": request_id, "attempts": attempts}, {}, as_json)
    return 0


def explain(request_id: str, url: str, as_json: bool) -> int:
    """Print why a request went where it went; return 1 when the router keeps nothing of it or does not answer."""
    path = f"/v1/decisions/{quote(request_id, safe='')}"
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=api_key_headers()) as client:
            found = client.get(f"{url.rstrip('/')}{path}")
            if found.status_code != 200:
                sys.stderr.write(f"explaining {request_id!r}: {_message(found)}\n")
                return 1
            answer = found.json()
            of_pools = _ask_pools(client, url, path, answer)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        sys.stderr.write(f"explaining {request_id!r}: {url} does not answer: {error or type(error).__name__}\n")
        return 1
    _show(answer, of_pools, as_json)
    return 0


def _show(answer: Mapping[str, Any], of_pools: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        whole = {**answer, "pools": of_pools} if of_pools else answer
        sys.stdout.write(json.dumps(whole, indent=2) + "\n")
    else:
        Console().print(tree(answer, of_pools))


def _ask_pools(client: httpx.Client, url: str, path: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the pools' own routers keep of the request; a pool that is away is left out."""
    if "placements" not in answer:
        return {}
    urls = {row["name"]: row["url"] for row in client.get(f"{url.rstrip('/')}/v1/pools").json()["data"]}
    kept: dict[str, Any] = {}
    for pool in dict.fromkeys(placement["pool"] for placement in answer["placements"]):
        try:
            found = client.get(f"{urls[pool]}{path}")
        except (httpx.HTTPError, KeyError):
            continue
        if found.status_code == 200:
            kept[pool] = found.json()
    return kept


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"status {answer.status_code}"
