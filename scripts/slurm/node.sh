#!/usr/bin/env bash
# The launcher of one node, as a task of srun, with ft_launcher's command line. It takes this process's place, so that
# Slurm's signals reach it, once. In an option that is given twice, the last one counts: yours.
exec "${PYTHON:-python}" -m ft_launcher --nnodes="$SLURM_NNODES" \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    --rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=${JOIN_TIMEOUT:-300}" \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --log-dir="$ATTEMPT_DIR/$SLURMD_NODENAME" --ft-journal-dir="$ATTEMPT_DIR/$SLURMD_NODENAME" "$@"
