"""Settings that were removed or renamed, by option: what to use in their place. Refused by name for one version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FORMER_SETTINGS: dict[str, str] = {
    # router, global router, admission
    # front end: HTTP, tenants, media, tracing
    # consolidator, feed, discovery, NATS
    "--decision-stream-bytes": "Decisions are recorded in the router's --data-dir, also with --event-plane nats.",
    # workers: common
    "--load-interval-ms": "Load reports of a busy worker are at least 100 ms apart.",
    "--heartbeat-ms": "Workers send a sign of life every second.",
    "--check-model": "Run poolgrid model fetch MODEL --check before the start.",
    "--no-check-model": "Leave it out: a worker does not read its whole model before the start.",
    # workers: TensorRT-LLM
    "--backend": "the backend is pytorch; for AutoDeploy use --engine trtllm-serve.",
    "--gpu-interval-ms": "workers show no GPU metrics, run dcgm-exporter.",
    # workers: servers and the simulated engine
    "--engine-stop-timeout-s": "A server of the worker's own has 60 s to end.",
    "--engine-restarts-max": "A server of the worker's own may die three times in a row.",
    "--max-waiting-requests": "At most 4096 requests wait in a simulated engine.",
    "--eos-probability": "Give --output-tokens-mean: answers end by their length.",
    "--kv-bytes-per-token": "A token has 131,072 bytes of KV; --kv-transfer-gigabytes-per-s sets the time.",
    "--kv-transfer-latency-ms": "The set-up of a transfer takes 1 ms.",
    "--kv-fetch-timeout-ms": "A simulated decode worker waits 2 s for a prefill worker's answer.",
    "--encode-ms-per-image": "A simulated encode worker takes 20 ms for an image.",
    "--load-bytes": "A simulated load has 16,000,000,000 bytes; --load-ms sets its time.",
    # up, bench, simulate, engine-check, model, journal
    "--attempts": "poolgrid model fetch tries a hub that fails again six times, at growing intervals.",
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
