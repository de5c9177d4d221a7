"""`poolgrid up --engine-url URL`: a pool in front of engine servers that run already.

Rules
    1. Each server is asked what it is. They must serve one model with one block size; their kinds may differ.
    2. The router tokenizes, so it needs the model's tokenizer: from ``--model-path``, or from the directory that a
       server loaded, where that is on this machine too.
    3. Where no server's cache events can be followed, the router goes by its own choices (the policy ``approximate``),
       unless another policy was asked for. Where only some cannot be followed, it does so for them as soon as it sees
       that they reuse what no event announced.
    4. The servers are not our children: they are neither started nor ended here.
    5. One process has the workers of all servers of a kind, unless roles have options of their own; the consolidator is
       in the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poolgrid.cli.launch_plan import INGEST, PlannedWorker
from poolgrid.cli.local_pool import REAL_START_TIMEOUT_S, UpSettings
from poolgrid.process.clock import SystemClock
from poolgrid.process.figures import counted
from poolgrid.wire.errors import DecodeError
from poolgrid.workers.engines.registry import server_kinds
from poolgrid.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.workers.engines.server.kinds import learn
from poolgrid.workers.engines.server.server_client import KeyRefused, ServerClient, ServerError

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
"""Time between two questions to a server that does not answer yet."""

APPROXIMATE = "approximate"


class FrontProblem(ValueError):
    """The servers cannot be one pool, or do not answer."""


@dataclass(frozen=True, slots=True)
class FrontServer:
    """One server, and what its worker does."""

    url: str
    role: str
    facts: ServerFacts


@dataclass(frozen=True, slots=True)
class FrontPlan:
    """A pool in front of servers, as it will be started."""

    settings: UpSettings
    workers: list[PlannedWorker]
    what: str
    """What serves, for people."""
    notes: tuple[str, ...]
    """What people should know of it."""


def plan_front(settings: UpSettings) -> FrontPlan:
    """Ask the servers, and return what to start; raises ``FrontProblem``."""
    servers = asyncio.run(ask_all(settings))
    return make_plan(settings, servers)


async def ask_all(settings: UpSettings) -> list[FrontServer]:
    """Return the facts of every server, in the order in which they were given."""
    wanted = [(url, role) for role, urls in settings.backends().items() for url in urls]
    timeout_s = settings.start_timeout_s(REAL_START_TIMEOUT_S)
    facts = await asyncio.gather(*(_ask(url, settings, timeout_s) for url, _ in wanted))
    return [FrontServer(url, role, each) for (url, role), each in zip(wanted, facts, strict=True)]


async def _ask(url: str, settings: UpSettings, timeout_s: float) -> ServerFacts:
    said = ""
    try:
        client = ServerClient(url, SystemClock(), settings.engine_api_key)
    except ValueError as error:
        raise FrontProblem(f"engine_url: {error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await learn(client, server_kinds(), "", settings.served_model_name)
                except KeyRefused as error:
                    raise FrontProblem(f"engine_url {url}: {error}") from None
                except (ServerError, DecodeError) as error:
                    if str(error) != said:
                        said = str(error)
                        log.warning("waiting for an engine server: %s", said)
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise FrontProblem(f"engine_url {url}: no answer within {timeout_s:.0f} s (start_timeout_ms): {said}") from None
    except ValueError as error:
        raise FrontProblem(f"engine_url {url}: {error}") from None
    finally:
        client.close()


def make_plan(settings: UpSettings, servers: Sequence[FrontServer]) -> FrontPlan:
    """Return what to start in front of servers; raises ``FrontProblem`` where they cannot be one pool. Pure."""
    model = _the_same("model", {each.url: each.facts.model for each in servers}, "give served_model_name")
    own = _option(settings.options_of("worker"), "kv-block-size")
    sizes = {each.url: own or each.facts.block_size for each in servers}
    unknown = [url for url, size in sizes.items() if size is None]
    if unknown:
        raise FrontProblem(
            f"engine_url {unknown[0]}: the server does not report its block size: give --part-option "
            "worker.kv-block-size=N"
        )
    block_size = _the_same(
        "block size", sizes, f"a router's index has one: start them with the same, {_sizing(servers)}"
    )
    has_endpoints = _option(settings.options_of("worker"), "kv-events-endpoint") is not None
    notes = [
        f"{each.url}: cache events are not followed: {each.facts.events_missing}"
        for each in servers
        if each.facts.events_missing and not has_endpoints
    ]
    changes: dict[str, object] = {
        "model_path": _tokenizer(settings, servers),
        "served_model_name": model,
        "kv_block_size": int(block_size),
    }
    if len(notes) == len(servers) and "policy" not in settings.model_fields_set:
        changes["policy"] = APPROXIMATE
        notes.append(f"no server publishes its cache events: workers are chosen by what they were sent ({APPROXIMATE})")
    workers = plan_workers(settings, servers, model)
    counts = Counter(each.facts.kind for each in servers)
    what = " and ".join(counted(count, f"{kind} server") for kind, count in counts.items())
    return FrontPlan(settings.model_copy(update=changes), workers, what, tuple(notes))


def plan_workers(settings: UpSettings, servers: Sequence[FrontServer], model: str) -> list[PlannedWorker]:
    """Return the processes in front of servers; their API key is in the environment."""
    options_of = {role: tuple(settings.options_of("worker", role)) for role in {each.role for each in servers}}
    groups: dict[tuple[str, tuple[str, ...]], list[FrontServer]] = {}
    for each in servers:
        groups.setdefault((each.facts.kind, options_of[each.role]), []).append(each)
    kinds = Counter(kind for kind, _ in groups)
    planned = []
    for (kind, options), group in groups.items():
        name = kind if kinds[kind] == 1 else f"{kind}-{group[0].role}"
        urls = [each.url if each.role == "aggregated" else f"{each.role}={each.url}" for each in group]
        # A process with several workers numbers them itself.
        worker_id = name if len(group) > 1 else f"{name}-0"
        arguments = [
            *("worker", "--engine", kind, "--worker-id", worker_id),
            *(word for url in urls for word in ("--engine-url", url)),
            *("--served-model-name", model, "--host", settings.host),
            *("--consolidator", INGEST, *settings.log_choice.arguments, *options),
        ]
        planned.append(PlannedWorker(worker_id, tuple(arguments), count=len(group)))
    return planned


def _option(options: Sequence[str], name: str) -> str | None:
    for option in options:
        key, _, value = option.removeprefix("--").partition("=")
        if key.replace("_", "-") == name:
            return value
    return None


def _the_same(what: str, said: Mapping[str, object], advice: str) -> str:
    values = {str(value) for value in said.values()}
    if len(values) > 1:
        listed = "; ".join(f"{url}: {value}" for url, value in said.items())
        raise FrontProblem(f"engine_url: the servers differ in their {what} ({listed}); {advice}")
    return values.pop()


def _sizing(servers: Sequence[FrontServer]) -> str:
    kinds = server_kinds()
    there = dict.fromkeys(each.facts.kind for each in servers)
    return "; ".join(f"{kinds[name].title}: {kinds[name].block_size_option}" for name in there if name in kinds)


def _tokenizer(settings: UpSettings, servers: Sequence[FrontServer]) -> Path:
    if "model_path" in settings.model_fields_set:
        return settings.model_path
    for each in servers:
        path = Path(each.facts.model_path)
        if each.facts.model_path and (path / "tokenizer.json").is_file():
            return path
    loaded = ", ".join(sorted({each.facts.model_path or "nothing that they name" for each in servers}))
    raise FrontProblem(
        f"engine_url: the router needs the model's tokenizer, and the servers loaded {loaded}, which "
        "is no directory of this machine: give --model-path, a directory with config.json, tokenizer.json and "
        "tokenizer_config.json"
    )
