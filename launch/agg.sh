#!/usr/bin/env bash
# One aggregated worker behind a router that takes the least loaded worker.
#   MODEL_PATH=/models/Qwen3-0.6B launch/agg.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${AGG_ENGINE_ARGS:=$repository/engine_configs/qwen3/agg.yaml}"

start_router --policy least-loaded
begin_worker worker-0 prefill_and_decode "$AGG_CUDA_VISIBLE_DEVICES" "$AGG_ENGINE_ARGS"
await worker-0
serve
