#!/usr/bin/env bash
# One aggregated worker that takes images and encodes them itself.
#   MODEL_PATH=/models/Llama-4-Scout-17B-16E-Instruct AGG_CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 launch/agg_multimodal.sh
: "${MODALITY:=multimodal}"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${AGG_ENGINE_ARGS:=$repository/engine_configs/llama4-scout/agg.yaml}"

start_router --policy kv
begin_worker worker-0 prefill_and_decode "$AGG_CUDA_VISIBLE_DEVICES" "$AGG_ENGINE_ARGS"
await worker-0
serve
