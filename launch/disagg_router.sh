#!/usr/bin/env bash
# Two prefill workers, chosen by what each has in its KV cache, and one decode worker.
#   MODEL_PATH=/models/Qwen3-0.6B PREFILL_2_CUDA_VISIBLE_DEVICES=2 launch/disagg_router.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$repository/engine_configs/qwen3/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$repository/engine_configs/qwen3/decode.yaml}"
: "${PREFILL_2_CUDA_VISIBLE_DEVICES:=2}"

start_router --policy kv
begin_worker prefill-0 prefill "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS"
begin_worker prefill-1 prefill "$PREFILL_2_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS"
begin_worker decode-0 decode "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS"
await prefill-0
await prefill-1
await decode-0
serve
