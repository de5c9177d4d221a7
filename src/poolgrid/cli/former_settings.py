"""Settings that were renamed or replaced: what to use in their place. They are refused by name for one version.

Those that became constants are unknown options; the pages that describe a limit name its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FORMER_SETTINGS: dict[str, str] = {
    "--trace-protocol": "set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL; port 4318 or a path means http/protobuf.",
    "--http-header-timeout-ms": "use --http-request-timeout-ms, which is for heads and bodies.",
    "--http-body-timeout-ms": "use --http-request-timeout-ms, which is for heads and bodies.",
    "--names-replicas": "Use --nats-replicas, which holds for all that a process makes on NATS.",
    "--check-model": "Run poolgrid model fetch MODEL --check before the start.",
    "--pipeline-parallel-size": "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    "--expert-parallel-size": "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    "--gpus-per-node": "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    "--max-beam-width": "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    "--load-format": "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    "--event-buffer-max-size": "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    "--nodes": "start the worker by deploy/slurm/rank.sh under srun or mpirun, once for each GPU.",
    "--eos-probability": "Give --output-tokens-mean: answers end by their length.",
    "--front-prefill": "use --engine-url prefill=URL.",
    "--front-decode": "use --engine-url decode=URL.",
    "--prefill-engine-args": "use --engine-args prefill=FILE.",
    "--decode-engine-args": "use --engine-args decode=FILE.",
    "--encode-engine-args": "use --engine-args encode=FILE.",
    "--router-option": "use --part-option router.NAME=VALUE.",
    "--consolidator-option": "use --part-option consolidator.NAME=VALUE.",
    "--worker-option": "use --part-option worker.NAME=VALUE.",
    "--prefill-option": "use --part-option prefill.NAME=VALUE.",
    "--decode-option": "use --part-option decode.NAME=VALUE.",
    "--encode-option": "use --part-option encode.NAME=VALUE.",
    "--worker-gpus": "use --gpus worker=LIST.",
    "--prefill-gpus": "use --gpus prefill=LIST.",
    "--decode-gpus": "use --gpus decode=LIST.",
    "--encode-gpus": "use --gpus encode=LIST.",
    "up --queue-limit": "use --part-option router.max-queue-requests=N (with --pools: global-router).",
    "up --isolate-tenants": "use --part-option router.isolate-tenants, or global-router.isolate-tenants with --pools.",
    "up --access-log": "use --part-option router.access-log, or global-router.access-log with --pools.",
    "up --blocks-per-worker": "use --part-option worker.total-kv-blocks=N.",
    "up --max-sequence-length": "use --part-option worker.max-seq-len=N.",
    "up --output-tokens-mean": "use --part-option worker.output-tokens-mean=N.",
    "bench --duration": "use --duration-s.",
    "--against": "give --url several endpoints, separated by commas.",
    "bench --api-key": "set POOLGRID_API_KEY.",
    "bench --text": "use --endpoint text.",
    "bench --isl-max": "use --isl, which cuts the prompts of a replay.",
    "bench --osl-max": "use --osl, which cuts the answers of a replay.",
    "--slowdowns": "use --worker-speeds, which holds for the whole run.",
    "--timing-table": "use --timing FILE.",
    "--nats-nkey": "use --nats-credentials, which takes the seed of an nkey too.",
    "--ready-timeout-s": "use --start-timeout-ms, with 1,000 times the value.",
    "bench --logs": "use --out DIR.",
    "engine-check --events": "use --kv-events-endpoint.",
    "engine-check --replay": "use --kv-events-replay-endpoint.",
    "--block-size": "use --kv-block-size.",
    "--max-sequence-length": "use --max-seq-len.",
    "--tokenizer-path": "use --model-path.",
    "--engine-speedup": "use --speedup.",
    "--blocks-per-worker": "use --total-kv-blocks.",
    "--engine-log-dir": "use --log-dir.",
    "--leader-lease-s": "use --leader-lease-ms, with 1,000 times the value.",
    "--backend-url": "use --engine-url.",
    "--model-name": "use --served-model-name.",
    "worker --model": "use --served-model-name.",
    "--retention-bytes": "use --journal-retention-bytes.",
    "--retention-ms": "use --journal-retention-ms.",
    "--engine-start-timeout-s": "use --start-timeout-ms, with 1,000 times the value.",
    "--start-timeout-s": "use --start-timeout-ms, with 1,000 times the value.",
    "--queue-limit": "use --max-queue-requests.",
    "--queue-prompt-tokens": "use --max-queue-prompt-tokens.",
    "--http-connections": "use --max-connections.",
    "--http-connections-per-address": "use --max-connections-per-address.",
    "--drain-timeout-ms": "use --shutdown-timeout-ms.",
    "--kubernetes-account-dir": "outside of a pod, use --kubernetes-api with the address of kubectl proxy.",
    "--loras": "use --lora, once for each adapter.",
    "engine-check --record": "use --out FILE.",
    "--retention": "a request sets how long its blocks stay (nvext.kv_cache_retention_config); nothing is learned.",
}
"""Option as it was typed, such as ``--feed-interval-ms``, to one sentence: what to use.

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
            return _refusal(option, reason)
    for entry in FORMER_SETTINGS:
        of_command, _, option = entry.rpartition(" ")
        variable = "POOLGRID_" + option[2:].replace("-", "_").upper()
        # The variable of an option that one command lost may be meant for another command.
        if not of_command and variable in environment:
            return _refusal(f"{option} ({variable})", FORMER_SETTINGS[entry])
    return ""


def former_name(command: str, name: str) -> str:
    """Return the line that refuses a name in a settings file; empty when it never was a setting."""
    option = "--" + name.replace("_", "-")
    reason = _reason(command, option)
    return _refusal(option, reason) if reason else ""


def _refusal(given: str, reason: str) -> str:
    return f"{given}: removed. {reason[0].upper()}{reason[1:]}"


def _reason(command: str, option: str) -> str:
    return FORMER_SETTINGS.get(f"{command} {option}") or FORMER_SETTINGS.get(option, "")
