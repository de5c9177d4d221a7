"""The expert load balancer's file, which engine arguments may name in place of writing it out.

TensorRT-LLM opens it when the model is loaded, minutes after the start, in the working directory that it has then. So
it is looked for, and read, before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poolgrid.workers.engines.trtllm.arguments.contract import ArgumentFault, contract, look_up, shown
from poolgrid.workers.engines.trtllm.arguments.engine_file import EngineFileError, read_yaml
from poolgrid.workers.engines.trtllm.arguments.engine_rules import check_experts

PATH = "moe_config.load_balancer"


def balancer_faults(arguments: Mapping[str, Any]) -> list[ArgumentFault]:
    """Return what is wrong with the file that arguments name, if they name one."""
    named = look_up(arguments, PATH)
    if not isinstance(named, str):
        return []
    try:
        balancer = read_yaml(Path(named))
    except EngineFileError as error:
        return [
            ArgumentFault(
                PATH,
                f"is {shown(named)}, which cannot be used ({error}): allowed is a file, looked for from the working "
                f"directory ({Path.cwd()}), or the balancer written out",
            )
        ]
    moe = {**(arguments.get("moe_config") or {}), "load_balancer": balancer}
    faults = contract().check({"moe_config": moe})
    faults = [fault for fault in faults if fault.path.startswith(PATH)] or check_experts(
        {**arguments, "moe_config": moe}
    )
    return [ArgumentFault(fault.path, f"{fault.message} (in {named})") for fault in faults]


def balancer_warning(arguments: Mapping[str, Any]) -> str:
    """Say that wide expert parallelism has no balancer; empty = it has one, or needs none."""
    if look_up(arguments, "moe_config.backend") != "WIDEEP" or look_up(arguments, PATH):
        return ""
    return (
        f"moe_config.backend is WIDEEP without {PATH}: experts stay where they are, and each step takes as long as the "
        "GPU with the busiest ones"
    )
