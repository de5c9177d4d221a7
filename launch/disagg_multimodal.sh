#!/usr/bin/env bash
# A prefill worker that takes images and encodes them itself, and a decode worker that never sees them.
#   MODEL_PATH=/models/Llama-4-Scout-17B-16E-Instruct PREFILL_CUDA_VISIBLE_DEVICES=0,1,2,3 \
#       DECODE_CUDA_VISIBLE_DEVICES=4,5,6,7 launch/disagg_multimodal.sh
: "${MODALITY:=multimodal}"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$repository/engine_configs/llama4-scout/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$repository/engine_configs/llama4-scout/decode.yaml}"

start_router --policy kv
begin_worker prefill-0 prefill "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS"
begin_worker decode-0 decode "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS"
await prefill-0
await decode-0
serve
