"""`poolgrid up --engine-url URL`: a pool in front of engine servers that run already, or that come later.

Rules
    1. A router and one process with the consolidator and what follows the servers. Prompt and output apart
       (``prefill=URL``) are still carried by workers, which have a process of their own.
    2. Each server is asked what it is. Those that answer within ``ANSWER_WAIT_S`` must serve one model with one block
       size; their kinds may differ. The others join when they answer.
    3. The router tokenizes with the model's tokenizer: from ``--model-path``, from the directory that a server loaded,
       or from a cache of this machine that has the model by its hub's name. Without one it goes by text.
    4. Where no server's cache events can be followed, the router goes by its own choices (the policy ``approximate``),
       unless another policy was asked for. Where only some cannot be followed, it does so for them as soon as it sees
       that they reuse what no event announced.
    5. Where no server had answered, the router is started again once by what the first one reports.
    6. The servers are not our children: they are neither started nor ended here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.server.cli.launch_plan import INGEST, PlannedWorker
from poolgrid.server.cli.local_pool import UpSettings
from poolgrid.server.frontend.settings import NO_TOKENIZER
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.figures import counted
from poolgrid.server.workers.engines.registry import server_kinds
from poolgrid.server.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.server.workers.engines.server.core.server_list import ServerEntry, read_entry, read_file
from poolgrid.server.workers.engines.server.kinds import learn
from poolgrid.server.workers.engines.server.server_client import KeyRefused, ServerClient, ServerError
from poolgrid.server.workers.model_hub import cached

log = logging.getLogger(__name__)

ANSWER_WAIT_S = 3.0
"""How long the start waits for answers: servers that run answer within milliseconds, under load within a second."""

ASK_AGAIN_S = 0.5
"""Time between two questions to a server that does not answer yet."""

APPROXIMATE = "approximate"

WORKER = "server"
"""Name of the engine that follows servers of any kind."""


class FrontProblem(ValueError):
    """The servers cannot be one pool."""


@dataclass(frozen=True, slots=True)
class FrontServer:
    """One server that has answered."""

    url: str
    facts: ServerFacts


@dataclass(frozen=True, slots=True)
class FrontPlan:
    """A pool in front of servers, as it will be started."""

    settings: UpSettings
    arguments: list[str]
    """What the consolidator follows servers by; empty where ``workers`` do."""
    workers: list[PlannedWorker]
    what: str
    """What serves, for people."""
    answered: int
    note: str
    """What people should know of it, in a line; empty = nothing."""


def plan_front(settings: UpSettings) -> FrontPlan:
    """Ask the servers, and return what to start; raises ``FrontProblem``."""
    faults: dict[str, str] = {}
    found = asyncio.run(ask_all(settings, faults))
    for url, fault in faults.items():
        log.warning("--engine-url %s does not answer as an engine server; it joins when it does: %s", url, fault)
    return make_plan(settings, found)


async def settings_later(settings: UpSettings, plan: FrontPlan) -> UpSettings | None:
    """Wait for the first server that answers, and return the settings by what it reports; ``None`` where the plan was
    made by one, or there is none that can be asked here."""
    entries = entries_of(settings)
    if plan.answered or not entries:
        return None
    trouble = ""
    while True:
        try:
            found = await ask_all(settings)
            later = make_plan(settings, found) if found else None
        except FrontProblem as problem:  # which an operator can put right at the servers
            later = None
            if str(problem) != trouble:
                trouble = str(problem)
                log.error("what servers report cannot be used, the router stays as it is: %s", trouble)
        if later is not None:
            if later.note:
                log.warning("%s", later.note)
            return later.settings
        await asyncio.sleep(ASK_AGAIN_S)


def entries_of(settings: UpSettings) -> list[ServerEntry]:
    """Return the single servers that are named now; a file that cannot be read has none."""
    given = [read_entry(url) for urls in settings.backends().values() for url in urls]
    found = [each for each in given if isinstance(each, ServerEntry)]
    if settings.engine_urls_file is not None:
        try:
            found += read_file(settings.engine_urls_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            log.warning("engine_urls_file is %s, which cannot be read now: %s", settings.engine_urls_file, error)
    return found


async def ask_all(settings: UpSettings, faults: dict[str, str] | None = None) -> list[FrontServer]:
    """Return the facts of every server that answers soon, in the order in which they were given; ``faults`` gets why
    the others do not, by URL."""
    entries = entries_of(settings)
    answers = await asyncio.gather(*(_ask(each.url, settings) for each in entries))
    by_url = {entry.url: answer for entry, answer in zip(entries, answers, strict=True)}
    if faults is not None:
        faults |= {url: answer for url, answer in by_url.items() if isinstance(answer, str)}
    return [FrontServer(url, answer) for url, answer in by_url.items() if not isinstance(answer, str)]


async def _ask(url: str, settings: UpSettings) -> ServerFacts | str:
    """Return what a server reports, or why there is nothing in time; raises ``FrontProblem``."""
    client = ServerClient(url, SystemClock(), settings.engine_api_key)
    fault = f"no answer within {ANSWER_WAIT_S:g} s"
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            while True:
                try:
                    return await learn(client, server_kinds(), "", settings.served_model_name)
                except KeyRefused as error:
                    raise FrontProblem(f"engine_url {url}: {error}") from None
                except (ServerError, DecodeError) as error:
                    fault = str(error)
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        return fault
    except ValueError as error:
        raise FrontProblem(f"engine_url {url}: {error}") from None
    finally:
        client.close()


def make_plan(settings: UpSettings, servers: Sequence[FrontServer]) -> FrontPlan:
    """Return what to start in front of servers; raises ``FrontProblem`` where they cannot be one pool."""
    options = settings.options_of("worker")
    changes: dict[str, object] = {"model_path": _tokenizer(settings, servers)}
    if servers:
        changes["served_model_name"] = _the_same(
            "model", {each.url: each.facts.model for each in servers}, "give served_model_name"
        )
        _check_block_sizes(servers, _option(options, "kv-block-size"))
    has_endpoints = _option(options, "kv-events-endpoint") is not None
    silent = [] if has_endpoints else [each for each in servers if each.facts.events_missing]
    if servers and len(silent) == len(servers) and "policy" not in settings.model_fields_set:
        changes["policy"] = APPROXIMATE
    # What carries tokens must not do so in the consolidator's process; on NATS any consolidator may be the active one.
    apart = any(urls for role, urls in settings.backends().items() if role != "aggregated") or settings.on_nats
    counts = Counter(server_kinds()[each.facts.kind].title for each in servers)
    what = " and ".join(counted(count, f"{title} server") for title, count in counts.items())
    return FrontPlan(
        settings.model_copy(update=changes),
        [] if apart else [*_named(settings), *_others(settings), *settings.options_of("worker")],
        plan_workers(settings) if apart else [],
        what or "engine servers that have not answered yet",
        len(servers),
        _note(silent, has_tokenizer=changes["model_path"] != NO_TOKENIZER) if servers else "",
    )


def plan_workers(settings: UpSettings) -> list[PlannedWorker]:
    """Return the processes that follow servers apart from the consolidator: one, or one for each role with options of
    its own. Their API key is in the environment."""
    of_all = tuple(settings.options_of("worker"))
    groups: dict[tuple[str, ...], list[str]] = {}
    for role, urls in settings.backends().items():
        options = (*of_all, *settings.options_of(role)) if role != "aggregated" else of_all
        groups.setdefault(options, []).extend(_words(role, urls))
    planned: list[PlannedWorker] = []
    for options, urls in groups.items():
        if not urls and (planned or settings.engine_urls_file is None):
            continue
        name = "servers" if not planned else f"servers-{len(planned)}"
        arguments = [
            *("worker", "--engine", WORKER, "--worker-id", name, "--host", settings.host, "--consolidator", INGEST),
            *(f"--engine-url={url}" for url in urls),
            *_others(settings, has_file=not planned),
            *settings.log_choice.arguments,
            *options,
        ]
        planned.append(PlannedWorker(name, tuple(arguments), count=len(urls)))
    return planned


def _named(settings: UpSettings) -> list[str]:
    """Return the options that name servers one by one, for any process that follows them."""
    return [f"--engine-url={word}" for role, urls in settings.backends().items() for word in _words(role, urls)]


def _others(settings: UpSettings, has_file: bool = True) -> list[str]:
    """Return the other options of such a process; only one process gets the file of servers."""
    arguments = []
    if settings.engine_urls_file is not None and has_file:
        arguments.append(f"--engine-urls-file={settings.engine_urls_file}")
    if settings.served_model_name:
        arguments.append(f"--served-model-name={settings.served_model_name}")
    return arguments


def _words(role: str, urls: Sequence[str]) -> list[str]:
    """Return entries as ``--engine-url`` takes them."""
    return [url if role == "aggregated" else f"{role}={url}" for url in urls]


def _note(silent: Sequence[FrontServer], has_tokenizer: bool) -> str:
    """Return in a line what choices go by, and what makes them exact; empty where they are."""
    if has_tokenizer and not silent:
        return ""
    kinds = server_kinds()
    advice = []
    for name in dict.fromkeys(each.facts.kind for each in silent):
        kind = kinds[name]
        if kind.owned_by:
            advice.append(f"start {kind.title} with {kind.events_option} {kind.reuse_option}".rstrip())
    if not has_tokenizer:
        advice.append("give --model-path DIR (with tokenizer.json), or --model-path ORG/MODEL to fetch it")
    by = "what they were sent before" if has_tokenizer else "the text of prompts"
    said = f"servers are chosen by {by}"
    return f"{said}; to choose by what their caches hold: {'; '.join(advice)}" if advice else said


def _option(options: Sequence[str], name: str) -> str | None:
    for option in options:
        key, _, value = option.removeprefix("--").partition("=")
        if key.replace("_", "-") == name:
            return value
    return None


def _check_block_sizes(servers: Sequence[FrontServer], own: str | None) -> None:
    sizes = {each.url: size for each in servers if (size := own or each.facts.block_size) is not None}
    if sizes:
        _the_same("block size", sizes, f"a router's index has one: start them with the same, {_sizing(servers)}")


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
    for loaded in dict.fromkeys(each.facts.model_path for each in servers if each.facts.model_path):
        path = Path(loaded)
        if (path / "tokenizer.json").is_file():
            return path
        found = cached(loaded)
        if found is not None:
            return found
    return NO_TOKENIZER
