# Encode, prefill and decode workers of one model; sourced by the epd_ scripts.
# shellcheck shell=bash
: "${MODALITY:=multimodal}"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
llava=$repository/engine_configs/llava-v1.6-mistral-7b-hf
: "${ENCODE_ENGINE_ARGS:=$llava/encode.yaml}"
: "${PREFILL_ENGINE_ARGS:=$llava/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$llava/decode.yaml}"

# run_epd [ROUTER OPTION...]
run_epd() {
    start_router --policy kv "$@"
    begin_worker encode-0 encode "$ENCODE_CUDA_VISIBLE_DEVICES" "$ENCODE_ENGINE_ARGS" --endpoint "$ENCODE_ENDPOINT"
    begin_worker prefill-0 prefill "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS" \
        --encode-endpoint "$ENCODE_ENDPOINT"
    begin_worker decode-0 decode "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS"
    await encode-0
    await prefill-0
    await decode-0
    serve
}
