"""Engine arguments from text: a YAML file (``--extra-engine-args``) or a JSON object (``--override-engine-args``);
and the file of the expert load balancer, which they may name in place of writing it out.

Stricter than the parsers alone: a key that is written twice, a YAML alias (a small file could grow without bound), a
number that is not finite, text beyond ``FILE_BYTES_MAX`` or nested too deeply is refused with the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from poolgrid.wire.strict_json import read_strictly
from poolgrid.workers.engines.trtllm.arguments.contract import ArgumentFault, installed_contract, look_up, shown
from poolgrid.workers.engines.trtllm.arguments.engine_rules import check_experts

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
