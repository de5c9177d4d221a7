# Encode, prefill and decode workers of one model; sourced by the epd_ scripts.
# shellcheck shell=bash
: "${MODALITY:=multimodal}"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
llava=$configs/llava-v1.6-mistral-7b-hf
: "${ENCODE_ENGINE_ARGS:=$llava/encode.yaml}"
: "${PREFILL_ENGINE_ARGS:=$llava/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$llava/decode.yaml}"

# run_epd [OPTION...]
run_epd() {
    up --encode 1 --prefill 1 --decode 1 --policy kv --part-option "encode.endpoint=$ENCODE_ENDPOINT" \
        --part-option "prefill.encode-endpoint=$ENCODE_ENDPOINT" "$@"
}
