#!/usr/bin/env bash
# One aggregated worker behind a router that takes the least loaded worker.
#   MODEL_PATH=/models/Qwen3-0.6B launch/agg.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${AGG_ENGINE_ARGS:=$configs/qwen3/agg.yaml}"
up --workers 1 --policy least-loaded "$@"
