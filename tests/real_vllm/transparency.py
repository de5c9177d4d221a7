"""The answers of a real vLLM server through a router, compared with the server's own."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.e2e.processes import Process
from tests.real_vllm.answers import ALLOWED_CASES, Answer, Difference, compare
from tests.real_vllm.embeddings import POOLING
from tests.real_vllm.servers import START_TIMEOUT_S, VllmServer
from tests.real_vllm.surface import Case, by_endpoint, cases

GENERATING = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--enable-scale-out", "--enable-server-load-tracking"),
)
STORING = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
ANSWER_TIMEOUT_S = 120
TABLE_WIDTH = 200
TRIES = 8
"""Of a case whose stream differs only in how its tokens are cut into events: vLLM cuts them by time."""
POOLING_PATHS = ("/v1/embeddings", "/v2/", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/classify")
EVERY_SERVER = ("/v1/models", "/tokenize", "/detokenize", "/v1/nothing", "/v1/chat/completions/render")


class Unequal(Exception):
    """Answers through the router are not the server's own."""


@dataclass(slots=True)
class Compared:
    """What became of one case.

    ``unsteady`` when the server's answers differ from each other, ``recut`` when they do in their cuts into events, and
    the router's in nothing else.
    """

    case: Case
    differences: list[Difference] = field(default_factory=list)
    tries: int = 1
    unsteady: bool = False
    recut: bool = False
    status: int = 0


def send(url: str, case: Case) -> Answer:
    """Send a case, and what it follows before it; a connection that breaks is an answer with status 0."""
    given = case.headers.get("X-Request-Id", "")
    path, body = case.path, case.body
    if case.follows is not None:
        first = send(url, case.follows)
        try:
            made = str(json.loads(first.body)["id"])
        except (ValueError, KeyError):
            return Answer(0, (), b"no id in: " + first.body)
        path, body = path.replace("{id}", made), body.replace(b"{id}", made.encode())
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_TIMEOUT_S)
    try:
        if case.chunked:
            pieces = iter([body[:7], body[7:]])
            connection.request(case.method, path, pieces, case.headers, encode_chunked=True)
        else:
            connection.request(case.method, path, body or None, case.headers)
        answer = connection.getresponse()
        headers = tuple(answer.getheaders())
        try:
            return Answer(answer.status, headers, answer.read(), given)
        except http.client.IncompleteRead as broken:
            return Answer(answer.status, headers, broken.partial + b"(the connection broke)", given)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, (), f"{type(error).__name__}: {error}".encode(), given)
    finally:
        connection.close()


def compared(server: str, router: str, case: Case) -> Compared:
    """Compare one case. It is sent once before, so that what the cache holds is the same for both."""
    send(server, case)
    own, passed = [send(server, case)], [send(router, case)]
    found = Compared(case, compare(own[0], passed[0]), status=own[0].status)
    while found.differences:
        own.append(send(server, case))
        if any(not each.timing for each in compare(own[0], own[-1])):
            found.unsteady = True
            break
        if any(not each.timing for each in found.differences) or found.tries == TRIES:
            break
        passed.append(send(router, case))
        found.tries += 1
        pairs = [compare(one, other) for one in own for other in passed]
        found.differences = min(pairs, key=len)
    timing = bool(found.differences) and all(each.timing for each in found.differences)
    if timing and any(compare(own[0], each) for each in own[1:]):
        found.differences, found.recut = [], True
    return found


def compare_all(server: str, router: str, chosen: Sequence[Case], console: Console) -> list[Compared]:
    """Compare all; print a table of the differences, equal ones once with the number of their cases."""
    found = [compared(server, router, case) for case in chosen]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in (each for each in found if not _is_allowed(each.case)):
        for difference in each.differences:
            where = difference.where + (" (timing)" if difference.timing else "")
            where = f"{where}; the server differs from itself" if each.unsteady else where
            names = rows.setdefault((where, difference.server, difference.router), [])
            names.append(f"{each.case.endpoint}: {each.case.name}")
    if rows:
        table = Table("case", "where", "server", "router", title=f"answers of {server} that differ through {router}")
        for row, names in rows.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            table.add_row(*(Text(cell) for cell in (names[0] + more, *row)))
        Console(file=console.file, width=TABLE_WIDTH).print(table)
    return found


def _is_allowed(case: Case) -> bool:
    return any(re.fullmatch(pattern, f"{case.endpoint}: {case.name}") for pattern, _ in ALLOWED_CASES)


def summary(found: Sequence[Compared]) -> dict[str, Any]:
    """Return the counts; raise ``Unequal`` if a case differs."""
    statuses: dict[int, int] = {}
    for each in found:
        statuses[each.status] = statuses.get(each.status, 0) + 1
    different = [each.case for each in found if each.differences and not _is_allowed(each.case)]
    counts: dict[str, Any] = {
        "requests": len(found),
        "by status": dict(sorted(statuses.items())),
        "by endpoint": by_endpoint([each.case for each in found]),
        "equal after several tries": sum(each.tries > 1 for each in found if not each.differences and not each.recut),
        "equal but for cuts into events, in which the server differs from itself": sum(each.recut for each in found),
        "of the router's own": sum(bool(each.differences) and _is_allowed(each.case) for each in found),
        "different": len(different),
    }
    if different:
        raise Unequal(f"{len(different)} of {len(found)}: {counts} different by endpoint: {by_endpoint(different)}")
    return counts


def of_server(url: str, chosen: Sequence[Case]) -> list[Case]:
    """Leave out the cases of a server of the other kind: generating, pooling."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_TIMEOUT_S)
    connection.request("GET", "/openapi.json")
    paths = json.loads(connection.getresponse().read())["paths"]
    connection.close()
    if "/v1/chat/completions" in paths:
        return list(chosen)
    return [case for case in chosen if case.path.startswith((*POOLING_PATHS, *EVERY_SERVER))]


def transparency_of(server: str, router: str, console: Console, only: str = "") -> dict[str, Any]:
    """what comes through the router that runs is what the server that runs answers itself"""
    return summary(compare_all(server, router, _chosen(server, only), console))


def _chosen(server: str, only: str) -> list[Case]:
    return [case for case in of_server(server, list(cases())) if only in f"{case.endpoint}: {case.name}"]


@contextmanager
def in_front_of(server: VllmServer) -> Iterator[str]:
    """Start a server, and poolgrid in front of it as its users do."""
    server.start()
    try:
        server.wait()
        with Process("up", "--engine-url", server.url, "--port", "0") as pool:
            yield pool.wait_ready(START_TIMEOUT_S).url
    finally:
        server.kill()


def transparency(vllm: Path, model: Path, directory: Path, console: Console, only: str = "") -> dict[str, Any]:
    """what comes through ``poolgrid up --engine-url`` is what the server answers itself: generating, pooling"""
    found: list[Compared] = []
    for number, arguments, variables in ((60, GENERATING, STORING), (61, POOLING, {})):
        server = VllmServer(number, vllm, model, directory, arguments, variables)
        with in_front_of(server) as router:
            found += compare_all(server.url, router, _chosen(server.url, only), console)
    return summary(found)
