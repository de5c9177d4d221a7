"""Options by the names that Dynamo's documents, engines and recipes have: translated, or refused with what to use.

An entry is an option of ours, when it begins with dashes, or the sentence of the refusal. ``COMMAND --option`` holds
for one command. A value is translated by ``VALUES`` and ``SENTENCES``. Names of Dynamo that our options have too are
not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_IN_ENGINE_FILE = "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args."
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
    "worker --migration-limit": "give --migration-limit to poolgrid router.",
    "worker --dyn-default-thinking-mode": "clients set chat_template_kwargs; --chat-template changes the default.",
    "worker --conversation-affinity": "the router chooses the rank, by what each has cached.",
    "worker --conversation-affinity-dp-rank-source": "the router chooses the rank.",
    "worker --model-loader-extra-config": _IN_ENGINE_FILE,
    "worker --pipeline-parallel-size": _IN_ENGINE_FILE,
    "worker --expert-parallel-size": _IN_ENGINE_FILE,
    "worker --gpus-per-node": _IN_ENGINE_FILE,
    "worker --max-beam-width": _IN_ENGINE_FILE,
    "worker --load-format": _IN_ENGINE_FILE,
    "worker --event-buffer-max-size": _IN_ENGINE_FILE,
    "worker --frontend-decoding": "images are decoded by the engine.",
    "worker --multimodal-embedding-cache-capacity-gb": "encode workers keep 256 MiB of embeddings.",
    "worker --engine-request-limit": "use --max-batch-size, and --worker-queue-factor of poolgrid router.",
    "worker --health-check-payload": "the health check is a generation of one token.",
    "worker --kv-state-endpoint": "events are those of the worker's own endpoint.",
    "worker --fpm-trace": "use --trace-endpoint.",
    "worker --endpoint-types": "a model is served at every endpoint of the API.",
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
    "router --router-temperature": "policy kv takes the least cost.",
    "router --kv-cache-block-size": "the block size is that of the workers.",
    "router --use-kv-events": "",
    "router --kv-events": "",
    "router --router-kv-events": "",
    **dict.fromkeys(
        ("router --no-use-kv-events", "router --no-kv-events", "router --no-router-kv-events"), "--policy=approximate"
    ),
    "router --router-ttl": "policy approximate assumes for 120 s that a worker keeps a prompt.",
    "router --router-ttl-secs": "policy approximate assumes for 120 s that a worker keeps a prompt.",
    **dict.fromkeys(("router --kv-overlap-score-weight", "router --router-kv-overlap-score-weight"), _COST),
    **dict.fromkeys(
        ("router --router-reset-states", "router --router-snapshot-threshold", "router --serve-indexer"), _INDEX
    ),
    "router --router-replica-sync": "routers of a pool follow one event stream and need no such option.",
    **dict.fromkeys(("router --router-queue-threshold", "router --router-queue-policy"), _QUEUE),
    **dict.fromkeys(
        (
            "router --busy-threshold",
            "router --active-decode-blocks-threshold",
            "router --active-prefill-tokens-threshold",
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
    "global-router --default-ttft-target": "set default_ttft_target in the document.",
    "global-router --default-itl-target": "set default_itl_target in the document.",
    # vLLM's and SGLang's name for the block size, and that of published recipes for the servers behind a pool
    "up --block-size": "--kv-block-size",
    "worker --block-size": "--kv-block-size",
    "up --front": "--engine-url",
}
"""Option of Dynamo to one of ours, to the sentence that refuses it, or to nothing when it asks for what is there."""

FLAGS = frozenset(
    option.rpartition(" ")[2]
    for option, meaning in OPTIONS.items()
    if not meaning or "=" in meaning or meaning.lstrip("-").startswith(("publish", "no-publish"))
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
    "DYN_TRTLLM_" + option[2:].replace("-", "_").upper(): option
    for option in (
        *("--model", "--served-model-name", "--tensor-parallel-size", "--enable-attention-dp", "--kv-block-size"),
        *("--max-batch-size", "--max-num-tokens", "--max-seq-len", "--free-gpu-memory-fraction", "--modality"),
        *("--extra-engine-args", "--override-engine-args", "--publish-kv-events", "--disaggregation-mode"),
        *("--enable-multimodal", "--encode-endpoint", "--max-file-size-mb", "--guided-decoding-backend"),
        *("--allowed-local-media-path", "--pipeline-parallel-size", "--expert-parallel-size", "--gpus-per-node"),
        *("--max-beam-width", "--load-format"),
    )
}
"""Variables of Dynamo's TensorRT-LLM worker; they mean its options, and the command line wins."""


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
    if command == "worker" and engine == "trtllm":
        for variable in REFUSED_VARIABLES:
            if environment.get(variable, "") not in ("", "0"):
                raise ValueError(f"{variable}: {REFUSED_VARIABLES[variable]}")
    given = [*_of_environment(environment), *words] if command == "worker" and engine == "trtllm" else list(words)
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
        ours.append((meaning or name) + equals + translated)
    return ours


def _of_environment(environment: Mapping[str, str]) -> Iterable[str]:
    for variable, option in VARIABLES.items():
        value = environment.get(variable, "")
        if not value or ("POOLGRID" + variable.removeprefix("DYN_TRTLLM")) in environment:
            continue
        if option in FLAGS or option == "--enable-attention-dp":
            on = value.strip().lower() in ("1", "true", "on", "yes")
            yield option if on else f"--no-{option[2:]}"
        else:
            yield f"{option}={value}"
