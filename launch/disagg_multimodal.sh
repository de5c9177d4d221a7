#!/usr/bin/env bash
# A prefill worker that takes images and encodes them itself, and a decode worker that never sees them.
#   MODEL_PATH=/models/llava-v1.6-mistral-7b-hf launch/disagg_multimodal.sh
: "${MODALITY:=multimodal}"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
llava=$configs/llava-v1.6-mistral-7b-hf
: "${CUSTOM_TEMPLATE:=$llava/template.jinja}"
: "${PREFILL_ENGINE_ARGS:=$llava/prefill.yaml}"
: "${DECODE_ENGINE_ARGS:=$llava/decode.yaml}"
up --prefill 1 --decode 1 --policy kv "$@"
