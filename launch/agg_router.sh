#!/usr/bin/env bash
# Two aggregated workers behind a router that knows what each has in its KV cache.
#   MODEL_PATH=/models/Qwen3-0.6B AGG_CUDA_VISIBLE_DEVICES=0 AGG_2_CUDA_VISIBLE_DEVICES=1 launch/agg_router.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${AGG_ENGINE_ARGS:=$repository/engine_configs/qwen3/agg.yaml}"
: "${AGG_2_CUDA_VISIBLE_DEVICES:=1}"

start_router --policy kv
begin_worker worker-0 prefill_and_decode "$AGG_CUDA_VISIBLE_DEVICES" "$AGG_ENGINE_ARGS"
begin_worker worker-1 prefill_and_decode "$AGG_2_CUDA_VISIBLE_DEVICES" "$AGG_ENGINE_ARGS"
await worker-0
await worker-1
serve
