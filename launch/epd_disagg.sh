#!/usr/bin/env bash
# Encode, prefill and decode, each on a worker of its own. Requests without media skip the encode worker. The default is
# LLaVA: TensorRT-LLM cannot run the vision part of Llama 4 Scout by itself, so it has no encode workers (its pictures
# are encoded where the prompt is computed: launch/disagg_multimodal.sh with engine_configs/llama4-scout).
#   MODEL_PATH=/models/llava-v1.6-mistral-7b-hf launch/epd_disagg.sh
source "$(dirname "${BASH_SOURCE[0]}")/epd.sh"
run_epd "$@"
