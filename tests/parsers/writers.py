"""Calls as the models of each format write them, after their published chat templates; one writer a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.parsers.samples import Call, as_json

Writer = Callable[[Sequence[Call]], str]


def _objects(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> list[str]:
    return [f'{{"{name}": "{call.name}", "{arguments}": {as_json(call.arguments)}}}' for call in calls]


def _list(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_objects(calls))}]"


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_objects(calls, arguments="parameters"))


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{as_json(call.arguments)}" for call in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{as_json(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{_bare(value)}</｜DSML｜parameter>\n'

    return _invoked(calls, "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>", "｜DSML｜", argument)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _invoked(calls: Sequence[Call], around: str, prefix: str, argument: Callable[[str, Any], str]) -> str:
    made = [
        f'<{prefix}invoke name="{call.name}">\n'
        + "".join(argument(key, value) for key, value in call.arguments.items())
        + f"</{prefix}invoke>\n"
        for call in calls
    ]
    return around.replace("{}", "".join(made))


def minimax_m2(calls: Sequence[Call]) -> str:
    return _invoked(
        calls,
        "<minimax:tool_call>\n{}</minimax:tool_call>",
        "",
        lambda key, value: f'<parameter name="{key}">{_bare(value)}</parameter>\n',
    )


def muse_glimmer(calls: Sequence[Call]) -> str:
    return _invoked(
        calls,
        "<atem:function_calls>\n{}</atem:function_calls>",
        "atem:",
        lambda key, value: f'<atem:parameter name="{key}">{_bare(value)}</atem:parameter>\n',
    )


def step3(calls: Sequence[Call]) -> str:
    each = [
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        + _invoked(
            [call],
            "{}",
            "steptml:",
            lambda key, value: f'<steptml:parameter name="{key}">{_bare(value)}</steptml:parameter>\n',
        ).strip()
        + "<｜tool_call_end｜>"
        for call in calls
    ]
    return f"<｜tool_calls_begin｜>\n{chr(10).join(each)}\n<｜tool_calls_end｜>"


_MARK = "]<]minimax[>["


def minimax_m3(calls: Sequence[Call]) -> str:
    def elements(value: Any) -> str:
        if isinstance(value, Mapping):
            return "".join(f"{_MARK}<{key}>{elements(each)}{_MARK}</{key}>" for key, each in value.items())
        if isinstance(value, list):
            return "".join(f"{_MARK}<item>{elements(each)}{_MARK}</item>" for each in value)
        return _bare(value)

    made = [f'{_MARK}<invoke name="{call.name}">{elements(call.arguments)}{_MARK}</invoke>\n' for call in calls]
    return f"{_MARK}<tool_call>\n{''.join(made)}{_MARK}</tool_call>"


def gemma_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(each) for each in value)}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else as_json(value)


def gemma4(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{call.name}{gemma_value(call.arguments)}<tool_call|>" for call in calls)


def kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>{as_json(call.arguments)}"
        "<|tool_call_end|>"
        for number, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        opened = f'<|open|>argument key="{key}" type="{_TYPES[type(value)]}"<|sep|>'
        return f"{opened}{_bare(value)}<|close|>argument<|sep|>"

    made = [
        f'<|open|>call tool="{call.name}" index="{number}"<|sep|>'
        + "".join(argument(key, value) for key, value in call.arguments.items())
        + "<|close|>call<|sep|>"
        for number, call in enumerate(calls, 1)
    ]
    return f"<|open|>tools<|sep|>{''.join(made)}<|close|>tools<|sep|>"


def _functions(calls: Sequence[Call], begin: str, end: str, value: str) -> str:
    return "\n".join(
        f"{begin}\n<function={call.name}>\n"
        + "".join(value.replace("{key}", key).replace("{value}", _bare(given)) for key, given in call.arguments.items())
        + f"</function>\n{end}"
        for call in calls
    )


def qwen3_coder(calls: Sequence[Call]) -> str:
    return _functions(calls, "<tool_call>", "</tool_call>", "<parameter={key}>\n{value}\n</parameter>\n")


def seed_oss(calls: Sequence[Call]) -> str:
    return _functions(calls, "<seed:tool_call>", "</seed:tool_call>", "<parameter={key}>{value}</parameter>\n")


def _glm(calls: Sequence[Call], after_name: str, suffix: str = "") -> str:
    return "\n".join(
        f"<tool_call{suffix}>{call.name}{after_name}\n"
        + "".join(
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{_bare(value)}</arg_value{suffix}>\n"
            for key, value in call.arguments.items()
        )
        + f"</tool_call{suffix}>"
        for call in calls
    )


def glm45(calls: Sequence[Call]) -> str:
    return _glm(calls, "")


def hy_v3(calls: Sequence[Call]) -> str:
    suffix = ":opensource"
    return f"<tool_calls{suffix}>\n{_glm(calls, f'<tool_sep{suffix}>', suffix)}\n</tool_calls{suffix}>"


def hy_v3_preview(calls: Sequence[Call]) -> str:
    return f"<tool_calls>\n{_glm(calls, '<tool_sep>')}\n</tool_calls>"


def cohere_command3(calls: Sequence[Call]) -> str:
    inner = ",\n".join(
        f'    {{"tool_call_id": "{number}", "tool_name": "{call.name}", "parameters": {as_json(call.arguments)}}}'
        for number, call in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{inner}\n]<|END_ACTION|>"


def cohere_command_r(calls: Sequence[Call]) -> str:
    return f"Action: ```json\n[{', '.join(_objects(calls, 'tool_name', 'parameters'))}]\n```"


def _python(calls: Sequence[Call]) -> list[str]:
    return [f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})" for call in calls]


def pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_python(calls))}]"


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def olmo3(calls: Sequence[Call]) -> str:
    return "<function_calls>" + "\n".join(_python(calls)) + "</function_calls>"


def gigachat3(calls: Sequence[Call]) -> str:
    return "<|message_sep|>\n\n" + "<|message_sep|>\n\n".join(
        f"function call<|role_sep|>\n{each}" for each in _objects(calls)
    )


def apertus(calls: Sequence[Call]) -> str:
    inner = ", ".join(f'{{"{call.name}": {as_json(call.arguments)}}}' for call in calls)
    return f"<|tools_prefix|>[{inner}]<|tools_suffix|>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{as_json(call.arguments)}<|call|>"
        for call in calls
    )


WRITERS: dict[str, Sequence[Writer]] = {
    "apertus": (apertus,),
    "cohere_command3": (cohere_command3,),
    "cohere_command_r": (cohere_command_r,),
    "deepseek_v3": (deepseek_v3,),
    "deepseek_v32": (deepseek_v32, lambda calls: deepseek_v32(calls).replace("function_calls>", "tool_calls>")),
    "gemma4": (gemma4,),
    "gigachat3": (
        gigachat3,
        lambda calls: "\n".join(f"<|function_call|>{each}<|message_sep|>" for each in _objects(calls)),
    ),
    "glm45": (glm45, lambda calls: glm45(calls).replace("\n<arg_", "<arg_")),
    "granite": (lambda calls: f"<|tool_call|>{_list(calls)}",),
    "harmony": (harmony,),
    "hermes": (hermes,),
    "hunyuan_a13b": (
        lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
        lambda calls: "<tool_calls>\n" + "\n".join(_objects(calls)) + "\n</tool_calls>",
    ),
    "hy_v3": (hy_v3, hy_v3_preview),
    "kimi_k2": (kimi_k2,),
    "kimi_k3": (kimi_k3,),
    "lfm2": (lfm2, lambda calls: f"<|tool_call_start|>{_list(calls)}<|tool_call_end|>"),
    "llama3_json": (llama3_json, lambda calls: f"<|python_tag|>{llama3_json(calls)}"),
    "minimax_m2": (minimax_m2,),
    "minimax_m3": (minimax_m3,),
    "mistral": (mistral, lambda calls: f"[TOOL_CALLS]{_list(calls)}"),
    "muse_glimmer": (muse_glimmer,),
    "nemotron_json": (lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>",),
    "olmo3": (olmo3,),
    "phi4_mini_json": (
        lambda calls: f"functools{_list(calls)}",
        lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>",
    ),
    "pythonic": (pythonic, lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
    "qwen3_coder": (
        qwen3_coder,
        lambda calls: qwen3_coder(calls).replace("<tool_call>\n", ""),
        lambda calls: _functions(calls, "<tool_call>", "</tool_call>", "<parameter={key}>{value}</parameter>\n"),
    ),
    "seed_oss": (seed_oss,),
    "step3": (step3,),
}
"""By the format's name; several for one that has variants."""
