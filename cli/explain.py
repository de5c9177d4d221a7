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
import msgspec
from msgspec import UNSET
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from poolgrid.cli.api_key import api_key_headers
from poolgrid.cli.journal_directory import journal_errors, progress_bar, survey_bytes
from poolgrid.router.consolidator.adapters.posix_disk import ReadOnlyDirectory
from poolgrid.router.decision_journal.reader import decision_directories, decisions_about
from poolgrid.wire.answers import (
    CandidateRow,
    DecisionExplanation,
    PlacedExplanation,
    PlacementRow,
    PoolList,
    RecordedBy,
    RequestExplanation,
)

TIMEOUT_S = 5.0
"""Longest wait for one answer; routers answer from memory."""

CANDIDATES_SHOWN_MAX = 32
"""Rows of candidates drawn, cheapest first; a note counts the rest. `--json` has them all."""


def tree(
    answer: RequestExplanation | PlacedExplanation, of_pools: Mapping[str, RequestExplanation] | None = None
) -> Tree:
    """Return the tree of an answer of ``GET /v1/decisions/{id}``; ``of_pools`` holds the pools' own answers by name."""
    root = Tree(f"[bold]request {escape(answer.request_id)}[/]", guide_style="dim")
    if isinstance(answer, RequestExplanation):
        for attempt in answer.attempts:
            _add_attempt(root, attempt)
        return root
    targets = ", ".join(f"{name} {value}" for name, value in answer.hints.items() if value is not None) or "none given"
    expected = answer.expected_output
    root.add(f"model {escape(answer.model)}, ISL {answer.isl}, document revision {answer.revision}")
    root.add(f"hints: {targets}; expected output {expected.tokens} tokens ({expected.source})")
    for placement in answer.placements:
        _add_placement(root, placement, of_pools or {})
    for note in answer.notes:
        root.add(escape(note))
    root.add(
        f"outcome: {answer.outcome}, {answer.output_tokens} tokens, "
        f"TTFT {_number(answer.ttft_ms)} ms, ITL {_number(answer.itl_ms)} ms"
    )
    return root


def _add_placement(root: Tree, placement: PlacementRow, of_pools: Mapping[str, RequestExplanation]) -> None:
    branch = root.add(
        f"[bold]{escape(placement.work)}[/] ({escape(placement.cause)}): "
        f"pool [bold]{escape(placement.pool)}[/] by {escape(placement.how)}, "
        f"worker [bold]{escape(placement.worker)}[/]"
    )
    _add_mapping(branch.add("grid"), placement.selection)
    if placement.spill:
        _add_mapping(branch.add("closed loop"), placement.spill)
    _add_mapping(branch.add("fallback"), placement.fallback)
    for refusal in placement.refusals:
        branch.add(f"[yellow]refused by {escape(refusal.pool)}[/]: {refusal.state}, {escape(refusal.message)}")
    branch.add(
        f"reserved in {placement.select_ms} ms: {placement.pool_reason}, overlap {placement.overlap_blocks} "
        f"blocks of {placement.block_size} tokens"
    )
    if placement.pool in of_pools:
        for attempt in of_pools[placement.pool].attempts:
            _add_attempt(branch, attempt)


def _add_attempt(root: Tree, attempt: DecisionExplanation) -> None:
    reused = attempt.realised_cached_tokens
    branch = root.add(
        f"attempt {attempt.attempt}, {attempt.stage}: worker [bold]{escape(attempt.worker)}[/], "
        f"{escape(attempt.reason)} by policy {escape(attempt.policy)} at journal offset {attempt.offset}"
    )
    branch.add(
        f"ISL {attempt.isl} = {attempt.isl_blocks} blocks, {attempt.overlap_blocks} believed to be there, "
        f"{'not known yet what' if reused is None else f'{reused} tokens'} really reused"
    )
    if attempt.behind_records:
        branch.add(
            f"[yellow]the router was catching up[/]: {attempt.behind_records} records or more of the pool's journal "
            "were not applied yet"
        )
    if attempt.margin is not None:
        name = escape(attempt.runner_up or "not named")
        branch.add(f"the runner-up would have cost {attempt.margin:.2f} more ({name})")
    branch.add(_candidates(attempt.rows))
    for worker, why in attempt.filtered.items():
        branch.add(f"[yellow]not {escape(worker)}[/]: {escape(why)}")
    for worker, why in attempt.untrusted.items():
        branch.add(f"[yellow]overlap of {escape(worker)} predicted by the router's own choices[/]: {escape(why)}")
    recorded = attempt.recorded
    if recorded is not UNSET:
        rules = ", ".join(f"{name} {value}" for name, value in recorded.settings.items())
        branch.add(escape(f"recorded by {recorded.router}, entry {recorded.entry}; rules: {rules}"))


def _candidates(rows: Sequence[CandidateRow]) -> Table:
    terms = list(dict.fromkeys(name for row in rows for name in row.terms))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("worker", "device", "host", "disk", "prefill tok", "blocks", "requests", *terms, "cost"):
        table.add_column(heading, justify="left" if heading == "worker" else "right")
    ordered = sorted(rows, key=lambda row: (not row.chosen, row.cost or 0.0, row.worker))
    for row in ordered[:CANDIDATES_SHOWN_MAX]:
        table.add_row(
            f"[bold]{escape(row.worker)}[/]" if row.chosen else escape(row.worker),
            str(row.device_overlap_blocks),
            str(row.host_overlap_blocks),
            str(row.disk_overlap_blocks),
            str(row.active_prefill_tokens),
            str(row.active_blocks),
            str(row.requests),
            *(_number(row.terms.get(name)) for name in terms),
            _number(row.cost),
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
    attempts: list[DecisionExplanation] = []
    with journal_errors():
        for path in decision_directories(directory):
            disk = ReadOnlyDirectory(path)
            with progress_bar(f"reading {path.name}", survey_bytes(disk)) as on_progress:
                found = decisions_about(disk, request_id, on_progress)
            for each in found:
                noted = each.settings
                recorded = RecordedBy(
                    router=path.name,
                    file=each.stored.file,
                    entry=each.stored.number,
                    settings_version=noted.settings_version if noted else "",
                    settings=noted.settings if noted else {},
                )
                attempts.append(msgspec.structs.replace(each.decision.explanation(), recorded=recorded))
    if not attempts:
        sys.stderr.write(f"explaining {request_id!r}: no decision journal in {directory} has a decision about it\n")
        return 1
    answer = RequestExplanation(request_id=request_id, attempts=attempts)
    if as_json:
        _print_json(answer.to_json())
    else:
        Console().print(tree(answer))
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
            answer = _explanation(found.content)
            pools = _ask_pools(client, url, path, answer) if isinstance(answer, PlacedExplanation) else {}
        of_pools = {name: msgspec.json.decode(each.content, type=RequestExplanation) for name, each in pools.items()}
    except httpx.HTTPError as error:
        sys.stderr.write(f"explaining {request_id!r}: {url} does not answer: {error or type(error).__name__}\n")
        return 1
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        sys.stderr.write(f"explaining {request_id!r}: the answer of {url} is not a router's: {error}\n")
        return 1
    if as_json:
        # As it came: what this version does not know of is in it too.
        whole = found.json()
        _print_json({**whole, "pools": {name: each.json() for name, each in pools.items()}} if pools else whole)
    else:
        Console().print(tree(answer, of_pools))
    return 0


def _print_json(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")


def _explanation(body: bytes) -> RequestExplanation | PlacedExplanation:
    """Return the answer of a router or of a global router; only the latter knows of placements."""
    if "placements" in msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
        return msgspec.json.decode(body, type=PlacedExplanation)
    return msgspec.json.decode(body, type=RequestExplanation)


def _ask_pools(client: httpx.Client, url: str, path: str, answer: PlacedExplanation) -> dict[str, httpx.Response]:
    """Return what the pools' own routers keep of the request; a pool that is away is left out."""
    pools = msgspec.json.decode(client.get(f"{url.rstrip('/')}/v1/pools").content, type=PoolList)
    urls = {row.name: row.url for row in pools.data}
    kept: dict[str, httpx.Response] = {}
    for pool in dict.fromkeys(placement.pool for placement in answer.placements):
        try:
            found = client.get(f"{urls[pool]}{path}")
        except (httpx.HTTPError, KeyError):
            continue
        if found.status_code == 200:
            kept[pool] = found
    return kept


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"status {answer.status_code}"
