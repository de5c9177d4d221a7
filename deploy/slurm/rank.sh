#!/usr/bin/env bash
# One task of a worker whose engine spans nodes; srun or mpirun starts it once for each GPU:
#   srun --nodes=2 --ntasks=16 --mpi=pmix --kill-on-bad-exit=1 deploy/slurm/rank.sh poolgrid worker --engine trtllm ...
# TensorRT-LLM's launcher makes a rank of each task, and starts the command in the first one. It divides words at spaces.
if [[ $1 == --first ]]; then
    shift
    # The launcher leaves its ranks behind when the command fails. This ends the task, and with it the others.
    "$@" || kill -KILL 0
    exit
fi
# srun and mpirun signal all processes at once. Requests that finish need all ranks, so the worker alone takes the signal.
trap '' TERM INT
exec "${RANK_LAUNCHER:-trtllm-llmapi-launch}" "${BASH_SOURCE[0]}" --first "$@"
