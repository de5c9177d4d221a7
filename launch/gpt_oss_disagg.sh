#!/usr/bin/env bash
# gpt-oss-120b on eight H100 or H200, prefill apart from decode, with its own reasoning and tool-call format. What a file
# says is overridden by PREFILL_ and DECODE_ MAX_BATCH_SIZE, MAX_NUM_TOKENS, FREE_GPU_MEMORY_FRACTION,
# TENSOR_PARALLEL_SIZE and MOE_EXPERT_PARALLEL_SIZE. On Blackwell, with five GPUs:
#   PREFILL_ENGINE_ARGS=engine_configs/gpt-oss-120b/blackwell/prefill.yaml \
#       DECODE_ENGINE_ARGS=engine_configs/gpt-oss-120b/blackwell/decode.yaml \
#       MODEL_PATH=/models/gpt-oss-120b launch/gpt_oss_disagg.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${PREFILL_ENGINE_ARGS:=$configs/gpt-oss-120b/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$configs/gpt-oss-120b/decode.yaml}"
up --prefill 1 --decode 1 --policy kv --part-option router.reasoning-parser=harmony --part-option router.tool-call-parser=harmony "$@"
