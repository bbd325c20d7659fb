"""What ranks exchange on the device: sums, joined parts, tokens. Owns the process group of torch.distributed.

Every call is part of an op of the compute lane. All ranks run the same ops in the same order, so the calls
meet. With NCCL a call only puts work on the lane's stream. With gloo it blocks the lane's thread until it is
over.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from penstock.errors import RankLost
from penstock.models.model import Split

log = logging.getLogger(__name__)

_dist: Any = torch.distributed  # whose types do not tell what it exports
Why = Callable[[], RankLost | None]  # what is known about a rank that is gone; may take a moment


class Collectives:
    """`Together` over a process group."""

    def __init__(self, group: Any, split: Split, why: Why) -> None:
        self.split = split
        self._group = group
        self._why = why
        # On the caller's stream: NCCL's own one would add two events to each call.
        self._sum, self._gather, self._broadcast = (
            _dist.AllreduceOptions(),
            torch._C._distributed_c10d.AllgatherOptions(),
            _dist.BroadcastOptions(),
        )
        for one in (self._sum, self._gather, self._broadcast):
            one.asyncOp = False

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait(lambda: self._group.allreduce([x], self._sum))
        return x

    def joined(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.split.size)]
        self._wait(lambda: self._group.allgather([parts], [x], self._gather))
        return torch.cat(parts, dim=-1)

    def tell(self, x: Tensor) -> None:
        """Every rank's `x` becomes that of rank 0."""
        self._wait(lambda: self._group.broadcast([x], self._broadcast))

    def abort(self) -> None:
        """End calls that wait for a rank that is gone."""
        try:
            self._group.abort()
        except RuntimeError as error:  # they end by their timeout
            log.warning("collectives could not be ended: %s", error)

    def _wait(self, call: Callable[[], Any]) -> None:
        try:
            work = call()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._why() or RankLost(f"another rank did not take part in a step: {error}") from error


def file_store(path: str, size: int) -> Any:
    """By which the ranks of one machine make a process group."""
    return _dist.FileStore(path, size)


def launched_store(rank: int, size: int) -> Any:
    """The same from the environment, as torchrun sets it."""
    store, *_ = next(_dist.rendezvous("env://", rank, size))
    return store


def process_group(store: Any, split: Split, timeout_s: float, backend: str, host: str | None) -> Any:
    """A group of its own, beside any that the process may have. `host`: the address that gloo uses; None:
    that of the machine's name."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if backend == "nccl":
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _dist.ProcessGroupNCCL(store, split.rank, split.size, options)
    options = _dist.ProcessGroupGloo._Options()
    if host is None:
        options._devices = [_dist.ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return _dist.ProcessGroupGloo(store, split.rank, split.size, options)
