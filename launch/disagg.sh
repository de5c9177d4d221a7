#!/usr/bin/env bash
# One prefill worker and one decode worker; every prompt that is not short goes through both.
#   MODEL_PATH=/models/Qwen3-0.6B launch/disagg.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$configs/qwen3/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$configs/qwen3/decode.yaml}"
up --prefill 1 --decode 1 --policy least-loaded "$@"
