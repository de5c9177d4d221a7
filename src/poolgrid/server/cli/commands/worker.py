"""`poolgrid worker`: one worker, with any engine."""

from __future__ import annotations

from pathlib import Path

import click

from poolgrid.server.cli.command_line import Command, LogChoice, log_options
from poolgrid.server.cli.options import with_chosen_settings
from poolgrid.server.cli.service_process import Main, run_service, say_ready
from poolgrid.server.workers.engines.registry import DEFAULT, EngineChoice, engine_definition, engines
from poolgrid.server.workers.settings import WorkerProcessSettings

OF_SERVERS = "--"
"""What stands after it is for the engine's own server."""

SHIPPED_MODEL = "tiny"
"""Default model of a router."""


BASICS = (
    "worker_id",
    "consolidator",
    "host",
    "request_port",
    "engine_url",
    "model_path",
    "served_model_name",
    "role",
    "disaggregation_mode",
    "kv_block_size",
)
"""On the first page of the help, after ``--engine``."""


class WorkerCommand(Command):
    """The command, which hands the words after ``--`` to the engine's own server."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options up to ``--``, and what follows as arguments of a server."""
        at = args.index(OF_SERVERS) if OF_SERVERS in args else len(args)
        return super().parse_args(ctx, args[:at] + [f"--engine-argument={each}" for each in args[at + 1 :]])


@click.command(cls=WorkerCommand)
@with_chosen_settings(EngineChoice, {name: engine_definition(name).settings for name in engines()}, BASICS)
@click.option(
    "--print-engine-args",
    is_flag=True,
    help="Print what the engine would be started with, and where each value came from; start nothing.",
)
@log_options
def worker(
    settings: WorkerProcessSettings,
    print_engine_args: bool,
    log_choice: LogChoice,
) -> None:
    """Run one worker: with the simulated engine, with TensorRT-LLM, or with an engine's own server.

    Such a server runs already (--engine-url), or is started with the worker (--model-path DIR). What stands after
    -- then goes to the server:

    poolgrid worker --engine vllm --model-path DIR -- --max-model-len 8192
    """
    settings = with_shipped_tokenizer(settings)
    if print_engine_args:
        raise SystemExit(show_engine_arguments(settings))
    if settings.chat_template is not None:
        check_template(settings.chat_template)

    def prepare() -> Main:
        from poolgrid.server.workers.bootstrap import serve

        return lambda stop: serve(settings, stop, say_ready)

    run_service(settings.worker_id, log_choice, prepare, worker=settings.worker_id)


def with_shipped_tokenizer(settings: WorkerProcessSettings) -> WorkerProcessSettings:
    """Return settings with the tokenizer of the model that ships, where its name is given and nothing else."""
    if settings.engine_name != DEFAULT or getattr(settings, "served_model_name", "") != SHIPPED_MODEL:
        return settings
    if {"model_path", "vocabulary_size"} & settings.model_fields_set:
        return settings
    from poolgrid.server.frontend.models import TINY_MODEL_PATH

    return settings.model_copy(update={"model_path": str(TINY_MODEL_PATH)})


def check_template(path: Path) -> None:
    """End with status 2 when a chat template cannot be used: the worker hands it on, and only routers render it."""
    from poolgrid.server.frontend.chat_template import ChatTemplate, TemplateFailure

    try:
        ChatTemplate(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TemplateFailure) as error:
        click.echo(f"--chat-template: {path} cannot be used: {error}; nothing was started", err=True)
        raise SystemExit(2) from None


def show_engine_arguments(settings: WorkerProcessSettings) -> int:
    """Print the arguments that a worker's engine would be started with; return the exit status."""
    definition = engine_definition(settings.engine_name)
    if definition.start_plan is None:
        have = [name for name in engines() if engine_definition(name).start_plan is not None]
        click.echo(
            f"--print-engine-args: {definition.title} has no such arguments, give --engine {' or '.join(have)}",
            err=True,
        )
        return 2
    try:
        plan = definition.start_plan(settings)
    except ValueError as error:
        click.echo(str(error), err=True)
        return 1
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(plan.text, nl=False)
    return 0
