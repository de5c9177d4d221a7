#!/usr/bin/env bash
# Encode, prefill and decode, each on a worker of its own. Requests without media skip the encode worker.
#   MODEL_PATH=/models/llava-v1.6-mistral-7b-hf launch/epd_disagg.sh
source "$(dirname "${BASH_SOURCE[0]}")/epd.sh"
run_epd "$@"
