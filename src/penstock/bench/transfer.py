"""How fast blocks move between device and host memory, beside one plain copy of as many bytes; and behind
host memory, where a disk or store is named. Owns the figures, not the copies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.bench.report import Column, Results, draw_bars, figure
from penstock.bench.transfer_cold import TransferShape, measure_remote, measure_ssd
from penstock.bench.transfer_ways import DIRECTIONS, HostRig, TransferSize, host_ways, take_turns, too_large
from penstock.config import Config
from penstock.engine.build import device_for, layout_for
from penstock.errors import ModelError
from penstock.kv.memory import BlockLayout
from penstock.models.loader import read_config
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.registry import BUILT_IN


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
        layout, device = layout_of(config), device_for(config)
        found, shape = (
            [self._measure_host(layout, device, progress)],
            TransferShape(layout, device, self.repeat, self.seed),
        )
        if config.offload.ssd_dir is not None:
            found.append(measure_ssd(Path(config.offload.ssd_dir), self.blocks, shape, progress))
        if config.offload.remote is not None:
            found.append(measure_remote(config.offload, self.blocks, shape, progress))
        return Results(
            [row for part in found for row in part.rows],
            [sentence for part in found for sentence in part.skipped],
        )

    def _measure_host(self, layout: BlockLayout, device: torch.device, progress: Progress) -> Results:
        results = Results([], [])
        sizes = []
        for blocks in self.blocks:
            if (refusal := _refusal(blocks * layout.block_bytes, device)) is None:
                sizes.append(blocks)
            else:
                results.skipped.append(f"{blocks} blocks: {refusal}")
        groups = [layout.num_layers, *(layers for layers in self.layers if layers < layout.num_layers)]
        results.skipped.extend(
            f"groups of {layers} layers: the model has {layout.num_layers}"
            for layers in self.layers
            if layers >= layout.num_layers
        )
        if sizes:
            with HostRig(layout, max(sizes), device, self.seed) as rig:
                rig.prepare(progress)
                for blocks in sizes:
                    for direction in DIRECTIONS:
                        results.rows.extend(self._rows(rig, direction, blocks, groups, progress))
        return results

    def _rows(
        self, rig: HostRig, direction: str, blocks: int, groups: Sequence[int], progress: Progress
    ) -> list[dict[str, Any]]:
        size = TransferSize(blocks, blocks * rig.layout.block_bytes * len(DIRECTIONS[direction]))
        return take_turns(direction, host_ways(rig, direction, blocks, groups), size, self.repeat, progress)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        groups = list(dict.fromkeys((row["direction"], row["blocks"]) for row in rows))
        found = {(_title(row), row["direction"], row["blocks"]): row["gb_s"] for row in rows}
        titles = list(dict.fromkeys(_title(row) for row in rows))
        bars = {title: [found.get((title, *group)) for group in groups] for title in titles}
        draw_bars(axes, [f"{direction}\n{blocks} blocks" for direction, blocks in groups], bars, size=6)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylabel("GB/s")
        axes.set_ylim(top=1.25 * max(row["gb_s"] for row in rows))
        axes.legend(fontsize=8, ncols=min(len(titles), 4), loc="upper center")


def _refusal(one_way: int, device: torch.device) -> str | None:
    needs = {device: 3 * one_way}  # room for both directions, and for scattering
    # the same twice; pinned memory comes in powers of two
    needs[torch.device("cpu")] = needs.get(torch.device("cpu"), 0) + 6 * one_way
    return too_large(needs)


def _title(row: dict[str, Any]) -> str:
    return row["way"] if row["layers"] is None else f"{row['way']} by {row['layers']} layers"


# ----------------------------------------------------------------------------------------------------- config


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
