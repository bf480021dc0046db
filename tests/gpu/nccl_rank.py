"""A rank that has used NCCL, asks its RAS as the launcher does and as people do, and hangs. `nccl_rank.py FOLDER`."""

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ft_client as ft

REQUESTS = {"json": b"SET FORMAT json\nVERBOSE STATUS\n", "text": b"VERBOSE STATUS\n"}


def ask(request: bytes) -> bytes:
    host, _, port = os.environ["NCCL_RAS_ADDR"].rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT 1\n" + request)
        while data := connection.recv(1 << 16):
            answer += data
    return answer


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ones = torch.ones(4, device="cuda")
    dist.all_reduce(ones)
    assert ones.sum().item() == 4 * dist.get_world_size()
    dist.barrier()
    if rank == 0:
        for name, request in REQUESTS.items():
            (folder / f"answer.{name}").write_bytes(ask(request))
    dist.barrier()
    ft.init()
    with ft.section("step"):
        time.sleep(600)


main(Path(sys.argv[1]))
