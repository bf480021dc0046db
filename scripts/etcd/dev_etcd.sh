#!/usr/bin/env bash
# One etcd on this machine to try things with: dev_etcd.sh up|down
#   ETCD_PORT  its port for clients on loopback (2379); peers get the next one
#   ETCD_DIR   where its records, log and pid are kept (a folder in TMPDIR)
# Clusters give the address of theirs by --rdzv-endpoint.
set -euo pipefail

port="${ETCD_PORT:-2379}"
dir="${ETCD_DIR:-${TMPDIR:-/tmp}/dev-etcd-$(id -u)-$port}"
client="http://127.0.0.1:$port"
healthy() { (exec 3<>"/dev/tcp/127.0.0.1/$port" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 && grep -q true <&3) 2>/dev/null; }
# Only the process that was started here: a pid may have been given to another one since.
running() { [[ -f $dir/pid ]] && tr '\0' '\n' <"/proc/$(<"$dir/pid")/cmdline" 2>/dev/null | grep -qx -- "--data-dir=$dir/data"; }

case "${1:-}" in
up)
    command -v etcd >/dev/null || { echo "etcd is missing: apt-get install --no-install-recommends etcd-server" >&2; exit 1; }
    if ! running; then
        mkdir -p -m 700 "$dir"
        nohup etcd "--data-dir=$dir/data" "--listen-client-urls=$client" \
            "--advertise-client-urls=$client" "--listen-peer-urls=http://127.0.0.1:$((port + 1))" \
            >"$dir/log" 2>&1 </dev/null &
        echo $! >"$dir/pid"
    fi
    for _ in $(seq 150); do
        if healthy && running; then echo "etcd is up: --rdzv-backend=etcd-v3 --rdzv-endpoint=127.0.0.1:$port"; exit 0; fi
        running || break
        sleep 0.2
    done
    echo "etcd did not come up; see $dir/log" >&2
    exit 1
    ;;
down)
    if running; then
        pid="$(<"$dir/pid")"
        kill "$pid"
        while running; do sleep 0.1; done
    fi
    rm -rf "$dir/data" "$dir/log" "$dir/pid"
    [[ ! -d $dir ]] || rmdir --ignore-fail-on-non-empty "$dir"
    ;;
*)
    echo "usage: dev_etcd.sh up|down" >&2
    exit 2
    ;;
esac
