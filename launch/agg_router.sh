#!/usr/bin/env bash
# Two aggregated workers behind a router that knows what each has in its KV cache.
#   MODEL_PATH=/models/Qwen3-0.6B launch/agg_router.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${AGG_ENGINE_ARGS:=$configs/qwen3/agg.yaml}"
up --workers 2 --policy kv "$@"
