"""One of two tensor-parallel ranks, in a process of its own:

    python -m tests.plugins.sglang.rank RANK RENDEZVOUS DIRECTORY

Prints how many tokens it fetches, before and after rank 1 has lost pages."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.plugins.sglang.conftest import PAGE, Server, in_parallel, make_pool, published

PROMPT = list(range(1, 161))


def main(rank: int, rendezvous: str, directory: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    with published(), in_parallel(rank, 2):
        server = Server(make_pool("page_first"), {"ssd_dir": directory}, torch.distributed.group.WORLD)
        print("written", server.back_up(PROMPT), "fetched", server.fetch(PROMPT))
        if rank == 1:
            server.backend.clear()
            server.back_up(PROMPT[: 10 * PAGE])
        torch.distributed.barrier()
        print("fetched", server.fetch(PROMPT), *sorted(path.name for path in Path(directory).iterdir()))
        server.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
