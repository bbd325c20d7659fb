"""How fast blocks move between device and host memory, beside one plain copy of as many bytes; and behind
host memory, where a disk or store is named. Owns the figures, not the copies."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.bench.report import Column, Results, draw_points, figure
from penstock.bench.transfer_ways import (
    DIRECTIONS,
    RawFile,
    Row,
    TransferRig,
    TransferShape,
    TransferSize,
    disk_ways,
    host_ways,
    store_ways,
    take_turns,
)
from penstock.config import GIB, Config, OffloadConfig
from penstock.engine.build import device_for
from penstock.engine.sizing import layout_for
from penstock.errors import ModelError
from penstock.kv.memory import BlockLayout, free_bytes
from penstock.kv.tiers.ssd.directory import LOCK_BYTES, SECTOR_BYTES
from penstock.kv.tiers.ssd.segments import segment_bytes, slot_bytes
from penstock.models.loader import read_config
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.registry import BUILT_IN

_SPARE_SLOTS = 16  # what dividing the disk tier into files may cost it


@dataclass(frozen=True, slots=True)
class TransferBench:
    """Each way, each direction, each number of blocks: taking turns, so that all of one size meet the same
    machine."""

    blocks: tuple[int, ...]
    layers: tuple[int, ...]
    repeat: int
    seed: int

    name = "transfer"
    columns = (
        Column("direction", lambda row: row["direction"]),
        figure("blocks", "blocks"),
        Column("copied as", lambda row: row["way"]),
        Column("layers", lambda row: f"{row['layers'] or 'all'}"),
        figure("GB/s", "gb_s", 2),
        figure("% of raw", "percent_of_raw", 1),
        figure("ms", "total_ms.median", 3),
        figure("submit ms", "submit_ms.median", 3),
    )

    def measure(self, config: Config, progress: Progress) -> Results:
        """The disk's directory, if there is one, must be empty."""
        given, layout = config.offload, layout_of(config)
        shape = TransferShape(layout, device_for(config), self.repeat, self.seed)
        places = {"": OffloadConfig()}
        if given.ssd_dir is not None:
            places[" on disk"] = OffloadConfig(ssd_dir=given.ssd_dir)
        if given.remote is not None:
            places[" in the store"] = replace(given, ssd_dir=None)
        results = Results([], [])
        for place, offload in places.items():
            for blocks in self.blocks:
                if (refusal := _refusal(blocks, shape, offload)) is None:
                    results.rows.extend(self._rows(shape, blocks, offload, results.skipped, progress))
                else:
                    results.skipped.append(f"{blocks} blocks{place}: {refusal}")
        results.skipped.extend(
            f"groups of {layers} layers: the model has {layout.num_layers}"
            for layers in self.layers
            if layers >= layout.num_layers
        )
        return results

    def _rows(
        self,
        shape: TransferShape,
        blocks: int,
        offload: OffloadConfig,
        skipped: list[str],
        progress: Progress,
    ) -> Iterator[Row]:
        num_layers, folder = shape.layout.num_layers, offload.ssd_dir
        if folder is not None:
            # So little that every run writes over what the run before has written, as the raw file's do.
            num_bytes = _tier_bytes(blocks, shape.layout.block_bytes)
            offload = replace(offload, ssd_gib=(num_bytes + 1) / GIB)
        with TransferRig(shape, blocks, offload) as rig:
            rig.fill(progress)
            if folder is not None:
                file = RawFile(Path(folder), rig)
                with contextlib.closing(file):
                    yield from take_turns("ssd", disk_ways(rig, file), rig.size, self.repeat, progress)
                if not file.direct:
                    skipped.append(
                        f"O_DIRECT: the file system of {folder} has none, so that these figures are of memory"
                    )
            elif offload.remote is not None:
                for row in take_turns("remote", store_ways(rig), rig.size, self.repeat, progress):
                    yield row | {"percent_of_raw": None}
            else:
                groups = [num_layers, *(layers for layers in self.layers if layers < num_layers)]
                for direction, ends in DIRECTIONS.items():
                    size = TransferSize(blocks, rig.size.num_bytes * len(ends))
                    yield from take_turns(
                        direction, host_ways(rig, direction, groups), size, self.repeat, progress
                    )

    def draw(self, axes: Any, rows: list[Row]) -> None:
        points = [
            (
                row["way"] + (f" by {row['layers']} layers" if row["layers"] else ""),
                f"{row['direction']}\n{row['blocks']} blocks",
                row["gb_s"],
            )
            for row in rows
        ]
        draw_points(axes, points, "", "GB/s", size=6)


def _refusal(blocks: int, shape: TransferShape, offload: OffloadConfig) -> str | None:
    block_bytes, cpu = shape.layout.block_bytes, torch.device("cpu")
    if offload.ssd_dir is not None and block_bytes % SECTOR_BYTES:
        return (
            f"blocks of {block_bytes} bytes are no whole sectors of {SECTOR_BYTES}, and raw O_DIRECT moves "
            "nothing else"
        )
    one_way = blocks * block_bytes
    needs = {shape.device: 3 * one_way}  # room for both directions, and for checks
    needs[cpu] = needs.get(cpu, 0) + 6 * one_way  # the same twice; pinned memory comes in powers of two
    rooms = [(needed, f"on {where}", free_bytes(where)) for where, needed in needs.items()]
    if offload.ssd_dir is not None:
        free = shutil.disk_usage(offload.ssd_dir).free
        rooms.append((one_way + _tier_bytes(blocks, block_bytes), "there", free))
    for needed, where, free in rooms:
        if needed > free:
            return f"they need {needed / 1e9:.1f} GB {where}, where {free / 1e9:.1f} are free"
    return None


def _tier_bytes(blocks: int, block_bytes: int) -> int:
    return LOCK_BYTES + segment_bytes(blocks, block_bytes) + _SPARE_SLOTS * slot_bytes(block_bytes)


def dimensions_of(model: str) -> tuple[str, ModelConfig]:
    """Name and shape of a built-in model, or of a directory's config.json; no weights are read."""
    if model in BUILT_IN:
        return model, BUILT_IN[model]
    directory = Path(os.path.expanduser(model))
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"no model {model!r}: bench transfer takes a built-in name ({', '.join(BUILT_IN)}) or a "
            "directory with a config.json"
        )
    return directory.resolve().name, read_config(directory)


def layout_of(config: Config) -> BlockLayout:
    return layout_for(config, dimensions_of(config.source.model)[1], device_for(config))
