#!/usr/bin/env bash
# One prefill worker and one decode worker; every prompt that is not short goes through both.
#   MODEL_PATH=/models/Qwen3-0.6B launch/disagg.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$repository/engine_configs/qwen3/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$repository/engine_configs/qwen3/decode.yaml}"

start_router --policy least-loaded
begin_worker prefill-0 prefill "$PREFILL_CUDA_VISIBLE_DEVICES" "$PREFILL_ENGINE_ARGS"
begin_worker decode-0 decode "$DECODE_CUDA_VISIBLE_DEVICES" "$DECODE_ENGINE_ARGS"
await prefill-0
await decode-0
serve
