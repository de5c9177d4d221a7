#!/usr/bin/env bash
# What runs in a step of a job: a function of lib.sh, or `worker`.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# worker ROLE OPTION...: one worker of this task; its name tells its role, node and number.
worker() {
    local role=$1
    shift
    local name="$role-$SLURMD_NODENAME-$SLURM_LOCALID"
    local role_option=("--role=$role")
    if [[ $ENGINE == trtllm ]]; then
        role_option=("--disaggregation-mode=${role/aggregated/prefill_and_decode}")
    fi
    keep "$POOLGRID" worker --engine="$ENGINE" --worker-id="$name" "${role_option[@]}" \
        --consolidator="tcp://$HEAD_ADDRESS:$INGEST_PORT" --host="$BIND" \
        --advertise-host="${ADDRESS:-$SLURMD_NODENAME}" --shutdown-timeout-ms="$((DRAIN_S * 1000))" "$@"
}

# rank ROLE NAME HOST OPTION...: one rank of a worker that spans nodes, in this task; the first, on HOST, is the worker.
rank() {
    local role=$1 name=$2 host=$3
    shift 3
    exec bash "$SCRIPTS/rank.sh" "$POOLGRID" worker --engine="$ENGINE" --worker-id="$name" \
        --disaggregation-mode="${role/aggregated/prefill_and_decode}" \
        --consolidator="tcp://$HEAD_ADDRESS:$INGEST_PORT" --host="$BIND" --advertise-host="$host" \
        --shutdown-timeout-ms="$((DRAIN_S * 1000))" "$@"
}

"$@"
