# One attempt at a training, for the batch scripts beside this file: sourced, not run.
# shellcheck shell=bash disable=SC2034 # what the functions set is read by the batch scripts
# A run is as many jobs as the training takes. RUN_DIR holds what outlives a job:
#   finished         the flag that the training makes when it is complete
#   history.jsonl    one line per attempt: how it ended, and what followed
#   attempt-JOB-N/   a folder per node: the launcher's journal and logs; N counts the requeues of JOB

say() { echo "$(date +%FT%T) ${SLURM_JOB_NAME} ${SLURM_JOB_ID}: $*"; }

# Sets up an attempt, or ends the job at once when the training is complete.
begin() {
    set -uo pipefail
    if [[ ! ${MAX_FAILURES:-3} =~ ^[1-9][0-9]*$ ]]; then
        say "MAX_FAILURES=$MAX_FAILURES: a whole number above 0 is needed"
        exit 2
    fi
    RUN_DIR="$(realpath -m "${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME}")"
    ATTEMPT_DIR="$RUN_DIR/attempt-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    mkdir -p "$ATTEMPT_DIR" || exit
    export RUN_DIR ATTEMPT_DIR FAULT_TOL_FINISHED_FLAG_FILE="${FAULT_TOL_FINISHED_FLAG_FILE:-$RUN_DIR/finished}"
    mkdir -p "$(dirname "$FAULT_TOL_FINISHED_FLAG_FILE")" || exit
    if [[ -e $FAULT_TOL_FINISHED_FLAG_FILE ]]; then
        say "done before: $FAULT_TOL_FINISHED_FLAG_FILE is there"
        exit 0
    fi
    # The address of the first node, and a port that jobs beside this one don't use.
    local first
    first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
    MASTER_ADDR="$(scontrol show node -o "$first" | grep -oP ' NodeAddr=\K\S+')" || MASTER_ADDR="$first"
    told="" ended=""
    # USR1: the time limit is near (--signal=B:USR1@...). The tasks get SIGTERM: launchers let their ranks save. In the
    # background, for scancel waits and tries again where Slurm is at this job too, whose SIGTERM must not wait for that.
    trap 'told=yes; say "told to end"; scancel --signal=TERM "$SLURM_JOB_ID" &' USR1
    # TERM: Slurm ends the job itself (cancelled, requeued, preempted, time limit), and tells the tasks too.
    trap 'ended=yes' TERM
}

# Runs a command on all nodes, whatever becomes of single ones; sets `code` to the highest exit code.
run() {
    say "attempt on $SLURM_JOB_NODELIST, $ATTEMPT_DIR"
    srun --kill-on-bad-exit=0 --wait=0 "$@" </dev/null &
    local srun=$!
    while wait "$srun"; kill -0 "$srun" 2>/dev/null; do :; done # a signal ends `wait` early
    wait "$srun"
    code=$?
}

# Decides what follows; sets `action` (done, next, stop, leave), `exit_code` and `exclude` (nodes, or -).
conclude() {
    local why="" reason options=(--code="$code" --max-failures="${MAX_FAILURES:-3}")
    [[ -z $ended ]] || why="$(quietly scontrol show job -o "$SLURM_JOB_ID" | grep -oP ' Reason=\K\S+')" || why=unknown
    [[ -z $told ]] || options+=(--told)
    [[ -z $why ]] || options+=(--ended-by="$why")
    [[ ${FLAG_REQUIRED:-0} == 0 ]] || options+=(--flag-required)
    read -r action exit_code exclude reason < <(
        quietly "${PYTHON:-python}" "$SCRIPTS/after_attempt.py" "$RUN_DIR" "$ATTEMPT_DIR" "${options[@]}"
    )
    [[ -n $action ]] || { action=stop exit_code=1 exclude=- reason="nothing could be decided, see above"; }
    # Slurm's word may have come meanwhile: then it deals with the job.
    [[ -z $ended || -n $why || $action != next ]] || { action=leave reason="Slurm ends this job"; }
    say "$action: $reason"
}

# Starts this job again, which ends this script.
requeue() {
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID" && exclude_from "$SLURM_JOB_ID"
}

# A command that Slurm's SIGTERM does not end.
quietly() (trap '' TERM && exec "$@")

# exclude_from JOB: the next job does without the nodes in `exclude`, in addition to those of before.
exclude_from() {
    [[ $exclude != - ]] || return 0
    local before
    before="$(scontrol show job -o "$SLURM_JOB_ID" | grep -oP ' ExcNodeList=\K[^ (]+')" && before="$before,"
    scontrol update "JobId=$1" "ExcNodeList=$before$exclude" && say "the next job does without $exclude"
}
