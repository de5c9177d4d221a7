# Functions that the job scripts share. Each is a bash script for sbatch, in the folder of this file.

# keep COMMAND...: run a command in a step, and again when it fails, after 1 s, 2 s, and so on up to 15 s. Status 0 (it
# was told to end) and 2 (wrong arguments) end it. Slurm signals all processes of a step, so nothing is passed on here:
# a second signal would end a worker without its drain.
keep() {
    local pause=1 started status stopping=
    trap 'stopping=yes' TERM INT
    while :; do
        started=$SECONDS
        "$@" &
        wait $!
        status=$?
        # A trapped signal ends the waiting, and not the command.
        while kill -0 $! 2>/dev/null; do
            wait $!
            status=$?
        done
        if [[ $stopping || $status == 0 || $status == 2 ]]; then
            exit "$status"
        fi
        ((SECONDS - started > 60)) && pause=1
        echo "$(date -u +%FT%TZ) $1 $2 ended with status $status; it is started again in $pause s" >&2
        sleep "$pause"
        ((pause = pause * 2 > 15 ? 15 : pause * 2))
    done
}

# The first node of the job, and how others reach it.
head_node() {
    scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1
}

# Wait for the steps that were started in the background; a signal to the batch script interrupts it.
wait_for_steps() {
    while [[ $(jobs -rp) && ! $leaving ]]; do
        wait -n || true
    done
}

# The step of a job that runs on the first node, in addition to its other processes: at_head NAME COMMAND...
at_head() {
    local name=$1
    shift
    srun --overlap --overcommit --no-kill --nodes=1 --ntasks=1 --nodelist="$(head_node)" --job-name="$name" --mpi=none \
        --open-mode=append --output="$RUN_DIR/$name.log" bash "$SCRIPTS/step.sh" keep "$@"
}
