"""Settings that were removed or renamed, by option: what to use in their place. Refused by name for one version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FORMER_SETTINGS: dict[str, str] = {
    # router, global router, admission
    # front end: HTTP, tenants, media, tracing
    # consolidator, feed, discovery, NATS
    # workers: common
    # workers: TensorRT-LLM
    # workers: servers and the simulated engine
    # up, bench, simulate, engine-check, model, journal
}
"""Option as it was typed, such as ``--feed-interval-ms``, to one sentence: the new option, or the fixed value.

An option that only one command has lost stands with the command before it, such as ``bench --timeout-s``.
"""


def former_setting(command: str, words: Iterable[str], environment: Mapping[str, str]) -> str:
    """Return the line that refuses a setting which a command no longer has; empty when it is given none.

    ``words`` are the command line, up to the first ``--``.
    """
    for word in words:
        if word == "--":
            break
        option = word.partition("=")[0]
        if reason := _reason(command, option):
            return f"{option}: removed, {reason}"
    for entry in FORMER_SETTINGS:
        of_command, _, option = entry.rpartition(" ")
        variable = "POOLGRID_" + option[2:].replace("-", "_").upper()
        if of_command in ("", command) and variable in environment:
            return f"{option} ({variable}): removed, {FORMER_SETTINGS[entry]}"
    return ""


def former_name(command: str, name: str) -> str:
    """Return the line that refuses a name in a settings file; empty when it never was a setting."""
    option = "--" + name.replace("_", "-")
    reason = _reason(command, option)
    return f"{option}: removed, {reason}" if reason else ""


def _reason(command: str, option: str) -> str:
    return FORMER_SETTINGS.get(f"{command} {option}") or FORMER_SETTINGS.get(option, "")
