"""What ``poolgrid engine-config`` does with engine files: check them, and make other ones from them.

A file's name says what it is for: ``agg``, ``prefill``, ``decode`` or ``encode``, alone or as one of the words in the
name (``vswa_prefill.yaml``). ``prefill.yaml`` and ``decode.yaml`` of one directory are also checked against each other.
The functions over arguments are pure; the command functions at the end read files and return what to print.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from poolgrid.workers.engines.trtllm.arguments.balancer_file import balancer_faults
from poolgrid.workers.engines.trtllm.arguments.contract import Fault, contract, look_up, shown
from poolgrid.workers.engines.trtllm.arguments.engine_file import EngineFileError, read_yaml
from poolgrid.workers.engines.trtllm.arguments.engine_rules import Mode, check_engine, check_pair
from poolgrid.workers.engines.trtllm.core.model_abilities import model_problem
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
    fault: Fault

    def __str__(self) -> str:
        return f"{self.file}: {'warning: ' if self.fault.warning else ''}{self.fault}"


def mode_of(name: str) -> Mode | None:
    """Return the mode that a file name speaks of; ``None`` when it names none, or several."""
    found = {_MODES[word] for word in re.split(r"[^a-z0-9]+", name.lower()) if word in _MODES}
    return found.pop() if len(found) == 1 else None


def check_arguments(arguments: Mapping[str, Any], mode: Mode | None) -> list[Fault]:
    """Return every fault of one engine file's arguments; rules between fields only where the fields are right."""
    return contract().check(arguments) or check_engine(arguments, mode or "prefill_and_decode")


def to_aggregated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decode engine's arguments as those of an engine that does both.

    Block reuse is on (an aggregated engine has prefixes to share), the transceiver is gone, and where a step is too
    small for a prompt, prompts are prefilled in pieces. Raises ``ValueError`` for the arguments of a prefill engine.
    """
    made = copy.deepcopy(dict(arguments))
    if made.get("cache_transceiver_config") and made.get("disable_overlap_scheduler") and not _speculates(made):
        raise ValueError(
            "converting to aggregated: disable_overlap_scheduler is true, which is a prefill engine's; "
            "convert the decode engine's file"
        )
    made.pop("cache_transceiver_config", None)
    kv_cache = made.setdefault("kv_cache_config", {})
    kv_cache["enable_block_reuse"] = True
    longest, step = look_up(made, "max_seq_len"), look_up(made, "max_num_tokens")
    if step is not None and (longest is None or longest > step):
        made["enable_chunked_prefill"] = True
    return made


def set_tensor_parallel_size(arguments: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the arguments with another tensor parallel size; expert parallelism that was equal to it follows."""
    if size < 1:
        raise ValueError(f"setting the tensor parallel size: it is {size}, allowed are integers from 1")
    made = copy.deepcopy(dict(arguments))
    before = look_up(made, "tensor_parallel_size")
    experts = made.get("moe_expert_parallel_size")
    if experts is not None and experts == before and experts > 1:
        made["moe_expert_parallel_size"] = size
    elif experts is not None and experts > 0 and size % experts:
        raise ValueError(
            f"setting the tensor parallel size: it is {size}, allowed are multiples of {experts} "
            "(moe_expert_parallel_size)"
        )
    made["tensor_parallel_size"] = size
    return made


def dump(arguments: Mapping[str, Any], header: str = "") -> str:
    """Return arguments as YAML, with a header of comment lines."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    text: str = yaml.safe_dump(dict(arguments), sort_keys=True, default_flow_style=None, allow_unicode=True)
    return comment + text


def _speculates(arguments: Mapping[str, Any]) -> bool:
    # Published decode engines with Eagle run without overlap too.
    return bool(arguments.get("speculative_config"))


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
            faults.append(FileFault(file, Fault("", str(error))))
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


def model_faults(model: Any, mode: Mode | None) -> list[Fault]:
    """Return why a model cannot be used in a mode, as far as its files are here."""
    if mode != "encode" or not isinstance(model, str) or not model:
        return []
    problem = model_problem(read_model_facts(model).architecture, encodes=True, takes_media=True)
    return [Fault("model", f"is {shown(model)}: {problem}")] if problem else []


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
    lines.append(f"{checked} checked against TensorRT-LLM {contract().version}, {wrong:,} with faults")
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
    return {"tensorrt_llm": contract().version, "files": by_file}, 1 if wrong else 0


def convert_command(path: Path, to_aggregate: bool = False, tensor_parallel_size: int | None = None) -> tuple[str, int]:
    """``poolgrid engine-config convert FILE``: return the new file's text and 0, or what is wrong and 1."""
    try:
        arguments = read_yaml(path)
        faults = check_arguments(arguments, mode_of(path.stem))
        if faults:
            return "".join(f"{path}: {fault}\n" for fault in faults), 1
        changes = []
        if to_aggregate:
            arguments = to_aggregated(arguments)
            changes.append("aggregated")
        if tensor_parallel_size is not None:
            arguments = set_tensor_parallel_size(arguments, tensor_parallel_size)
            changes.append(f"tensor parallel size {tensor_parallel_size}")
    except ValueError as error:
        return f"{path}: {error}\n", 1
    mode = "prefill_and_decode" if to_aggregate else mode_of(path.stem)
    faults = check_arguments(arguments, mode)
    if faults:
        return "".join(f"{path}, converted: {fault}\n" for fault in faults), 1
    return dump(arguments, f"Made by poolgrid engine-config from {path}: {', '.join(changes) or 'unchanged'}."), 0
