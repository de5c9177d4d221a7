"""`poolgrid doctor`: why workers reuse more or less than the router promised.

Exit status: 0 no fault, 1 a fault, 2 nothing could be examined.
"""

from __future__ import annotations

import sys

import click
import httpx
import msgspec

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.answers import DoctorAnswer, ModelFinding, PoolList, VerdictRow
from poolgrid.server.cli.command_line import as_json, command, print_json, router_url
from poolgrid.server.cli.doctor_view import view
from poolgrid.server.cli.router_client import KEY_NOTE, api_key_headers, found_url, refusal
from poolgrid.server.process.terminal_table import terminal

TIMEOUT_S = 10.0
"""Longest wait for one answer; routers answer from memory."""

PATH = "/v1/doctor"


class Unexamined(Exception):
    """Nothing could be examined; the message has the question and the answer."""


def show(answer: DoctorAnswer, as_json: bool) -> int:
    """Print verdicts; return the exit status."""
    if as_json:
        print_json(answer.to_json())
    else:
        terminal().print(view(answer.data, answer.uncached_tokens, answer.models))
    return int(any(row.is_fault for row in answer.data) or any(each.is_fault for each in answer.models))


def ask(client: httpx.Client, url: str) -> DoctorAnswer | None:
    """Return the verdicts of a router, or of all pools of a global router; ``None`` where none of them answers.

    Raises ``Unexamined``.
    """
    found = client.get(f"{url}{PATH}")
    if found.status_code == 200:
        return msgspec.json.decode(found.content, type=DoctorAnswer)
    if found.status_code != 404:
        raise Unexamined(refusal(found.status_code, found.content))
    pools = client.get(f"{url}/v1/pools")
    if pools.status_code != 200:
        return None
    rows: list[VerdictRow] = []
    models: list[ModelFinding] = []
    uncached: dict[str, int] = {}
    for pool in msgspec.json.decode(pools.content, type=PoolList).data:
        of_pool = client.get(f"{pool.url}{PATH}")
        if of_pool.status_code != 200:
            raise Unexamined(f"pool {pool.name}: {refusal(of_pool.status_code, of_pool.content)}")
        answer = msgspec.json.decode(of_pool.content, type=DoctorAnswer)
        rows += [msgspec.structs.replace(row, worker=f"{pool.name}/{row.worker}") for row in answer.data]
        models += [msgspec.structs.replace(each, model=f"{pool.name}/{each.model}") for each in answer.models]
        for cause, tokens in answer.uncached_tokens.items():
            uncached[cause] = uncached.get(cause, 0) + tokens
    return DoctorAnswer(data=rows, uncached_tokens=uncached, models=models)


def examine_url(url: str, as_json: bool) -> int:
    """Examine a router, or check an engine server that is not behind one yet."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=api_key_headers()) as client:
            answer = ask(client, url)
    except (httpx.HTTPError, Unexamined) as error:
        sys.stderr.write(f"examining {without_credentials(url)}: {error or type(error).__name__}\n")
        return 2
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        sys.stderr.write(f"examining {without_credentials(url)}: the answer is not a router's: {error}\n")
        return 2
    if answer is not None:
        return show(answer, as_json)
    # Before going live there is no router yet. The check may not be installed, so it is found by name.
    from poolgrid.server.cli.main import app

    app.main(["engine-check", "--url", url, *(["--json"] if as_json else [])], prog_name="poolgrid")
    return 2


def examine_journal(directory: str, as_json: bool) -> int:
    """Examine what the routers recorded below a directory: the same rules over a replay."""
    # These bring the router's core and numpy, which asking a router does not need.
    from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX
    from poolgrid.server.cli.journal_directory import (
        UsageError,
        journal_errors,
        open_decisions,
        open_journal,
        progress_bar,
        survey_bytes,
    )
    from poolgrid.server.router.decision_journal.opening import policy_of
    from poolgrid.server.router.decision_journal.replay import DecisionReplay
    from poolgrid.server.router.decision_journal.traffic import RecordedExamination
    from poolgrid.server.router.http_api import verdict_row
    from poolgrid.server.router.policy_loading import PolicyError

    rows: list[VerdictRow] = []
    uncached: dict[str, int] = {}
    with journal_errors("examining a journal"):
        pool = open_journal(directory)
        found = open_decisions(directory)
        for router, disk in found:
            examination = RecordedExamination()
            with progress_bar(f"examining {router}", survey_bytes(disk)) as on_progress:
                try:
                    DecisionReplay(pool, disk, policy_of, BLOCKS_PER_WORKER_MAX, examination).run(on_progress)
                except PolicyError as error:
                    raise UsageError(f"replaying {router}: {error}") from None
            prefix = f"{router}: " if len(found) > 1 else ""
            verdicts = [] if examination.examiner is None else examination.examiner.verdicts()
            rows += [msgspec.structs.replace(verdict_row(each), worker=f"{prefix}{each.worker}") for each in verdicts]
            for cause, tokens in examination.uncached_tokens.items():
                uncached[cause] = uncached.get(cause, 0) + tokens
    if not rows:
        sys.stderr.write(f"examining {directory}: no decision of any router can be replayed from it\n")
        return 2
    return show(DoctorAnswer(data=rows, uncached_tokens=uncached), as_json)


@command(epilog=KEY_NOTE)
@router_url("Router or global router to examine, or an engine server to check before going live.")
@click.option("--journal", help="Examine recorded decisions instead of a router, those of a data_dir.")
@as_json
def doctor(url: str, journal: str | None, as_json: bool) -> None:
    """Find out why workers reuse more or less of their caches than the router promised."""
    raise SystemExit(examine_url(found_url(url), as_json) if journal is None else examine_journal(journal, as_json))
