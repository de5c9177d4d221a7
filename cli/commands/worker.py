"""`poolgrid worker`: one worker, with either engine."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from poolgrid.cli.options import with_chosen_settings
from poolgrid.cli.service_process import LogLevel, run_service, say_ready
from poolgrid.workers.settings import EngineChoice, TrtllmWorkerSettings, WorkerSettings

app = typer.Typer(add_completion=False)


@app.command()
@with_chosen_settings(EngineChoice, {"simulated": WorkerSettings, "trtllm": TrtllmWorkerSettings})
def worker(
    settings: WorkerSettings | TrtllmWorkerSettings,
    print_engine_args: Annotated[
        bool,
        typer.Option(
            "--print-engine-args",
            help="Print what TensorRT-LLM would be started with, and where each value came from; start nothing.",
        ),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Run one worker, with the simulated engine or with TensorRT-LLM (--engine trtllm)."""
    from poolgrid.workers.bootstrap import serve

    if print_engine_args:
        raise typer.Exit(show_engine_arguments(settings))

    async def main(stop: asyncio.Event) -> None:
        await serve(settings, stop, say_ready)

    run_service(settings.worker_id, log_level, main)


def show_engine_arguments(settings: WorkerSettings | TrtllmWorkerSettings) -> int:
    """Print the arguments that a worker's engine would be started with; return the exit status."""
    from poolgrid.workers.trtllm.engine_arguments import render, resolve_files

    if not isinstance(settings, TrtllmWorkerSettings):
        typer.echo("--print-engine-args: the simulated engine has no such arguments, give --engine trtllm", err=True)
        return 2
    try:
        arguments = resolve_files(settings)
    except ValueError as error:
        typer.echo(str(error), err=True)
        return 1
    for warning in arguments.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(render(arguments), nl=False)
    return 0
