"""Options by the names that Dynamo's documents, engines and recipes have: translated, or refused with what to use.

An entry is an option of ours, when it begins with dashes, or the sentence of the refusal. To one that ends with an
equals sign the value is added. ``COMMAND --option`` holds
for one command. A value is translated by ``VALUES`` and ``SENTENCES``. Names of Dynamo that our options have too are
not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_DIFFUSION = "give the argument of VisualGenArgs in --extra-engine-args; clients set what a request may set."
_MODEL_NAME = "use --model-path, and --served-model-name where clients know the model by another name."
_OF_ROUTERS = "routing is an option of poolgrid router: give it there."
_TLS = "ZMQ has keys of its own, --curve-key and --curve-allowed-keys; HTTP has --tls-certificate and --tls-key."
_NATS_TLS = "use --nats-tls-ca, --nats-tls-certificate and --nats-tls-key."
_RESULTS = "the router keeps results and serves their URLs; --data-dir keeps them over restarts."
_INDEX = "the index lives in every router; --event-plane and --data-dir keep it over restarts."
_COST = "costs are milliseconds, which have no weights."
_QUEUE = "use --max-queue-requests, --queue-order and --worker-queue-factor."
_BUSY = "busy workers are known by their load reports; use --worker-queue-factor and --max-queue-requests."

OPTIONS: dict[str, str] = {
    # workers
    "worker --model": "--model-path",
    "--dyn-reasoning-parser": "--reasoning-parser",
    "--dyn-tool-call-parser": "--tool-call-parser",
    "--custom-jinja-template": "--chat-template",
    "worker --publish-kv-events": "--publish-events-and-metrics",
    "worker --no-publish-kv-events": "--no-publish-events-and-metrics",
    "worker --use-kv-events": "--publish-events-and-metrics",
    "worker --no-use-kv-events": "--no-publish-events-and-metrics",
    "worker --enable-multimodal": "--modality=multimodal",
    "worker --no-enable-multimodal": "--modality=text",
    "worker --allowed-local-media-path": "give --allowed-local-media-path to poolgrid router, which reads the media.",
    "worker --disaggregation-strategy": "the router sends a prompt to a prefill worker first; --disaggregation-mode is "
    "the worker's part.",
    "worker --pipeline-parallel-size": "--engine-argument=pipeline_parallel_size=",
    "worker --expert-parallel-size": "--engine-argument=moe_expert_parallel_size=",
    "worker --gpus-per-node": "--engine-argument=gpus_per_node=",
    "worker --max-beam-width": "--engine-argument=max_beam_width=",
    "worker --load-format": "--engine-argument=load_format=",
    "worker --migration-limit": "give --migration-limit to poolgrid router.",
    "worker --dyn-default-thinking-mode": "clients set chat_template_kwargs; --chat-template changes the default.",
    "worker --conversation-affinity": "the router chooses the rank, by what each has cached.",
    "worker --conversation-affinity-dp-rank-source": "the router chooses the rank.",
    "worker --model-loader-extra-config": "give gms_config in --extra-engine-args or --override-engine-args.",
    "worker --event-buffer-max-size": "give kv_cache_config.event_buffer_max_size in --extra-engine-args or "
    "--override-engine-args.",
    "worker --frontend-decoding": "images are decoded by the engine.",
    "worker --multimodal-embedding-cache-capacity-gb": "encode workers keep 256 MiB of embeddings.",
    "worker --engine-request-limit": "use --max-batch-size, and --worker-queue-factor of poolgrid router.",
    "worker --health-check-payload": "the health check is a generation of one token.",
    "worker --kv-state-endpoint": "events are those of the worker's own endpoint.",
    "worker --fpm-trace": "use --trace-endpoint.",
    **dict.fromkeys(
        ("worker --endpoint-types", "worker --dyn-endpoint-types"), "a model is served at every endpoint of the API."
    ),
    **dict.fromkeys(
        (
            *("worker --quant-algo", "worker --quant-dynamic", "worker --no-quant-dynamic", "worker --torch-dtype"),
            *("worker --enable-teacache", "worker --no-enable-teacache", "worker --teacache-thresh"),
            *("worker --teacache-use-ret-steps", "worker --no-teacache-use-ret-steps", "worker --attn-backend"),
            *("worker --disable-torch-compile", "worker --enable-fullgraph", "worker --enable-cuda-graph"),
            *("worker --dit-ulysses-size", "worker --dit-ring-size", "worker --dit-cfg-size"),
            *("worker --enable-layerwise-nvtx-marker", "worker --skip-warmup", "worker --default-height"),
            *("worker --default-width", "worker --default-num-inference-steps", "worker --default-guidance-scale"),
            *("worker --default-num-frames", "worker --default-num-images-per-prompt"),
        ),
        _DIFFUSION,
    ),
    "worker --output-modalities": "use --modality image_diffusion or video_diffusion.",
    "worker --media-output-fs-url": _RESULTS,
    "worker --media-output-http-url": _RESULTS,
    "worker --revision": "give --model-path ORG/MODEL@REVISION.",
    "--dyn-structural-tag": "tool calls are guided when tool_choice requires one.",
    "--dyn-enable-structural-tag": "tool calls are guided when tool_choice requires one.",
    "--dyn-structural-tag-scope": "tool calls are guided when tool_choice requires one.",
    "--dyn-structural-tag-schema": "tool calls are guided when tool_choice requires one.",
    # every process
    "--store-kv": "there is no etcd: use --names directory, nats or kubernetes, or give addresses.",
    "--discovery-backend": "there is no etcd: use --names directory, nats or kubernetes, or give addresses.",
    "--request-plane": "requests travel over ZMQ on TCP; tcp is accepted.",
    "--response-plane": "answers travel over ZMQ on TCP; tcp is accepted.",
    "--durable-kv-events": "--event-plane=nats",
    "--no-durable-kv-events": "",
    "--exclude-tools-when-tool-choice-none": "",
    "--no-exclude-tools-when-tool-choice-none": "tool_choice none always leaves the tools out of the prompt.",
    "--dump-config-to": "use poolgrid worker --print-engine-args, or poolgrid up --dry-run --json.",
    **dict.fromkeys(
        (
            "--tcp-tls-cert-path",
            "--tcp-tls-key-path",
            "--tcp-tls-ca-cert-path",
            "--tcp-tls-insecure",
            "--tcp-tls-server-name",
            "--tcp-tls-handshake-timeout",
            "--tcp-tls-client-cert-path",
            "--tcp-tls-client-key-path",
            "--tcp-tls-client-ca-cert-path",
        ),
        _TLS,
    ),
    **dict.fromkeys(
        (
            "--nats-tls-ca-cert-path",
            "--nats-tls-insecure",
            "--nats-tls-client-cert-path",
            "--nats-tls-client-key-path",
        ),
        _NATS_TLS,
    ),
    # routers
    "router --router-mode": "--policy",
    "up --router-mode": "--policy",
    "router --http-host": "--host",
    "router --http-port": "--port",
    "global-router --http-host": "--host",
    "global-router --http-port": "--port",
    "up --http-host": "--host",
    "up --http-port": "--port",
    "up --model": "--model-path",
    "router --tls-cert-path": "--tls-certificate",
    "router --tls-key-path": "--tls-key",
    "router --router-temperature": "policy kv takes the least cost; remove this option.",
    "router --kv-cache-block-size": "the block size is that of the workers.",
    "router --use-kv-events": "",
    "router --kv-events": "",
    "router --router-kv-events": "",
    **dict.fromkeys(
        ("router --no-use-kv-events", "router --no-kv-events", "router --no-router-kv-events"), "--policy=approximate"
    ),
    "router --router-ttl": "policy approximate assumes for 120 s that a worker keeps a prompt.",
    "router --router-ttl-secs": "policy approximate assumes for 120 s that a worker keeps a prompt.",
    **dict.fromkeys(
        (
            *("router --kv-overlap-score-weight", "router --router-kv-overlap-score-weight"),
            *("router --router-kv-overlap-score-credit", "router --router-kv-overlap-score-credit-decay"),
            *("router --router-prefill-load-scale", "router --router-prefill-load-model"),
        ),
        _COST,
    ),
    **dict.fromkeys(
        ("router --router-host-cache-hit-weight", "router --router-disk-cache-hit-weight"),
        "a block on the host counts 0.75 of one on the device, a block on disk 0.25.",
    ),
    **dict.fromkeys(
        ("router --shared-cache-multiplier", "router --shared-cache-type"),
        "an external cache is not asked; blocks that engines report on the host or on disk count.",
    ),
    **dict.fromkeys(
        (
            *("router --router-reset-states", "router --router-snapshot-threshold", "router --serve-indexer"),
            *("router --use-remote-indexer", "router --router-event-threads"),
        ),
        _INDEX,
    ),
    "router --router-replica-sync": "",
    "router --no-router-replica-sync": "routers of a pool follow one event stream and agree without an option.",
    **dict.fromkeys(
        ("router --router-policy", "router --router-policy-config"),
        "use --policy; a policy of your own is a Python package with an entry point in poolgrid.policies.",
    ),
    **dict.fromkeys(
        ("router --router-session-affinity-ttl-secs", "router --router-session-affinity-mode"),
        "policy kv sends a session's turns to the worker that has its cache, for as long as the cache is there.",
    ),
    **dict.fromkeys(
        ("router --router-conditional-prefill", "router --router-conditional-prefill-policy"),
        "use --legs.",
    ),
    "router --router-conditional-prefill-bypass-below-tokens": "use --legs, or --local-prefill-max-tokens of poolgrid "
    "global-router.",
    "router --router-track-active-blocks": "",
    "router --router-track-prefill-tokens": "",
    **dict.fromkeys(
        (
            *("router --no-router-track-active-blocks", "router --no-router-track-prefill-tokens"),
            *("router --router-track-output-blocks", "router --no-router-track-output-blocks"),
            *("router --router-assume-kv-reuse", "router --no-router-assume-kv-reuse"),
            "router --router-predicted-ttl-secs",
        ),
        "load is what workers report and routers have sent since.",
    ),
    "router --router-min-initial-workers": "a router is ready with the first worker of each role; check /ready.",
    "router --enforce-disagg": "",
    "router --admission-control": _QUEUE,
    "router --migration-max-seq-len": "sequences of any length move; --migration-limit counts the moves.",
    **dict.fromkeys(("router --model-name", "global-router --model-name"), _MODEL_NAME),
    **dict.fromkeys(("router --router-queue-threshold", "router --router-queue-policy"), _QUEUE),
    **dict.fromkeys(
        (
            "router --busy-threshold",
            "router --active-decode-blocks-threshold",
            "router --active-prefill-tokens-threshold",
            "router --active-prefill-tokens-threshold-frac",
        ),
        _BUSY,
    ),
    "router --namespace-prefix": "use --namespace.",
    "router --metrics-prefix": "metrics begin with poolgrid_.",
    "router --kserve-grpc-server": "KServe's gRPC is not served; use the OpenAI API, or --ext-proc-port for gateways.",
    "router --grpc-metrics-port": "KServe's gRPC is not served.",
    "router --enable-anthropic-api": "",
    "router --load-aware": "",
    "router --trust-remote-code": "routers run no code of a model; give it to poolgrid worker.",
    "router --strip-anthropic-preamble": "prompts are rendered as they are.",
    "router --tokenizer": "fastokens is used where it is installed.",
    "router --dyn-chat-processor": "chats are rendered by the model's own template.",
    "router --interactive": "use poolgrid top, or any client of the OpenAI API.",
    **dict.fromkeys(
        (
            *("router --enable-streaming-tool-dispatch", "router --enable-streaming-reasoning-dispatch"),
            *("router --dyn-debug-perf", "router --dyn-preprocess-workers"),
        ),
        "calls and reasoning stream as the model writes them; --http-workers adds processes.",
    ),
    **dict.fromkeys(
        ("global-router --default-ttft-target", "global-router --default-ttft-target-ms"), "--ttft-target-ms"
    ),
    **dict.fromkeys(("global-router --default-itl-target", "global-router --default-itl-target-ms"), "--itl-target-ms"),
    "global-router --component-name": "clients reach a global router by its URL; it has no component name.",
    "global-router --revision": "give --model-path ORG/MODEL@REVISION.",
    **dict.fromkeys(
        ("global-router --kv-cache-block-size", "global-router --context-length"), "the pools' workers report it."
    ),
    # vLLM's and SGLang's name for the block size, and that of published recipes for the servers behind a pool
    "up --block-size": "--kv-block-size",
    "worker --block-size": "--kv-block-size",
    "up --front": "--engine-url",
    **dict.fromkeys(
        ("up --worker-urls", "router --worker-urls", "up --backends", "router --backends"),
        "name engine servers with poolgrid up --engine-url URL --engine-url URL.",
    ),
    "router --engine-url": "poolgrid up --engine-url URL starts a router with what follows the server.",
}
OPTIONS |= {
    entry.replace("router ", "worker ", 1): _OF_ROUTERS
    for entry in OPTIONS
    if entry.startswith(("router --router-", "router --no-router-"))
}
"""Option of Dynamo to one of ours, to the sentence that refuses it, or to nothing when it asks for what is there."""

FLAGS = frozenset(
    option.rpartition(" ")[2]
    for option, meaning in OPTIONS.items()
    if not meaning
    or ("=" in meaning and not meaning.endswith("="))
    or meaning.lstrip("-").startswith(("publish", "no-publish"))
)
"""Options without a value."""

VALUES: dict[str, dict[str, str]] = {
    "--router-mode": {
        "power-of-two": "least-loaded",
        "least-loaded": "least-loaded",
        "direct": "",
        "device-aware-weighted": "",
    },
    "--connector": {"null": "none"},
}
"""Values of Dynamo's options with our names for them; an empty one is refused."""

INERT = {"--request-plane": ("tcp",), "--response-plane": ("tcp",)}
"""Values that ask for what is there."""

VARIABLES = {
    prefix + option[2:].replace("-", "_").upper(): f"{command} {option}"
    for command, prefix, options in (
        (
            "worker",
            "DYN_TRTLLM_",
            (
                *("--model", "--served-model-name", "--tensor-parallel-size", "--enable-attention-dp"),
                *("--kv-block-size", "--max-batch-size", "--max-num-tokens", "--max-seq-len", "--modality"),
                *("--free-gpu-memory-fraction", "--extra-engine-args", "--override-engine-args"),
                *("--publish-kv-events", "--disaggregation-mode", "--enable-multimodal", "--encode-endpoint"),
                *("--max-file-size-mb", "--guided-decoding-backend", "--allowed-local-media-path"),
                *("--pipeline-parallel-size", "--expert-parallel-size", "--gpus-per-node", "--max-beam-width"),
                *("--load-format", "--model-loader-extra-config"),
            ),
        ),
        (
            "global-router",
            "DYN_GLOBAL_ROUTER_",
            (
                *("--config", "--model-path", "--model-name", "--default-ttft-target", "--default-ttft-target-ms"),
                *("--default-itl-target", "--default-itl-target-ms"),
            ),
        ),
        ("router", "DYN_", ("--router-mode",)),
    )
    for option in options
}
"""Variables of Dynamo's TensorRT-LLM worker, global router and frontend; they mean the option of a command, and the
command line wins."""

REFUSED_VARIABLES = dict.fromkeys(
    ("DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR", "DYN_ENABLE_TEST_LOGITS_PROCESSOR"),
    "Use --logits-processors NAME=package.module:factory.",
)
"""Variables of that worker that change answers, and what does it here."""


def in_our_words(command: str, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command line with Dynamo's options replaced; raises ``ValueError`` with the line that refuses one."""
    engine = environment.get("POOLGRID_ENGINE", "simulated")
    for at, word in enumerate(words):
        if word.startswith("--engine=") or words[at - 1 : at] == ["--engine"]:
            engine = word.removeprefix("--engine=")
    ours: list[str] = []
    if command != "worker" or engine == "trtllm":
        for variable, word in _of_environment(command, environment):
            try:
                ours += _replaced(command, [word])
            except ValueError as error:
                raise ValueError(str(error).replace(word.partition("=")[0], variable, 1)) from None
    return ours + _replaced(command, words)


def _replaced(command: str, given: Sequence[str]) -> list[str]:
    ours: list[str] = []
    at = 0
    while at < len(given):
        name, equals, value = given[at].partition("=")
        at += 1
        meaning = OPTIONS.get(f"{command} {name}", OPTIONS.get(name))
        if meaning is None and name not in VALUES:
            ours.append(name + equals + value)
            continue
        if name not in FLAGS and not equals and at < len(given):
            value, equals = given[at], "="
            at += 1
        if name in INERT and value in INERT[name]:
            continue
        if meaning is not None and meaning[:2] != "--":
            if meaning:
                raise ValueError(f"{name}: {meaning[0].upper()}{meaning[1:]}")
            continue
        translated = VALUES.get(name, {}).get(value, value)
        if equals and value and not translated:
            raise ValueError(f"{name} {value}: no policy does this; use kv, round-robin, random or least-loaded.")
        ours.append((meaning or name).rstrip("=") + equals + translated)
    return ours


def _of_environment(command: str, environment: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Return an option for each variable that is set."""
    for variable, refusal in REFUSED_VARIABLES.items():
        if command == "worker" and environment.get(variable, "") not in ("", "0"):
            raise ValueError(f"{variable}: {refusal}")
    for variable, entry in VARIABLES.items():
        value = environment.get(variable, "")
        of, option = entry.split()
        ours = OPTIONS.get(entry, option).partition("=")[0].removeprefix("--").replace("-", "_").upper()
        if of != command or not value or f"POOLGRID_{ours}" in environment:
            continue
        if option in FLAGS or option == "--enable-attention-dp":
            on = value.strip().lower() in ("1", "true", "on", "yes")
            yield variable, option if on else f"--no-{option[2:]}"
        else:
            yield variable, f"{option}={value}"
