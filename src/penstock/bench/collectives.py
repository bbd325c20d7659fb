"""Time of one sum over all ranks, by size: what each layer of a model that is divided among ranks pays twice
in every step. Needs no model. Owns its processes: `python -m penstock.bench.collectives SETTINGS` is one
rank."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.bench.report import Column, Results, figure
from penstock.config import Config
from penstock.engine.build import device_for
from penstock.errors import ConfigError
from penstock.lanes.cuda import make_lane, num_devices
from penstock.models.model import Split
from penstock.models.progress import Progress
from penstock.ranks.collectives import Collectives, file_store, process_group
from penstock.ranks.start import visible_device

Row = dict[str, Any]

_WARM = 3  # sums of each size that are not counted
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class CollectivesBench:
    """On one machine. The other ranks run the same sums at the same time."""

    kib: tuple[int, ...]
    repeat: int

    name = "collectives"
    columns = (
        figure("KiB", "kib"),
        figure("us", "sum_s.median", 1, 1e6),
        figure("p90 us", "sum_s.p90", 1, 1e6),
        Column("GB/s", lambda row: f"{row['kib'] * 1024 / row['sum_s']['median'] / 1e9:.2f}"),
    )

    def measure(self, config: Config, progress: Progress) -> Results:
        size = config.ranks.size
        if size == 1:
            raise ConfigError("bench collectives needs --tensor-parallel: one rank sums nothing")
        device = device_for(config)
        devices = num_devices() if device.type == "cuda" else 0
        backend = "nccl" if devices >= size else "gloo"
        with tempfile.TemporaryDirectory(prefix="penstock-ranks-") as folder:
            common = {
                "store": os.path.join(folder, "store"),
                "size": size,
                "backend": backend,
                "device": device.type,
                "kib": self.kib,
                "repeat": self.repeat,
            }
            others = [_started({**common, "rank": rank}, devices) for rank in range(1, size)]
            try:
                rows = _sums({**common, "rank": 0}, device, progress)
                for other in others:
                    other.wait(_END_S)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
        return Results([{**row, "backend": backend, "ranks": size} for row in rows], [])

    def draw(self, axes: Any, rows: list[Row]) -> None:
        axes.loglog([row["kib"] for row in rows], [1e6 * row["sum_s"]["median"] for row in rows], marker="o")
        axes.set_xlabel("KiB")
        axes.set_ylabel("microseconds")


def _started(settings: dict[str, Any], devices: int) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **visible_device(settings["rank"], devices, os.environ)}
    command = [sys.executable, "-m", __name__, json.dumps(settings)]
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=2)


def _sums(settings: dict[str, Any], device: torch.device, progress: Progress) -> list[Row]:
    split = Split(settings["rank"], settings["size"])
    store = file_store(settings["store"], split.size)
    group = process_group(store, split, _END_S, settings["backend"], "127.0.0.1")
    together, lane, rows = Collectives(group, split, lambda: None), make_lane("sums", device), list[Row]()
    for done, kib in enumerate(settings["kib"]):
        progress("summing", done, len(settings["kib"]))
        x, times = torch.ones(kib * 256, device=device), list[float]()
        for _ in range(_WARM + settings["repeat"]):
            started_s = time.perf_counter()
            lane.submit(lambda x=x: together.sum(x), label="sum").wait_done()  # type: ignore[misc]
            times.append(time.perf_counter() - started_s)
        rows.append({"kib": kib, "sum_s": _figures(times[_WARM:])})
    progress("summing", len(settings["kib"]), len(settings["kib"]))
    lane.close(_END_S)
    return rows


def _figures(times: Sequence[float]) -> Row:
    ordered = sorted(times)
    return {"median": statistics.median(ordered), "p90": ordered[int(0.9 * (len(ordered) - 1))]}


def main() -> None:
    settings = json.loads(sys.argv[1])
    _sums(settings, torch.device(settings["device"]), lambda stage, done, total: None)


if __name__ == "__main__":
    main()
