#!/usr/bin/env bash
# A Slurm cluster on this machine to try batch scripts with: munged, slurmctld, and a slurmd per node.
#   dev_cluster.sh up|down
#   SLURM_DEV_DIR    its configuration, logs, state and pid files (a folder in TMPDIR)
#   SLURM_DEV_PORTS  ports of loopback: of the controller, then of each node (16817 17001 17002: two nodes, n1 and n2)
# All nodes are this machine; a job sees SLURMD_NODENAME differ, and nothing else. Needs root, as slurmd does.
set -euo pipefail

PATH="$PATH:/usr/sbin"
dir="${SLURM_DEV_DIR:-${TMPDIR:-/tmp}/dev-slurm-$(id -u)}"
read -ra ports <<<"${SLURM_DEV_PORTS:-16817 17001 17002}"
nodes=$((${#ports[@]} - 1))
export SLURM_CONF="$dir/slurm.conf"

# Only the process that was started here: a pid may have been given to another one since.
running() { [[ -f $dir/run/$1.pid ]] && tr '\0' '\n' <"/proc/$(<"$dir/run/$1.pid")/environ" 2>/dev/null | grep -qx "SLURM_DEV_DIR=$dir"; }
export SLURM_DEV_DIR="$dir"

configuration() {
    cat <<CONF
ClusterName=dev
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket
CryptoType=crypto/munge
SlurmctldPort=${ports[0]}
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld.log
StateSaveLocation=$dir/state
SlurmdPidFile=$dir/run/%n.pid
SlurmdLogFile=$dir/log/%n.log
SlurmdSpoolDir=$dir/spool.%n
PlugStackConfig=$dir/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,sched_max_job_start=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=30
SlurmdParameters=config_overrides
CONF
    for node in $(seq "$nodes"); do
        echo "NodeName=n$node NodeHostname=localhost NodeAddr=127.0.0.1 Port=${ports[$node]} CPUs=4 RealMemory=1000"
    done
    echo "PartitionName=debug Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP"
}

down() {
    if running slurmctld; then # its jobs would outlive it
        squeue --noheader --format=%A | sort -u | xargs -r scancel
        for _ in $(seq 300); do [[ $(squeue --noheader) ]] || break; sleep 0.1; done
    fi
    for name in $(seq -f "n%g" "$nodes") slurmctld munged; do
        if running "$name"; then
            kill "$(<"$dir/run/$name.pid")"
            for _ in $(seq 100); do running "$name" || break; sleep 0.1; done
            ! running "$name" || kill -KILL "$(<"$dir/run/$name.pid")"
        fi
    done
    rm -rf "$dir"
}

case "${1:-}" in
up)
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" >/dev/null && continue
        echo "$program is missing: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge" >&2
        exit 1
    done
    ! running slurmctld || { echo "it is up already: export SLURM_CONF=$SLURM_CONF" >&2; exit 1; }
    mkdir -p "$dir"/{run,log,state} /run/slurm
    chmod 711 "$dir"
    chmod 755 "$dir/run" && chmod 700 "$dir/log" # munged wants it so
    for node in $(seq "$nodes"); do mkdir -p "$dir/spool.n$node"; done
    configuration >"$SLURM_CONF"
    : >"$dir/plugstack.conf"
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
    munged "--key-file=$dir/munge.key" "--socket=$dir/run/munge.socket" "--pid-file=$dir/run/munged.pid" \
        "--log-file=$dir/log/munged.log" "--seed-file=$dir/munge.seed"
    slurmctld
    for node in $(seq "$nodes"); do slurmd -N "n$node"; done
    for _ in $(seq 150); do
        if [[ $(sinfo -h -N -o %T 2>/dev/null | grep -cx idle) == "$nodes" ]]; then
            echo "export SLURM_CONF=$SLURM_CONF"
            exit 0
        fi
        sleep 0.2
    done
    echo "the nodes did not come up; see $dir/log" >&2
    exit 1
    ;;
down) down ;;
*)
    echo "usage: dev_cluster.sh up|down" >&2
    exit 2
    ;;
esac
