"""One local rank of the doctor's test: `python -m launch.doctor.selftest`, in torchrun's variables.

Rank 0 prints the bytes per second at which an all-reduce passes through each rank.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

NUMEL = 16 * 2**20
REPEATS = 3
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Multiply matrices, then add up one tensor over all ranks, and check both."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    _check_products(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    ranks = dist.get_world_size()
    values = torch.empty(NUMEL, device=device)
    seconds = []
    for _ in range(REPEATS):
        values.fill_(dist.get_rank() + 1)
        _wait(device)
        started = time.perf_counter()
        dist.all_reduce(values)
        _wait(device)
        seconds.append(time.perf_counter() - started)
        expected = ranks * (ranks + 1) / 2
        if not bool((values == expected).all()):
            raise SystemExit(f"rank {dist.get_rank()}: the all-reduce gave wrong sums")
    sent = 2 * (ranks - 1) / ranks * values.nbytes
    if dist.get_rank() == 0:
        print(sent / min(seconds))
    dist.destroy_process_group()


def _check_products(device: torch.device) -> None:
    """A defective processor gives wrong or varying products."""
    matrix = torch.eye(1024, device=device) * 3
    if not torch.equal(matrix @ matrix, torch.eye(1024, device=device) * 9):
        raise SystemExit(f"{device}: a matrix product is wrong")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
