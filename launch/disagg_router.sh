#!/usr/bin/env bash
# Two prefill workers, chosen by what each has in its KV cache, and one decode worker, whose cache nobody asks for.
#   MODEL_PATH=/models/Qwen3-0.6B launch/disagg_router.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$configs/qwen3/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$configs/qwen3/decode.yaml}"
up --prefill 2 --decode 1 --policy kv --part-option decode.no-publish-events-and-metrics "$@"
