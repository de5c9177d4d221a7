#!/usr/bin/env bash
# One aggregated worker that takes images and encodes them itself.
#   MODEL_PATH=/models/Qwen2.5-VL-7B-Instruct launch/agg_multimodal.sh
: "${MODALITY:=multimodal}"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${AGG_ENGINE_ARGS:=$configs/qwen2.5-vl/agg.yaml}"
up --workers 1 --policy kv "$@"
