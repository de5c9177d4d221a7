# Shared by the launch scripts; sourced, not run: turns their variables into one call of `poolgrid up`, which plans,
# starts, watches and ends everything.
# shellcheck shell=bash

set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
configs=$repository/engine_configs

# -- what users set -----------------------------------------------------------------------------------------------------
: "${ENGINE:=trtllm}"                        # trtllm, or fake: the contract fake, without a GPU
: "${HOST:=127.0.0.1}"                       # address that everything listens on
: "${PORT:=8000}"                            # port of the OpenAI API; 0 = any free one
: "${START_TIMEOUT_S:=1800}"                 # a large model may take half an hour to load
: "${LOG_LEVEL:=info}"
: "${LOG_DIR:=poolgrid-logs}"                # a file for each worker
: "${MODALITY:=text}"
: "${ENCODE_ENDPOINT:=poolgrid.encode.generate}"
: "${ALLOWED_LOCAL_MEDIA_PATH:=}"            # directory below which requests may name media files; empty = none
: "${MAX_FILE_SIZE_MB:=50}"
: "${CUSTOM_TEMPLATE:=}"                     # Jinja chat template that replaces the model's own
: "${OTEL_EXPORTER_OTLP_TRACES_ENDPOINT:=http://127.0.0.1:4317}"  # with --enable-otel: where engines send their spans
: "${OTEL_SERVICE_NAME:=poolgrid}"

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

case $ENGINE in
    trtllm)
        : "${MODEL_PATH:?MODEL_PATH is not set: it names the directory of the model, or ORG/MODEL on a hub}"
        ;;
    fake)
        # The real chain (front end, consolidator, events, modes) over the contract fake of TensorRT-LLM.
        : "${MODEL_PATH:=$repository/src/poolgrid/server/frontend/models/tiny}"
        : "${GPUS:=0,1,2,3,4,5,6,7}"         # pretended
        export PYTHONPATH="$repository/tests/fakes${PYTHONPATH:+:$PYTHONPATH}"
        ;;
    *) die "ENGINE is '$ENGINE', allowed are trtllm and fake" ;;
esac
# A hub's name is what clients ask for; a directory is known by its last part.
if [[ -z ${SERVED_MODEL_NAME:-} ]]; then
    SERVED_MODEL_NAME=$(basename "$MODEL_PATH")
    [[ -d $MODEL_PATH || ! $MODEL_PATH =~ ^[^/.~][^/]*/[^/]+$ ]] || SERVED_MODEL_NAME=${MODEL_PATH%@*}
fi

if [[ -n ${POOLGRID:-} ]]; then
    read -r -a poolgrid <<<"$POOLGRID"
else
    poolgrid=(poolgrid)
fi
command -v "${poolgrid[0]}" >/dev/null || die "${poolgrid[0]} is not found: install poolgrid, or set POOLGRID to its command"

# overrides PREFIX: arguments that override the engine file of a kind, as a JSON object, from variables such as
# PREFILL_MAX_BATCH_SIZE; empty when none is set.
overrides() {
    local name variable pairs=()
    for name in max_batch_size max_num_tokens tensor_parallel_size moe_expert_parallel_size; do
        variable=$1_${name^^}
        [[ -z ${!variable:-} ]] || pairs+=("\"$name\": ${!variable}")
    done
    variable=$1_FREE_GPU_MEMORY_FRACTION
    [[ -z ${!variable:-} ]] || pairs+=("\"kv_cache_config\": {\"free_gpu_memory_fraction\": ${!variable}}")
    [[ -z ${otel:-} ]] || pairs+=("\"otlp_traces_endpoint\": \"$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT\"" '"return_perf_metrics": true')
    ((${#pairs[@]})) || return 0
    local IFS=,
    printf '{%s}' "${pairs[*]}"
}

# up OPTION...: the pool that the script describes, and what the script was called with.
up() {
    local options=(--engine trtllm --host "$HOST" --port "$PORT" --log-level "$LOG_LEVEL" --log-dir "$LOG_DIR"
        --model-path "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME" --modality "$MODALITY"
        --start-timeout-ms "$((START_TIMEOUT_S * 1000))")
    local rest=() each found kind
    for each in "$@"; do
        if [[ $each == --enable-otel ]]; then
            otel=1
            export OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_SERVICE_NAME
        else
            rest+=("$each")
        fi
    done
    for kind in worker:AGG prefill:PREFILL decode:DECODE encode:ENCODE; do
        found=${kind#*:}_ENGINE_ARGS
        [[ " ${rest[*]} " == *" --${kind%:*}s "* || " ${rest[*]} " == *" --${kind%:*} "* ]] || continue
        [[ -z ${!found:-} ]] || options+=(--engine-args "${kind%:*}=${!found}")
        found=${kind#*:}_CUDA_VISIBLE_DEVICES
        [[ -z ${!found:-} ]] || options+=(--gpus "${kind%:*}=${!found}")
        found=$(overrides "${kind#*:}")
        [[ -z $found ]] || options+=(--part-option "${kind%:*}.override-engine-args=$found")
    done
    [[ -z ${GPUS:-} ]] || options+=(--gpus "$GPUS")
    if [[ $MODALITY == multimodal ]]; then
        options+=(--part-option "worker.max-file-size-mb=$MAX_FILE_SIZE_MB")
        [[ -z $ALLOWED_LOCAL_MEDIA_PATH ]] || options+=(--part-option "router.allowed-local-media-path=$ALLOWED_LOCAL_MEDIA_PATH")
    fi
    [[ -z $CUSTOM_TEMPLATE ]] || options+=(--part-option "router.chat-template=$CUSTOM_TEMPLATE")
    exec "${poolgrid[@]}" up "${options[@]}" "${rest[@]}"
}
