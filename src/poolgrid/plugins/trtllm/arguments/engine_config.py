"""What ``poolgrid engine-config check`` does with engine files.

A file's name says what it is for: ``agg``, ``prefill``, ``decode`` or ``encode``, alone or as one of the words in the
name (``vswa_prefill.yaml``). ``prefill.yaml`` and ``decode.yaml`` of one directory are also checked against each other.
The functions over arguments are pure; the command functions at the end read files and return what to print.

Engine arguments from text: a YAML file (``--extra-engine-args``) or a JSON object (``--override-engine-args``);
and the file of the expert load balancer, which they may name in place of writing it out.

Stricter than the parsers alone: a key that is written twice, a YAML alias (a small file could grow without bound), a
number that is not finite, text beyond ``FILE_BYTES_MAX`` or nested too deeply is refused with the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from poolgrid.kernel.wire.strict_json import read_strictly
from poolgrid.plugins.trtllm.arguments.contract import ArgumentFault, installed_contract, look_up, shown
from poolgrid.plugins.trtllm.arguments.engine_rules import Mode, check_engine, check_experts, check_pair
from poolgrid.plugins.trtllm.core.model_facts import model_problem
from poolgrid.plugins.trtllm.model_files import read_model_facts

FILE_BYTES_MAX = 1_048_576
"""A real engine file has a few KB; an expert-load-balancer map, the largest thing in one, some 100 KB."""


DEPTH_MAX = 64
"""Engine arguments are four levels deep; what an argument holds may be deeper."""


class EngineFileError(ValueError):
    """Text does not hold engine arguments; the message names the file and the place."""

    def __init__(self, where: str, detail: str) -> None:
        super().__init__(f"reading engine arguments: {where}: {detail}")


class _Loader(yaml.SafeLoader):
    """Safe YAML without aliases and without keys that are written twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) are not supported, write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is neither text nor an integer", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the engine arguments of a YAML document (empty = none); ``where`` names it in errors."""
    _check_size(text, where)
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise EngineFileError(where, f"{place}{error.problem or error.context or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise EngineFileError(where, str(error)) from None
    except RecursionError:
        raise EngineFileError(where, "it is nested too deeply") from None
    return _top_level({} if value is None else value, where)


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Return the engine arguments of a JSON object; ``where`` names it in errors."""
    value, faults = read_strictly(text, bytes_max=FILE_BYTES_MAX, depth_max=DEPTH_MAX, finite=True)
    if faults:
        path, message = faults[0]
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        raise EngineFileError(where, f"{place or 'the text'} {message}")
    return _top_level(value, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the engine arguments of a YAML file."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise EngineFileError(str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise EngineFileError(str(path), f"byte {error.start} is not UTF-8") from None
    return parse_yaml(text, str(path))


def _check_size(text: str, where: str) -> None:
    if len(text) > FILE_BYTES_MAX:
        raise EngineFileError(where, f"it is longer than {FILE_BYTES_MAX} bytes")


def _top_level(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineFileError(where, f"the top is a {type(value).__name__}, allowed is a mapping of arguments")
    for key in value:
        if not isinstance(key, str):
            raise EngineFileError(where, f"the key {key!r} at the top is not text")
    return value


BALANCER = "moe_config.load_balancer"


def balancer_faults(arguments: Mapping[str, Any]) -> list[ArgumentFault]:
    """Return what is wrong with the file that arguments name, if they name one.

    TensorRT-LLM opens it when the model is loaded, minutes after the start, in the working directory that it has then.
    """
    named = look_up(arguments, BALANCER)
    if not isinstance(named, str):
        return []
    try:
        balancer = read_yaml(Path(named))
    except EngineFileError as error:
        return [
            ArgumentFault(
                BALANCER,
                f"is {shown(named)}, which cannot be used ({error}): allowed is a file, looked for from the working "
                f"directory ({Path.cwd()}), or the balancer written out",
            )
        ]
    moe = {**(arguments.get("moe_config") or {}), "load_balancer": balancer}
    faults = installed_contract().check({"moe_config": moe})
    faults = [fault for fault in faults if fault.path.startswith(BALANCER)] or check_experts(
        {**arguments, "moe_config": moe}
    )
    return [ArgumentFault(fault.path, f"{fault.message} (in {named})") for fault in faults]


def balancer_warning(arguments: Mapping[str, Any]) -> str:
    """Say that wide expert parallelism has no balancer; empty = it has one, or needs none."""
    if look_up(arguments, "moe_config.backend") != "WIDEEP" or look_up(arguments, BALANCER):
        return ""
    return (
        f"moe_config.backend is WIDEEP without {BALANCER}: experts stay where they are, and each step takes as long as "
        "the GPU with the busiest ones"
    )


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
    lines.append(f"{checked} checked against TensorRT-LLM {installed_contract().covers}, {wrong:,} with faults")
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
