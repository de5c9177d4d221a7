# Shared by the launch scripts; sourced, not run.
#
# Every part runs in the background with its standard output in a FIFO, whose first line must be its ready line. When a
# part ends, when this script ends and at SIGINT or SIGTERM, all parts are ended: asked first, then by force.
# shellcheck shell=bash

set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# -- what users set -----------------------------------------------------------------------------------------------------
: "${ENGINE:=trtllm}"                        # trtllm, or fake: the contract fake, without a GPU
: "${HOST:=127.0.0.1}"                       # address that everything listens on
: "${PORT:=8000}"                            # port of the OpenAI API; 0 = any free one
: "${START_TIMEOUT_S:=1800}"                 # a large model may take half an hour to load
: "${STOP_TIMEOUT_S:=60}"                    # running requests may finish; after that parts are killed
: "${LOG_LEVEL:=info}"
: "${MODALITY:=text}"
: "${ENCODE_ENDPOINT:=poolgrid.encode.generate}"
: "${ALLOWED_LOCAL_MEDIA_PATH:=}"            # directory below which requests may name media files; empty = none
: "${MAX_FILE_SIZE_MB:=50}"
: "${CUSTOM_TEMPLATE:=}"                     # Jinja chat template that replaces the model's own
: "${AGG_CUDA_VISIBLE_DEVICES:=${CUDA_VISIBLE_DEVICES:-0}}"
: "${PREFILL_CUDA_VISIBLE_DEVICES:=0}"
: "${DECODE_CUDA_VISIBLE_DEVICES:=1}"
: "${ENCODE_CUDA_VISIBLE_DEVICES:=0}"

pids=()
names=()
work_directory=''

say() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

die() {
    say "$@"
    exit 1
}

some_part_runs() {
    local pid
    for pid in "${pids[@]}"; do
        kill -0 "$pid" 2>/dev/null && return 0
    done
    return 1
}

# Ends every part: all are asked at once, whoever is not gone in time is killed.
end_all() {
    local status=$? pid deadline=$((SECONDS + STOP_TIMEOUT_S))
    trap - EXIT
    trap '' INT TERM
    for pid in "${pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    while some_part_runs && ((SECONDS < deadline)); do
        sleep 0.1
    done
    for pid in "${pids[@]}"; do
        kill -KILL "$pid" 2>/dev/null && say "process $pid did not end within $STOP_TIMEOUT_S s and was killed"
    done
    wait
    [[ -z $work_directory ]] || rm -rf "$work_directory"
    exit "$status"
}
trap end_all EXIT
trap 'exit 0' INT TERM
work_directory=$(mktemp -d -t poolgrid-launch-XXXXXX)

case $ENGINE in
    trtllm)
        : "${MODEL_PATH:?MODEL_PATH is not set: it names the directory of the model}"
        ;;
    fake)
        # The real chain (front end, consolidator, events, modes) over the contract fake of TensorRT-LLM.
        : "${MODEL_PATH:=$repository/frontend/models/tiny}"
        export PYTHONPATH="$repository/tests/fakes${PYTHONPATH:+:$PYTHONPATH}"
        ;;
    *) die "ENGINE is '$ENGINE', allowed are trtllm and fake" ;;
esac
: "${SERVED_MODEL_NAME:=$(basename "$MODEL_PATH")}"

if [[ -n ${POOLGRID:-} ]]; then
    read -r -a poolgrid <<<"$POOLGRID"
else
    poolgrid=(poolgrid)
fi
command -v "${poolgrid[0]}" >/dev/null || die "${poolgrid[0]} is not found: install poolgrid, or set POOLGRID to its command"

# start NAME COMMAND...: run a part and wait for its ready line, which is left in $ready_line.
start() {
    begin "$@"
    await "$1"
}

# begin NAME COMMAND...: run a part; await NAME waits for its ready line. Parts that load models load them together.
begin() {
    local name=$1
    shift
    mkfifo "$work_directory/$name"
    "$@" >"$work_directory/$name" &
    pids+=("$!")
    names+=("$name")
    say "$name has process id $!"
}

await() {
    local name=$1 word line='' descriptor
    # A part that dies closes the FIFO, and the read ends.
    exec {descriptor}<"$work_directory/$name"
    if ! read -r -t "$START_TIMEOUT_S" -u "$descriptor" line; then
        die "$name was not ready within $START_TIMEOUT_S s, or ended before; its own words are above"
    fi
    read -r word ready_line <<<"$line"
    [[ $word == ready ]] || die "$name said '$line' where its ready line was expected"
    say "$name is ready"
}

# word KEY: the value of KEY=VALUE in the last ready line.
word() {
    local each
    for each in $ready_line; do
        if [[ $each == "$1="* ]]; then
            printf '%s' "${each#*=}"
            return
        fi
    done
    die "the ready line '$ready_line' does not tell '$1'"
}

# start_router [OPTION...]: the router with its consolidator; sets $url and $ingest.
start_router() {
    local options=(--host "$HOST" --port "$PORT" --log-level "$LOG_LEVEL" --model-path "$MODEL_PATH"
        --model-name "$SERVED_MODEL_NAME")
    if [[ $MODALITY == multimodal ]]; then
        options+=("${router_media_options[@]}")
    fi
    if [[ -n $CUSTOM_TEMPLATE ]]; then
        options+=(--chat-template "$CUSTOM_TEMPLATE")
    fi
    start router "${poolgrid[@]}" router "${options[@]}" "$@"
    url=${ready_line%% *}
    ingest=$(word ingest)
}

router_media_options=(--max-file-size-mb "$MAX_FILE_SIZE_MB")
if [[ -n $ALLOWED_LOCAL_MEDIA_PATH ]]; then
    router_media_options+=(--allowed-local-media-path "$ALLOWED_LOCAL_MEDIA_PATH")
fi

# begin_worker NAME MODE GPUS ENGINE_ARGS [OPTION...]: a TensorRT-LLM worker.
begin_worker() {
    local name=$1 mode=$2 gpus=$3 engine_args=$4
    shift 4
    local options=(--engine trtllm --worker-id "$name" --host "$HOST" --consolidator "$ingest" --log-level "$LOG_LEVEL"
        --model-path "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME"
        --disaggregation-mode "$mode" --modality "$MODALITY")
    if [[ -n $engine_args ]]; then
        options+=(--extra-engine-args "$engine_args")
    fi
    begin "$name" env CUDA_VISIBLE_DEVICES="$gpus" "${poolgrid[@]}" worker "${options[@]}" "$@"
}

# serve: say where the API is, then run until a part ends (status 1) or a signal comes (status 0).
serve() {
    printf 'ready %s\n' "$url"
    local status=0
    wait -n "${pids[@]}" || status=$?
    for at in "${!pids[@]}"; do
        kill -0 "${pids[at]}" 2>/dev/null || say "${names[at]} has ended with status $status; ending everything"
    done
    exit 1
}
