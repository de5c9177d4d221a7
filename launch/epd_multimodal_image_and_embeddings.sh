#!/usr/bin/env bash
# As epd_multimodal_image.sh, and requests may also name image and embedding files (.pt, .safetensors) below a directory.
#   MODEL_PATH=/models/llava-v1.6-mistral-7b-hf ALLOWED_LOCAL_MEDIA_PATH=/data/media \
#       launch/epd_multimodal_image_and_embeddings.sh
: "${ALLOWED_LOCAL_MEDIA_PATH:?ALLOWED_LOCAL_MEDIA_PATH is not set: it names the directory of the embedding files}"
: "${CUSTOM_TEMPLATE:=$(dirname "${BASH_SOURCE[0]}")/../engine_configs/llava-v1.6-mistral-7b-hf/template.jinja}"
source "$(dirname "${BASH_SOURCE[0]}")/epd.sh"
run_epd "$@"
