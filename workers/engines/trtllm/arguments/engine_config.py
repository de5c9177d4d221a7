"""What ``poolgrid engine-config check`` does with engine files.

A file's name says what it is for: ``agg``, ``prefill``, ``decode`` or ``encode``, alone or as one of the words in the
name (``vswa_prefill.yaml``). ``prefill.yaml`` and ``decode.yaml`` of one directory are also checked against each other.
The functions over arguments are pure; the command functions at the end read files and return what to print.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from poolgrid.workers.engines.trtllm.arguments.contract import ArgumentFault, installed_contract, shown
from poolgrid.workers.engines.trtllm.arguments.engine_file import EngineFileError, balancer_faults, read_yaml
from poolgrid.workers.engines.trtllm.arguments.engine_rules import Mode, check_engine, check_pair
from poolgrid.workers.engines.trtllm.core.model_facts import model_problem
from poolgrid.workers.engines.trtllm.model_files import read_model_facts

FILES_MAX = 10_000
"""Files of one check; more are a wrong directory."""

_MODES: dict[str, Mode] = {
    "agg": "prefill_and_decode",
    "aggregated": "prefill_and_decode",
    "prefill": "prefill",
    "decode": "decode",
    "encode": "encode",
}


@dataclass(frozen=True, slots=True)
class FileFault:
    """A fault and the file that it is in."""

    file: Path
    fault: ArgumentFault

    def __str__(self) -> str:
        return f"{self.file}: {'warning: ' if self.fault.warning else ''}{self.fault}"


def mode_of(name: str) -> Mode | None:
    """Return the mode that a file name speaks of; ``None`` when it names none, or several."""
    found = {_MODES[word] for word in re.split(r"[^a-z0-9]+", name.lower()) if word in _MODES}
    return found.pop() if len(found) == 1 else None


def check_arguments(arguments: Mapping[str, Any], mode: Mode | None) -> list[ArgumentFault]:
    """Return every fault of one engine file's arguments; rules between fields only where the fields are right."""
    return installed_contract().check(arguments) or check_engine(arguments, mode or "prefill_and_decode")


def engine_files(paths: Iterable[Path]) -> list[Path]:
    """Return the YAML files at or below some paths, sorted; raise ``EngineFileError`` where there is none."""
    found: list[Path] = []
    for path in paths:
        below = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")]) if path.is_dir() else [path]
        if not below:
            raise EngineFileError(str(path), "there is no YAML file below it")
        found += below
        if len(found) > FILES_MAX:
            raise EngineFileError(
                str(path), f"more than {FILES_MAX} files are below it: name a directory of engine files"
            )
    return list(dict.fromkeys(found))


def check_files(paths: Iterable[Path], model: str = "") -> tuple[list[Path], list[FileFault]]:
    """Check engine files and directories of them; return the files read and every fault.

    ``model`` is the model that they are for, a directory or a name; empty = the one that each names, if any.
    """
    files = engine_files(paths)
    faults: list[FileFault] = []
    good: dict[Path, dict[str, Any]] = {}
    for file in files:
        try:
            arguments = read_yaml(file)
        except EngineFileError as error:
            faults.append(FileFault(file, ArgumentFault("", str(error))))
            continue
        mode = mode_of(file.stem)
        found = check_arguments(arguments, mode) or balancer_faults(arguments)
        found += model_faults(model or arguments.get("model"), mode)
        faults += [FileFault(file, fault) for fault in found]
        if not found:
            good[file] = arguments
    for prefill, decode in pairs(good):
        for fault in check_pair(good[prefill], good[decode]):
            side, _, path = fault.path.partition(".")
            faults.append(FileFault(prefill if side == "prefill" else decode, replace(fault, path=path)))
    return files, faults


def model_faults(model: Any, mode: Mode | None) -> list[ArgumentFault]:
    """Return why a model cannot be used in a mode, as far as its files are here."""
    if mode != "encode" or not isinstance(model, str) or not model:
        return []
    problem = model_problem(read_model_facts(model).architecture, encodes=True, takes_media=True)
    return [ArgumentFault("model", f"is {shown(model)}: {problem}")] if problem else []


def pairs(files: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Return the prefill and decode files that belong together: alike but for that word, in one directory."""
    known = set(files)
    found = []
    for file in sorted(known):
        if mode_of(file.stem) == "prefill":
            partner = file.with_name(file.name.replace("prefill", "decode"))
            if partner in known:
                found.append((file, partner))
    return found


def check_command(paths: Iterable[Path], model: str = "") -> tuple[str, int]:
    """``poolgrid engine-config check PATH...``: return the report and the exit status, 0 also with warnings."""
    try:
        files, faults = check_files(paths, model)
    except EngineFileError as error:
        return f"{error}\n", 1
    lines = [str(fault) for fault in faults]
    wrong = len({each.file for each in faults if not each.fault.warning})
    checked = "1 file" if len(files) == 1 else f"{len(files):,} files"
    lines.append(f"{checked} checked against TensorRT-LLM {installed_contract().version}, {wrong:,} with faults")
    return "\n".join(lines) + "\n", 1 if wrong else 0


def check_report(paths: Iterable[Path], model: str = "") -> tuple[dict[str, Any], int]:
    """``poolgrid engine-config check --json PATH...``: return the faults by file, and the exit status."""
    try:
        files, faults = check_files(paths, model)
    except EngineFileError as error:
        return {"error": str(error)}, 1
    by_file: dict[str, list[dict[str, str | bool]]] = {str(file): [] for file in files}
    for each in faults:
        fault = each.fault
        by_file[str(each.file)].append({"path": fault.path, "message": fault.message, "warning": fault.warning})
    wrong = any(not each.fault.warning for each in faults)
    return {"tensorrt_llm": installed_contract().version, "files": by_file}, 1 if wrong else 0
