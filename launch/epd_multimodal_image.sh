#!/usr/bin/env bash
# Encode, prefill and decode for a vision model that brings its own chat template: images by URL and data URL, and no
# local files.
#   MODEL_PATH=/models/llava-v1.6-mistral-7b-hf launch/epd_multimodal_image.sh
: "${CUSTOM_TEMPLATE:=$(dirname "${BASH_SOURCE[0]}")/../engine_configs/llava-v1.6-mistral-7b-hf/template.jinja}"
ALLOWED_LOCAL_MEDIA_PATH=
source "$(dirname "${BASH_SOURCE[0]}")/epd.sh"
run_epd "$@"
