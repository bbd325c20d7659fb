"""`penstock bench transfer` with one way more: blocks copied by the lanes themselves, without movers. The
difference is what movers cost.

    PYTHONPATH=src python3 benchmarks/copy_ways.py --model qwen3-4b [flags of bench transfer]
"""

from __future__ import annotations

import sys
from functools import partial

from penstock.bench.transfer_ways import DIRECTIONS, HOST_WAYS, TransferRig, Turn
from penstock.cli import main


def copy_blocks(rig: TransferRig, direction: str, layers: int) -> Turn:
    """An op and a fence for each group of layers."""
    launched, most = [], rig.layout.num_layers
    for first in range(0, most, layers):
        for one in DIRECTIONS[direction]:
            (_, source), (_, dest) = rig.ends(one)
            mover, group = rig.movers[one], (first, min(first + layers, most))
            ticket = mover.lane.submit(partial(mover.copier.copy, source, dest, group), label=one)
            launched.append((ticket, mover.lane.record()))
    yield
    for ticket, end in launched:
        end.wait_passed()
        if (error := ticket.error()) is not None:
            raise error


HOST_WAYS["blocks"] = copy_blocks

if __name__ == "__main__":
    sys.exit(main(["bench", "transfer", *sys.argv[1:]]))
