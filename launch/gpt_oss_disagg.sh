#!/usr/bin/env bash
# gpt-oss-120b, prefill apart from decode, with its own reasoning and tool-call format.
#   MODEL_PATH=/models/gpt-oss-120b PREFILL_CUDA_VISIBLE_DEVICES=0,1,2,3 DECODE_CUDA_VISIBLE_DEVICES=4,5,6,7 \
#       launch/gpt_oss_disagg.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$repository/engine_configs/gpt-oss-120b/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$repository/engine_configs/gpt-oss-120b/decode.yaml}"

start_router --policy kv --reasoning-parser harmony --tool-call-parser harmony
begin_worker prefill-0 prefill "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS"
begin_worker decode-0 decode "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS"
await prefill-0
await decode-0
serve
