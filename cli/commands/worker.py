"""`poolgrid worker`: one worker, with any engine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from poolgrid.cli.help_page import CommandLine, HelpedCommand
from poolgrid.cli.log_options import LogChoice, LogFormat, LogLevel
from poolgrid.cli.options import with_chosen_settings
from poolgrid.cli.service_process import run_service, say_ready
from poolgrid.workers.engines.registry import ENGINES, EngineChoice, engine_definition
from poolgrid.workers.settings import WorkerProcessSettings

app = CommandLine()

OF_ROUTERS = {
    "--reasoning-parser": "--reasoning-parser",
    "--tool-call-parser": "--tool-call-parser",
    "--custom-jinja-template": "--chat-template",
    "--allowed-local-media-path": "--allowed-local-media-path",
    "--max-file-size-mb": "--max-file-size-mb",
}
"""Options that workers of other systems have, each with the option of our routers that does it."""


class WorkerCommand(HelpedCommand):
    """The command, which says where options are that others look for here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse options of routers by the name that they have there; read the others."""
        for word in args:
            name = word.partition("=")[0]
            if name in OF_ROUTERS:
                typer.echo(
                    f"{name}: a worker takes and gives token ids; templates, media and parsers are the routers': "
                    f"give {OF_ROUTERS[name]} to poolgrid router",
                    err=True,
                )
                raise typer.Exit(2)
        return super().parse_args(ctx, args)


@app.command(cls=WorkerCommand)
@with_chosen_settings(EngineChoice, {name: engine_definition(name).settings for name in ENGINES})
def worker(
    settings: WorkerProcessSettings,
    print_engine_args: Annotated[
        bool,
        typer.Option(
            "--print-engine-args",
            help="Print what the engine would be started with, and where each value came from; start nothing.",
        ),
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = None,
) -> None:
    """Run one worker, with the simulated engine or with TensorRT-LLM (--engine trtllm)."""
    from poolgrid.workers.bootstrap import serve

    if print_engine_args:
        raise typer.Exit(show_engine_arguments(settings))

    async def main(stop: asyncio.Event) -> None:
        await serve(settings, stop, say_ready)

    run_service(settings.worker_id, LogChoice(log_level, log_format), main, worker=settings.worker_id)


def show_engine_arguments(settings: WorkerProcessSettings) -> int:
    """Print the arguments that a worker's engine would be started with; return the exit status."""
    definition = engine_definition(settings.engine_name)
    if definition.start_plan is None:
        have = [name for name in ENGINES if engine_definition(name).start_plan is not None]
        typer.echo(
            f"--print-engine-args: {definition.title} has no such arguments, give --engine {' or '.join(have)}",
            err=True,
        )
        return 2
    try:
        plan = definition.start_plan(settings)
    except ValueError as error:
        typer.echo(str(error), err=True)
        return 1
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(plan.text, nl=False)
    return 0
