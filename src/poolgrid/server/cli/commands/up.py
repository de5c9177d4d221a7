"""`poolgrid up`: a whole pool on this machine.

`poolgrid up`: a pool or a fleet on one machine, each part a process of its own, watched until the end.

``ready URL ingest=ADDRESS`` is printed once every part is ready. The status is 1 when a part did not start; a part
that dies later is started again, and ends nothing unless it has died too often in a row.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from poolgrid.server.cli.command_line import command, print_json
from poolgrid.server.cli.hub_model import with_directory
from poolgrid.server.cli.launch_plan import OptionProblem, PlannedPart, show, usable_on_this_machine
from poolgrid.server.cli.local_pool import LocalPool, ServersInFront, UpSettings, plan, plan_engines, planned_parts
from poolgrid.server.cli.options import read_settings, with_settings
from poolgrid.server.cli.part import PartFailed, part_environment
from poolgrid.server.cli.service_process import log_failure, say_ready, start_status
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import NO_TOKENIZER
from poolgrid.server.process import lifecycle
from poolgrid.server.process.plugins import check_policy_name
from poolgrid.server.process.tasks import unless
from poolgrid.server.workers.engines.registry import engine_definition, engines

if TYPE_CHECKING:
    from poolgrid.kernel.pool_grids.grid_document import GridDocument
    from poolgrid.server.cli.fleet import FrontFleet
    from poolgrid.server.cli.front import FrontPlan

log = logging.getLogger(__name__)


def run_up(settings: UpSettings, as_json: bool = False) -> int:
    """Run a pool until SIGINT or SIGTERM; return the exit status. ``as_json`` is of a dry run."""
    if as_json and not settings.dry_run:
        sys.stderr.write("--json needs --dry-run: a pool that runs is asked with poolgrid top --once --json\n")
        return 2
    try:
        settings.log_choice.configure("up")
        check_first(settings)
        settings = with_directory(settings, "served_model_name", weights=settings.real, dry_run=settings.dry_run)
        if settings.has_servers:
            return run_front(settings) if settings.pools is None else run_front_fleet(settings, settings.pools)
        if settings.engine not in engines():
            there = ", ".join(engines())
            raise OptionProblem(f"--engine is {settings.engine}, which is not installed; there are {there}")
        # A plan with a real engine needs no model: it may be on another machine.
        model = None if settings.dry_run and settings.real else PromptModel.load(settings.model_path, prompts=False)
        if settings.pools is not None:
            return run_fleet(settings, settings.pools, model, as_json)
        workers = plan(settings, model, usable_on_this_machine)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if settings.dry_run or model is None:
        return print_plan(planned_parts(settings, workers), as_json)
    for worker in workers:
        for warning in worker.warnings:
            log.warning("%s: %s", worker.name, warning)
    return _run(lambda directory: LocalPool(settings, settings.data_dir or directory, workers))


def check_first(settings: UpSettings) -> None:
    """Raise ``ValueError``, or end with status 2, for what a part would end with after seconds."""
    check_policy_name(settings.policy)
    if settings.api_keys is not None:
        try:
            key_file.read(settings.api_keys)
        except (OSError, ValueError) as error:
            raise ValueError(f"--api-keys {error}") from None
    if settings.settings_file is not None:
        from poolgrid.server.consolidator.settings import ConsolidatorSettings
        from poolgrid.server.frontend.settings import FrontendSettings
        from poolgrid.server.router.settings import RouterSettings

        of_router = RouterSettings.model_fields | FrontendSettings.model_fields | ConsolidatorSettings.model_fields
        read_settings(settings.settings_file, of_router)
    if settings.real and not settings.dry_run and settings.engine in engines():
        engine_definition(settings.engine).check_library()


def print_plan(planned: Sequence[PlannedPart], as_json: bool) -> int:
    """Print what would be started; return the exit status."""
    if as_json:
        print_json({"parts": planned})
    else:
        # Not for a pool that runs: what draws takes a while to import.
        from poolgrid.server.process.terminal_table import terminal

        show(planned, terminal())
    return 0


def run_front(settings: UpSettings) -> int:
    """Run a pool in front of servers that run already; return the exit status. Raises ``ValueError``."""
    from poolgrid.server.cli.front import plan_front

    plan = plan_front(settings)
    _check_front(plan)
    return _run(lambda directory: _pool_in_front(settings, plan, settings.data_dir or directory))


def _check_front(plan: FrontPlan) -> None:
    """Warn of what a plan lacks; raises ``ValueError`` for a tokenizer that cannot be used."""
    if plan.settings.model_path != NO_TOKENIZER:
        PromptModel.load(plan.settings.model_path, prompts=False)
    if plan.note:
        log.warning("%s", plan.note)


def _pool_in_front(
    settings: UpSettings, plan: FrontPlan, data_dir: Path, environment: Mapping[str, str] | None = None
) -> LocalPool:
    from poolgrid.server.cli.front import settings_later

    servers = ServersInFront(plan.what, plan.arguments, plan.answered, partial(settings_later, settings, plan))
    return LocalPool(plan.settings, data_dir, plan.workers, servers, environment)


def run_front_fleet(settings: UpSettings, path: Path) -> int:
    """Run the fleet of a pool-grid document in front of servers that run already; return the exit status. Raises
    ``ValueError``."""
    from poolgrid.server.cli.fleet import KEYS_OF_CLIENTS, FrontFleet, pools_in_front
    from poolgrid.server.cli.front import plan_front

    own = pools_in_front(settings, _read_document(settings, path))
    plans = {name: plan_front(of_pool) for name, of_pool in own.items()}
    for each in plans.values():
        _check_front(each)
    planned = [each.settings for each in plans.values()]
    first = next((each for each in planned if each.model_path != NO_TOKENIZER), planned[0])
    changes = {"model_path": first.model_path, "served_model_name": first.served_model_name}
    of_global_router = settings.model_copy(update=changes)
    what = " and ".join(dict.fromkeys(each.what for each in plans.values()))

    def make(directory: Path) -> FrontFleet:
        environment = part_environment(without=KEYS_OF_CLIENTS)
        pools = {
            name: _pool_in_front(own[name], each, own[name].data_dir or directory / str(number), environment)
            for number, (name, each) in enumerate(plans.items())
        }
        return FrontFleet(of_global_router, path, pools, what)

    return _run(make)


def _read_document(settings: UpSettings, path: Path) -> GridDocument:
    """Return the document of a fleet; raises ``ValueError`` for one that cannot be started."""
    from poolgrid.kernel.pool_grids.grid_document import GridDocumentError
    from poolgrid.server.cli.fleet import nats_names
    from poolgrid.server.global_router.document_file import read_document_file

    try:
        document = read_document_file(path).document
    except GridDocumentError as error:
        raise ValueError(str(error)) from None
    if settings.on_nats:
        try:
            nats_names(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return document


def run_fleet(settings: UpSettings, path: Path, model: PromptModel | None, as_json: bool) -> int:
    """Run the fleet of a pool-grid document, or print its plan; return the exit status. Raises ``ValueError``."""
    from poolgrid.server.cli.fleet import LocalFleet, worker_roles

    document = _read_document(settings, path)
    workers = settings.groups(worker_roles(document)) if settings.real else ()
    planned = plan_engines(settings, workers, usable_on_this_machine) if workers else ()
    if settings.dry_run:
        return print_plan(LocalFleet(settings, path, document, model, planned).planned_parts(), as_json)
    return _run(lambda _: LocalFleet(settings, path, document, model, planned))


class Local(Protocol):
    """The processes on this machine, until they are stopped."""

    async def start(self) -> str:
        """Start every part; return the URL of the OpenAI API once it can serve."""
        ...

    def ingests(self) -> list[str]:
        """Return where further workers join, as words of the ready line."""
        ...

    def greeting(self, url: str) -> str: ...

    async def given_up(self) -> str:
        """Wait until a part is not started again any more; return why."""
        ...

    async def stop(self) -> None: ...


def _run(make: Callable[[Path], Local]) -> int:
    status = 0

    async def main(stop: asyncio.Event) -> None:
        nonlocal status
        with tempfile.TemporaryDirectory(prefix="poolgrid-") as temporary:
            pool = make(Path(temporary))
            try:
                await unless(stop, _start(pool), "start")
                lost = None if stop.is_set() else await unless(stop, pool.given_up(), "watch over all parts")
                if lost is not None:
                    log.error("%s: all parts are stopped", lost)
                    status = 1
            except (PartFailed, TimeoutError, OSError, ValueError) as error:
                # ValueError: keys of the ZMQ planes that cannot be used.
                log_failure(error if str(error) else TimeoutError("the workers did not join in time"))
                status = start_status(error)
            finally:
                await pool.stop()

    lifecycle.run(main)
    return status


async def _start(local: Local) -> None:
    url = await local.start()
    sys.stderr.write(local.greeting(url))
    sys.stderr.flush()
    say_ready(url, *local.ingests())


BASICS = (
    "engine",
    "engine_url",
    "model_path",
    "workers",
    "prefill",
    "decode",
    "pools",
    "port",
    "policy",
    "data_dir",
    "dry_run",
)


@command()
@with_settings(UpSettings, basics=BASICS)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the plan as JSON.")
def up(settings: UpSettings, as_json: bool) -> None:
    """Run a whole pool on this machine: a consolidator, a router and simulated workers, as separate processes."""
    raise SystemExit(run_up(settings, as_json))
