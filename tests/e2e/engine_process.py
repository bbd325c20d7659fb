"""An engine with a tiny model in a process of its own, asked by lines. Run as a program; owns nothing that
ships.

    python engine_process.py URL MODEL

URL may be the directory of a disk tier.

A line of numbers of prompts, as JSON, is answered with a line of their tokens and sources. Before it answers,
everything is in the store and in no memory of its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import torch

from penstock.errors import StoreFailed
from tests.e2e.troubled import LIMIT_S, Troubled, troubled


def persist(server: Troubled) -> None:
    """Patiently: a store that was not there yet is looked for again."""
    by_s = time.monotonic() + LIMIT_S
    while True:
        try:
            server.persist()
            return
        except StoreFailed:
            if time.monotonic() > by_s:
                raise
            time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    where, model = sys.argv[1:]
    disk, store = {"ssd_dir": where, "ssd_gib": 0.05}, {"remote": where, "remote_timeout_s": 20.0}
    with troubled(model=model, **(disk if where.startswith("/") else store)) as server:
        print("ready", flush=True)
        for line in sys.stdin:
            found = server.ask(*json.loads(line))
            persist(server)
            server.forget()
            print(json.dumps([[one.tokens, dataclasses.asdict(one.source)] for one in found]), flush=True)


if __name__ == "__main__":
    main()
