"""What `poolgrid up` will start, before anything is: every part with its command, its GPUs and its port. Pure.

Rules
    1. A plan is made of settings, engine files and the names of GPUs, and of nothing else: the same on every machine.
    2. What a worker's engine would refuse is refused here, with the words of the worker.
    3. Further options (``--part-option worker.NAME=VALUE``) are checked as the worker would check them, together
       with the ``POOLGRID_*`` variables that it would read.
    4. With simulated engines the topology is the same: limits and block size come from the engine files, GPUs are not
       needed.

The GPUs of this machine, and which worker gets which. Assigning is pure; only ``present_gpus`` looks.

Rules
    1. Nothing is started on hope: GPUs that are asked for and not there end the start with their names and numbers.
    2. A GPU goes to one worker. To share one, name it for both.
    3. GPUs are named as CUDA names them: by number, or by the UUID of a device or of a part of one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from poolgrid.server.process.figures import counted

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class GpusMissing(ValueError):
    """Too few GPUs; the message lists the present ones."""


@dataclass(frozen=True, slots=True)
class Need:
    """The GPUs that one worker needs."""

    worker: str
    count: int
    made_of: str
    """How the count comes about: ``TP 4 x PP 1``."""
    named: tuple[str, ...] = ()
    """Those it is to have; empty = any that are free."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the GPUs of a list such as ``0,1`` or ``GPU-5c…,MIG-…``."""
    return tuple(name for each in text.split(",") if (name := each.strip()))


def present_gpus() -> tuple[str, ...] | None:
    """Return numbers and UUIDs of all GPUs, as NVIDIA's driver tells; ``None`` where there is no driver to ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # no driver here
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    return (*map(str, range(len(handles))), *(each.decode() if isinstance(each, bytes) else each for each in uuids))


def usable_gpus(named: str, environment: Mapping[str, str], present: Sequence[str] | None) -> tuple[str, ...]:
    """Return the GPUs that workers may get, in order.

    ``named`` is the user's list (empty = all that this process may see), ``present`` what the driver tells. Raises
    ``GpusMissing`` for a name that is not there, and where it is unknown what is there.
    """
    visible = environment.get(CUDA_VISIBLE_DEVICES)
    seen = None if visible is None else split_names(visible)
    chosen = split_names(named)
    where = "gpus"
    if not chosen and seen is not None:
        chosen, where = (() if seen[:1] == ("-1",) else seen), CUDA_VISIBLE_DEVICES
    elif not chosen and present is not None:
        return tuple(each for each in present if each.isdecimal())
    elif not chosen:
        raise GpusMissing(
            "counting the GPUs of this machine: NVIDIA's driver cannot be asked (it is missing, or nvidia-ml-py) and "
            f"{CUDA_VISIBLE_DEVICES} is not set; name them with --gpus 0,1,..."
        )
    for each in chosen:
        if present is not None and each not in present and not each.startswith("MIG-"):
            there = ", ".join(name for name in present if name.isdecimal()) or "none"
            raise GpusMissing(f"{where} names GPU {each}, which is not there: {there} are")
        if where == "gpus" and seen is not None and each not in seen:
            raise GpusMissing(f"gpus names GPU {each}, {CUDA_VISIBLE_DEVICES} allows {visible or 'none'}")
    return chosen


def assign(needs: Sequence[Need], usable: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each worker, those that are named for one first; raises ``GpusMissing``."""
    assigned: dict[str, tuple[str, ...]] = {}
    for need in needs:
        if not need.named:
            continue
        if len(need.named) != need.count:
            raise GpusMissing(
                f"{need.worker} is to have {counted(len(need.named), 'GPU')} ({','.join(need.named)}) and needs "
                f"{need.count} "
                f"({need.made_of})"
            )
        strangers = [each for each in need.named if each not in usable]
        if strangers:
            raise GpusMissing(f"{need.worker} is to have GPU {strangers[0]}, usable are {','.join(usable) or 'none'}")
        assigned[need.worker] = need.named
    taken = {each for names in assigned.values() for each in names}
    free = [each for each in usable if each not in taken]
    wanting = [need for need in needs if not need.named]
    wanted = sum(need.count for need in wanting)
    if wanted > len(free):
        each_needs = ", ".join(f"{need.worker}: {need.count} = {need.made_of}" for need in wanting)
        raise GpusMissing(
            f"{counted(wanted, 'GPU')} {'is' if wanted == 1 else 'are'} needed ({each_needs}) and {len(free)} "
            f"{'is' if len(free) == 1 else 'are'} free ({','.join(free) or 'none'}); fewer "
            "workers, a smaller engine file, or GPUs named for several workers at once (--gpus prefill=0 "
            "--gpus decode=0) need fewer"
        )
    for need in wanting:
        assigned[need.worker], free = tuple(free[: need.count]), free[need.count :]
    return {need.worker: assigned[need.worker] for need in needs}


if TYPE_CHECKING:
    from rich.console import Console

INGEST = "{ingest}"
"""Stands for the consolidator's address, which is known once it runs."""

ANY = "any free"


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker as it will be started, or several in one process."""

    name: str
    arguments: tuple[str, ...]
    """Of ``poolgrid``; ``INGEST`` stands for the consolidator's address."""
    gpus: tuple[str, ...] | None = None
    """``None``: its engine needs none."""
    made_of: str = ""
    warnings: tuple[str, ...] = ()
    count: int = 1
    """Workers in the process."""

    def environment(self) -> dict[str, str]:
        return {} if self.gpus is None else {CUDA_VISIBLE_DEVICES: ",".join(self.gpus)}


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """Workers of one kind, as the command line describes them."""

    names: tuple[str, ...]
    mode: str
    """``prefill_and_decode``, ``prefill``, ``decode`` or ``encode``."""
    engine_args: Path | None = None
    options: tuple[str, ...] = ()
    gpus: str = ""


class OptionProblem(ValueError):
    """An option that is handed on to parts is not one."""


def options_as_arguments(options: Sequence[str]) -> list[str]:
    """Return ``name=value`` and ``name`` as options of a command; raises ``OptionProblem``."""
    arguments = []
    for option in options:
        name, equals, value = option.removeprefix("--").partition("=")
        if not name or any(each.isspace() for each in name):
            raise OptionProblem(f"{option!r} is handed on as an option, allowed are name=value and name")
        arguments.append(f"--{name}{equals}{value}")
    return arguments


def options_as_settings(options: Sequence[str]) -> dict[str, Any]:
    """Return the same as values of settings: a name alone is on, with ``no-`` before it off."""
    values: dict[str, Any] = {}
    for argument in options_as_arguments(options):
        name, equals, value = argument.removeprefix("--").partition("=")
        field = name.replace("-", "_")
        if equals:
            values[field] = value
        elif field.startswith("no_"):
            values[field.removeprefix("no_")] = False
        else:
            values[field] = True
    return values


def plan_real(
    engine: str,
    groups: Sequence[LaunchGroup],
    common: Mapping[str, str],
    usable: Sequence[str],
    environment: Mapping[str, str],
) -> list[PlannedWorker]:
    """Return the workers that drive an engine with GPUs.

    ``common`` are options of all of them (``model-path``, ``host``, ...), ``usable`` the GPUs there are. Raises
    ``GpusMissing``, ``OptionProblem``, and ``ValueError`` with a worker's objection to its arguments.
    """
    from poolgrid.server.workers.engines.registry import engine_definition

    definition = engine_definition(engine)
    assert definition.start_plan is not None, "an engine that needs GPUs has their number"
    needs: list[Need] = []
    made: list[tuple[str, list[str], tuple[str, ...]]] = []
    of_environment = {
        name: environment[variable]
        for name in definition.settings.model_fields
        if (variable := f"POOLGRID_{name.upper()}") in environment
    }
    for group in groups:
        options = {**common, "disaggregation-mode": group.mode}
        if group.engine_args is not None:
            options["extra-engine-args"] = str(group.engine_args)
        words = [f"{name}={value}" for name, value in options.items()] + list(group.options)
        given = {**of_environment, **options_as_settings(words), "consolidator": "tcp://127.0.0.1:1"}
        if given.get("event_plane") == "nats":
            del given["consolidator"]  # its address is on NATS
        try:
            settings = definition.settings.model_validate(given)
        except ValidationError as error:
            raise OptionProblem(_in_words(error, group.names[0])) from None
        start = definition.start_plan(settings)
        count, made_of = start.gpus, start.gpus_made_of
        named = split_names(group.gpus)
        for at, name in enumerate(group.names):
            # Each worker of a group has its part of the list; a list for one is for all of them.
            share = named if len(named) <= count else named[at * count : (at + 1) * count]
            needs.append(Need(name, count, made_of, share))
            arguments = ["worker", f"--engine={engine}", f"--worker-id={name}", f"--consolidator={INGEST}"]
            made.append((name, arguments + _command_line(words, definition.settings), start.warnings))
    gpus = assign(needs, usable)
    return [
        PlannedWorker(name, tuple(arguments), gpus[name], need.made_of, warnings)
        for (name, arguments, warnings), need in zip(made, needs, strict=True)
    ]


def _command_line(words: Sequence[str], model: type[BaseModel]) -> list[str]:
    """Return options as the command takes them: ``trust-remote-code=true`` is ``--trust-remote-code`` there."""
    arguments = []
    for argument in options_as_arguments(words):
        name, equals, value = argument.removeprefix("--").partition("=")
        field = model.model_fields.get(name.replace("-", "_"))
        is_flag = equals and field is not None and field.annotation is bool
        on = value.lower() in ("1", "true", "on", "yes")
        arguments.append((f"--{name}" if on else f"--no-{name}") if is_flag else argument)
    return arguments


def _in_words(error: ValidationError, name: str) -> str:
    faults = []
    for each in error.errors():
        option = "--" + ".".join(map(str, each["loc"])).replace("_", "-") if each["loc"] else "its options"
        message = "is no option of this worker" if each["type"] == "extra_forbidden" else each["msg"]
        faults.append(f"{option}: {message.removeprefix('Value error, ')}")
    return f"planning {name}, nothing was started: " + "; ".join(faults)


def simulated_limits(engine_args: Path) -> list[str]:
    """Return options of a simulated worker as large as in an engine file."""
    from poolgrid.server.workers.engines.registry import engine_definition, engines

    for name in engines():
        read = engine_definition(name).read_limits
        if read is not None:
            return [f"--{option}={value}" for option, value in read(engine_args).items()]
    raise OptionProblem(f"{engine_args} is given, and no installed engine has engine files")


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """One process of a plan, as it could be typed."""

    name: str
    gpus: tuple[str, ...] | None
    made_of: str
    """Why it needs so many."""
    port: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    warnings: tuple[str, ...]


def described_parts(
    workers: Sequence[PlannedWorker], others: Mapping[str, tuple[str, Sequence[str]]], ingest: str
) -> list[PlannedPart]:
    """Return every process of a plan.

    ``others`` are the parts that are no workers, by name, with their port and arguments; ``ingest`` is where the
    consolidator of the commands listens for workers.
    """
    made = [PlannedPart(name, None, "", port, {}, ("poolgrid", *words), ()) for name, (port, words) in others.items()]
    for worker in workers:
        command = ("poolgrid", *(each.replace(INGEST, ingest) for each in worker.arguments))
        rest = (worker.made_of, ANY, worker.environment(), command, worker.warnings)
        made.append(PlannedPart(worker.name, worker.gpus, *rest))
    return made


def show(planned: Sequence[PlannedPart], console: Console) -> None:
    """Print a plan for people: each part with its GPUs and port, then the commands, as one could type them."""
    from poolgrid.server.process.terminal_table import Heading, TerminalTable

    table = TerminalTable([Heading(name, numeric=False) for name in ("part", "GPUs", "made of", "port")])
    for part in planned:
        table.add(part.name, "-" if part.gpus is None else ",".join(part.gpus), part.made_of, part.port)
    console.print(table)
    lines = [""]
    for part in planned:
        before = [f"{name}={shlex.quote(value)}" for name, value in part.environment.items()]
        lines.append(" ".join([*before, *map(shlex.quote, part.command)]))
    lines += [f"warning: {part.name}: {warning}" for part in planned for warning in part.warnings]
    for line in lines:
        # Whole, to be copied.
        console.print(line, soft_wrap=True, markup=False, emoji=False)


def usable_on_this_machine(named: str) -> tuple[str, ...]:
    """Return the GPUs that workers may get here; raises ``GpusMissing``."""
    from poolgrid.server.cli.launch_plan import present_gpus

    return usable_gpus(named, os.environ, present_gpus())
