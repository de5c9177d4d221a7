"""`poolgrid explain`: one request's decisions.

``tree`` turns answers into something to draw and touches no socket; ``explain`` fetches and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
import httpx
import msgspec
from msgspec import UNSET
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.answers import (
    CandidateRow,
    DecisionExplanation,
    LegsRow,
    PlacedExplanation,
    PlacementRow,
    PoolList,
    RecordedBy,
    RequestExplanation,
)
from poolgrid.server.cli.command_line import as_json, command, print_json, router_url
from poolgrid.server.cli.router_client import KEY_NOTE, api_key_headers, found_url, refusal
from poolgrid.server.process.figures import counted, number
from poolgrid.server.process.terminal_table import Heading, TerminalTable, terminal

UNCOMPARED = "the rest is output, or behind a medium whose number of tokens the workers do not report"
"""Why some blocks of a request with media are not compared."""

TIMEOUT_S = 5.0
"""Longest wait for one answer; routers answer from memory."""

CANDIDATES_SHOWN_MAX = 32
"""Rows of candidates drawn, cheapest first; a note counts the rest. `--json` has them all."""


def tree(
    answer: RequestExplanation | PlacedExplanation, of_pools: Mapping[str, RequestExplanation] | None = None
) -> Tree:
    """Return the tree of an answer of ``GET /v1/decisions/{id}``.

    ``of_pools`` holds what the pools' own routers recorded of each dispatch, by its id.
    """
    root = Tree(f"[bold]request {escape(answer.request_id)}[/]", guide_style="dim")
    if isinstance(answer, RequestExplanation):
        _add_attempts(root, answer.attempts)
        return root
    targets = ", ".join(f"{name} {value}" for name, value in answer.hints.items() if value is not None) or "none given"
    expected = answer.expected_output
    root.add(f"model {escape(answer.model)}, ISL {answer.isl:,}, document revision {answer.revision}")
    root.add(f"hints: {targets}; expected output {counted(expected.tokens, 'token')} ({expected.source})")
    for placement in answer.placements:
        _add_placement(root, placement, of_pools or {})
    for note in answer.notes:
        root.add(escape(note))
    root.add(
        f"outcome: {answer.outcome}, {counted(answer.output_tokens, 'token')}, "
        f"TTFT {number(answer.ttft_ms)} ms, ITL {number(answer.itl_ms)} ms"
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
    for refused in placement.refusals:
        branch.add(f"[yellow]refused by {escape(refused.pool)}[/]: {refused.state}, {escape(refused.message)}")
    if placement.block_size:
        branch.add(
            f"reserved in {number(placement.select_ms)} ms: {placement.pool_reason}, overlap "
            f"{counted(placement.overlap_blocks, 'block')} of {counted(placement.block_size, 'token')}"
        )
    else:
        branch.add(f"forwarded, and its router chose: {placement.pool_reason or 'nothing is known of it'}")
    if placement.dispatch_id in of_pools:
        _add_attempts(branch, of_pools[placement.dispatch_id].attempts)


def _add_attempts(root: Tree, attempts: Sequence[DecisionExplanation]) -> None:
    """Add attempts; those of several sequences below a branch for each."""
    sequences = list(dict.fromkeys(attempt.request_id for attempt in attempts))
    for sequence in sequences:
        branch = root if len(sequences) == 1 else root.add(f"sequence [bold]{escape(sequence)}[/]")
        for attempt in attempts:
            if attempt.request_id == sequence:
                _add_attempt(branch, attempt)


def _legs_line(legs: LegsRow) -> str:
    """Return why a request has one leg or two, in milliseconds."""
    parts = []
    for name, leg in (("one leg", legs.one), ("two legs", legs.two)):
        if leg is None:
            parts.append(f"{name}: no worker has room")
        else:
            *terms, last = (f"{term.removesuffix('_ms')} {number(ms)}" for term, ms in leg.terms.items())
            parts.append(f"{name}: {number(leg.cost_ms)} ms = {' + '.join(terms)} + {leg.weight:g} x {last}")
    return f"{legs.reason}: {'; '.join(parts)}"


def _add_attempt(root: Tree, attempt: DecisionExplanation) -> None:
    reused = attempt.realised_cached_tokens
    promised = min(attempt.isl, attempt.overlap_blocks * attempt.block_size)
    came = "nothing reported yet" if reused is None else f"{counted(reused, 'token')} reported as reused"
    branch = root.add(
        f"attempt {attempt.attempt}, {attempt.stage}: worker [bold]{escape(attempt.worker)}[/], "
        f"{escape(attempt.reason)} by policy {escape(attempt.policy)} at journal offset {attempt.offset}"
    )
    branch.add(
        f"ISL {attempt.isl:,} = {counted(attempt.isl_blocks, 'block')}, {attempt.overlap_blocks:,} expected to be "
        f"there: {counted(promised, 'token')} promised, {came}"
    )
    if attempt.session:
        branch.add(f"session {escape(attempt.session)}")
    if attempt.media is not UNSET:
        media, whole = attempt.media, attempt.isl // attempt.block_size
        rest = "" if media.compared_blocks >= whole else f"; {UNCOMPARED}"
        branch.add(
            f"{counted(media.items, 'medium')}: {media.compared_blocks:,} of {counted(whole, 'whole block')} compared "
            f"with what workers hold{rest}"
        )
    if attempt.legs is not UNSET:
        branch.add(_legs_line(attempt.legs))
    if attempt.expected_ttft_ms is not None:
        real = attempt.realised_ttft_ms
        came = "not known yet what it was" if real is None else f"it was {number(real)} ms"
        branch.add(f"TTFT of {number(attempt.expected_ttft_ms)} ms expected, {came}")
    if attempt.failure is not UNSET:
        branch.add(f"[yellow]{escape(attempt.worker)} did not serve it[/]: {escape(attempt.failure)}")
    if attempt.behind_records:
        branch.add(
            f"[yellow]the router was catching up[/]: {counted(attempt.behind_records, 'record')} or more of the pool's "
            "journal were not applied yet"
        )
    if attempt.margin is not None:
        name = escape(attempt.runner_up or "not named")
        branch.add(f"the runner-up would have cost {number(attempt.margin)} more ({name})")
    branch.add(_candidates(attempt.rows))
    for worker, why in attempt.filtered.items():
        branch.add(f"[yellow]not {escape(worker)}[/]: {escape(why)}")
    for worker, why in attempt.untrusted.items():
        branch.add(f"[yellow]overlap of {escape(worker)} predicted by the router's own choices[/]: {escape(why)}")
    recorded = attempt.recorded
    if recorded is not UNSET:
        rules = ", ".join(f"{name} {value}" for name, value in recorded.settings.items())
        branch.add(escape(f"recorded by {recorded.router}, entry {recorded.entry}; rules: {rules}"))


def _candidates(rows: Sequence[CandidateRow]) -> TerminalTable:
    terms = list(dict.fromkeys(name for row in rows for name in row.terms))
    ordered = sorted(rows, key=lambda row: (not row.chosen, row.cost or 0.0, row.worker))
    shown = [(row, _figures(row, terms)) for row in ordered[:CANDIDATES_SHOWN_MAX]]
    names = ("device", "host", "disk", "prefill tok", "blocks", "requests", *terms, "cost")
    # Columns with the same value for all, or zero, distinguish no candidates, and go first where there is little room.
    columns = [[figures[at] for _, figures in shown] for at in range(len(names))]
    telling = [len(set(column)) > 1 or (len(column) == 1 and column[0].strip("0.,–")) for column in columns]
    headings = [
        Heading(name, optional=not tells and name != "cost") for name, tells in zip(names, telling, strict=True)
    ]
    table = TerminalTable([Heading("worker", numeric=False), *headings])
    for row, figures in shown:
        table.add(Text(row.worker, "bold" if row.chosen else ""), *figures)
    if len(ordered) > CANDIDATES_SHOWN_MAX:
        table.note = f"and {counted(len(ordered) - CANDIDATES_SHOWN_MAX, 'more candidate')}"
    return table


def _figures(row: CandidateRow, terms: Sequence[str]) -> list[str]:
    counts = (row.device_overlap_blocks, row.host_overlap_blocks, row.disk_overlap_blocks, row.active_prefill_tokens,
              row.active_blocks, row.requests)  # fmt: skip
    return [*(f"{count:,}" for count in counts), *(number(row.terms.get(name)) for name in terms), number(row.cost)]


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


def explain_from_journal(request_id: str, directory: str, as_json: bool) -> int:
    """Print why a request went where it went, as recorded below a directory; return 1 when nothing is."""
    attempts: list[DecisionExplanation] = []
    # These bring the router's core and numpy, which asking a router does not need.
    from poolgrid.server.cli.journal_directory import journal_errors, open_decisions, progress_bar, survey_bytes
    from poolgrid.server.router.decision_journal.reader import decisions_about

    with journal_errors():
        for router, disk in open_decisions(directory):
            with progress_bar(f"reading {router}", survey_bytes(disk)) as on_progress:
                found = decisions_about(disk, request_id, on_progress)
            for each in found:
                noted = each.settings
                recorded = RecordedBy(
                    router=router,
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
        print_json(answer.to_json())
    else:
        terminal().print(tree(answer))
    return 0


def run_explain(request_id: str, url: str, as_json: bool) -> int:
    """Print why a request went where it went; return 1 when the router keeps nothing of it or does not answer."""
    path = f"/v1/decisions/{quote(request_id, safe='')}"
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=api_key_headers()) as client:
            found = client.get(f"{url.rstrip('/')}{path}")
            if found.status_code != 200:
                sys.stderr.write(f"explaining {request_id!r}: {refusal(found.status_code, found.content)}\n")
                return 1
            answer = _explanation(found.content)
            told = _ask_pools(client, url, answer) if isinstance(answer, PlacedExplanation) else {}
        of_pools = {name: msgspec.json.decode(each.content, type=RequestExplanation) for name, each in told.items()}
    except httpx.HTTPError as error:
        why = error or type(error).__name__
        sys.stderr.write(f"explaining {request_id!r}: {without_credentials(url)} does not answer: {why}\n")
        return 1
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        shown = without_credentials(url)
        sys.stderr.write(f"explaining {request_id!r}: the answer of {shown} is not a router's: {error}\n")
        return 1
    if as_json:
        # As it came: what this version does not know of is in it too.
        whole = found.json()
        pools: dict[str, dict[str, Any]] = {}
        for placement in answer.placements if isinstance(answer, PlacedExplanation) else ():
            if placement.dispatch_id in told:
                of_pool = pools.setdefault(placement.pool, {"request_id": answer.request_id, "attempts": []})
                of_pool["attempts"] += told[placement.dispatch_id].json()["attempts"]
        print_json({**whole, "pools": pools} if pools else whole)
    else:
        terminal().print(tree(answer, of_pools))
    return 0


def _explanation(body: bytes) -> RequestExplanation | PlacedExplanation:
    """Return the answer of a router or of a global router; only the latter knows of placements."""
    if "placements" in msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
        return msgspec.json.decode(body, type=PlacedExplanation)
    return msgspec.json.decode(body, type=RequestExplanation)


def _ask_pools(client: httpx.Client, url: str, answer: PlacedExplanation) -> dict[str, httpx.Response]:
    """Return what the pools' own routers keep of each dispatch, by its id; a pool that is away is left out."""
    pools = msgspec.json.decode(client.get(f"{url.rstrip('/')}/v1/pools").content, type=PoolList)
    urls = {row.name: row.url for row in pools.data}
    kept: dict[str, httpx.Response] = {}
    for placement in answer.placements:
        try:
            found = client.get(f"{urls[placement.pool]}/v1/decisions/{quote(placement.dispatch_id, safe='')}")
        except (httpx.HTTPError, KeyError):
            continue
        if found.status_code == 200:
            kept[placement.dispatch_id] = found
    return kept


@command(epilog=KEY_NOTE)
@click.argument(
    "request_id", help="The x-request-id or the id of an answer, with or without its index, or what `top` shows."
)
@router_url("Router or global router that served it.")
@click.option(
    "--journal",
    help="Read recorded decisions instead of asking a router, those of a data_dir.",
)
@as_json
def explain(request_id: str, url: str, journal: str | None, as_json: bool) -> None:
    """Explain why a request went where it went: every candidate, every cost term, which workers were passed over and
    why."""
    if journal is not None:
        raise SystemExit(explain_from_journal(request_id, journal, as_json))
    raise SystemExit(run_explain(request_id, found_url(url), as_json))
