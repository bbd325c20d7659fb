"""How fast blocks move between device and host memory, beside one plain copy of as many bytes; and behind host memory, where a disk or
store is named. Owns the figures, not the copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from penstock.bench.cold_rig import Shape
from penstock.bench.machine import device_of
from penstock.bench.report import Column, Results
from penstock.bench.transfer_remote import measure_remote
from penstock.bench.transfer_ssd import measure_ssd
from penstock.bench.transfer_ways import DIRECTIONS, WAYS, Case, Rig, Way
from penstock.config import Config
from penstock.errors import ConfigError, ModelError
from penstock.kv.memory.arena import free_bytes
from penstock.kv.memory.layout import BlockLayout
from penstock.lanes import cuda
from penstock.models.dimensions import BUILT_IN, parse_config
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress
from penstock.models.safetensors_dir import read_json

WARM_UP = 0  # number of the run that is not measured, but checked byte by byte


class Run(NamedTuple):
    submit_s: float  # of the thread that submits
    total_s: float  # from submit to the end of the last copy


class Taken(NamedTuple):
    way: Way
    case: Case
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class TransferBench:
    """Each way, each direction, each number of blocks: taking turns, so that all of one size meet the same machine."""

    blocks: tuple[int, ...]
    layers: tuple[int, ...]
    repeat: int
    seed: int

    name = "transfer"
    columns = (
        Column("direction", lambda row: row["direction"]),
        Column("blocks", lambda row: f"{row['blocks']}"),
        Column("copied as", lambda row: row["way"]),
        Column("layers", lambda row: f"{row['layers'] or 'all'}"),
        Column("GB/s", lambda row: f"{row['gb_s']:.2f}"),
        Column("% of raw", lambda row: f"{row['percent_of_raw']:.1f}"),
        Column("ms", lambda row: f"{row['total_ms']['median']:.3f}"),
        Column("submit ms", lambda row: f"{row['submit_ms']['median']:.3f}"),
    )

    def measure(self, config: Config, progress: Progress) -> Results:
        """The disk's directory, where there is one, is to be empty."""
        layout, device = layout_of(config), _device(config)
        results = self._measure_host(layout, device, progress)
        shape = Shape(layout, device, self.repeat, self.seed)
        if config.offload.ssd_dir is not None:
            _extend(results, measure_ssd(Path(config.offload.ssd_dir), self.blocks, shape, progress))
        if config.offload.remote is not None:
            _extend(results, measure_remote(config.offload, self.blocks, shape, progress))
        return results

    def _measure_host(self, layout: BlockLayout, device: torch.device, progress: Progress) -> Results:
        results = Results([], [])
        sizes = [blocks for blocks in self.blocks if not self._refused(blocks, layout, device, results)]
        groups = [layout.num_layers]
        for layers in self.layers:
            if layers < layout.num_layers:
                groups.append(layers)
            else:
                results.skipped.append(f"groups of {layers} layers: the model has {layout.num_layers}")
        if not sizes:
            return results
        with Rig(layout, max(sizes), device, self.seed) as rig:
            rig.prepare(progress)
            ways = [make(rig) for make in WAYS]
            for blocks in sizes:
                for direction in DIRECTIONS:
                    cases = [
                        Taken(way, Case(direction, blocks, layers), [])
                        for way in ways
                        for layers in (groups if way.scatters else groups[:1])
                    ]
                    self._run(rig, cases, progress)
                    results.rows.extend(_rows(cases, layout))
            for way in ways:
                way.close()
        return results

    @staticmethod
    def _refused(blocks: int, layout: BlockLayout, device: torch.device, results: Results) -> bool:
        one_way = blocks * layout.block_bytes
        needs = {device: 3 * one_way}  # room for both directions, and for scattering
        needs[torch.device("cpu")] = needs.get(torch.device("cpu"), 0) + 6 * one_way  # the same twice; pinned memory comes in powers of two
        for where, needed in needs.items():
            if needed > (free := free_bytes(where)):
                reason = f"they need {needed / 1e9:.1f} GB on {where}, where {free / 1e9:.1f} are free"
                results.skipped.append(f"{blocks} blocks: {reason}")
                return True
        return False

    def _run(self, rig: Rig, cases: list[Taken], progress: Progress) -> None:
        stage = f"{cases[0].case.direction}, {cases[0].case.blocks} blocks"
        for run in range(1 + self.repeat):
            progress(stage, run, 1 + self.repeat)
            for way, case, runs in cases:
                if run != WARM_UP:
                    runs.append(_timed(way, case))
                    continue
                if way.scatters:
                    rig.spoil(case)
                way.launch(case)()
                if way.scatters:
                    rig.check(case, way.name)
        progress(stage, 1 + self.repeat, 1 + self.repeat)

    def draw(self, axes: Any, rows: list[dict[str, Any]]) -> None:
        groups = list(dict.fromkeys((row["direction"], row["blocks"]) for row in rows))
        titles = list(dict.fromkeys(_title(row) for row in rows))
        width = 0.8 / len(titles)
        for i, title in enumerate(titles):
            found = {(row["direction"], row["blocks"]): row["gb_s"] for row in rows if _title(row) == title}
            places = [at + (i - (len(titles) - 1) / 2) * width for at, group in enumerate(groups) if group in found]
            bars = axes.bar(places, [found[group] for group in groups if group in found], width, label=title)
            axes.bar_label(bars, fmt="%.1f", fontsize=6)
        axes.set_xticks(range(len(groups)), [f"{direction}\n{blocks} blocks" for direction, blocks in groups], fontsize=8)
        axes.set_ylabel("GB/s")
        axes.set_ylim(top=1.15 * max(row["gb_s"] for row in rows))
        axes.legend(fontsize=8, ncols=len(titles), loc="upper center")


def _extend(results: Results, more: Results) -> None:
    results.rows.extend(more.rows)
    results.skipped.extend(more.skipped)


def _timed(way: Way, case: Case) -> Run:
    started = perf_counter()
    wait = way.launch(case)
    submitted = perf_counter()
    wait()
    return Run(submitted - started, perf_counter() - started)


def _rows(cases: list[Taken], layout: BlockLayout) -> list[dict[str, Any]]:
    """All of one direction and size, the raw copy first."""
    rows: list[dict[str, Any]] = []
    for way, case, runs in cases:
        total_s = median(run.total_s for run in runs)
        num_bytes = case.blocks * layout.block_bytes * len(DIRECTIONS[case.direction])
        gb_s = num_bytes / total_s / 1e9
        rows.append(
            {
                "direction": case.direction,
                "blocks": case.blocks,
                "bytes": num_bytes,
                "way": way.name,
                "layers": case.layers if case.layers < layout.num_layers else None,
                "gb_s": gb_s,
                "percent_of_raw": 100 * gb_s / (rows[0]["gb_s"] if rows else gb_s),
                "total_ms": {"median": total_s * 1000, "all": [run.total_s * 1000 for run in runs]},
                "submit_ms": {
                    "median": median(run.submit_s for run in runs) * 1000,
                    "all": [run.submit_s * 1000 for run in runs],
                },
            }
        )
    return rows


def _title(row: dict[str, Any]) -> str:
    return row["way"] if row["layers"] is None else f"{row['way']} by {row['layers']} layers"


# ---------------------------------------------------------------------------------------------------------------- config


def dimensions_of(model: str) -> tuple[str, ModelConfig]:
    """Name and shape of a built-in model, or of a directory's config.json; no weights are read."""
    if model in BUILT_IN:
        return model, BUILT_IN[model]
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        raise ModelError(
            f"no model {model!r}: bench transfer takes a built-in name ({', '.join(BUILT_IN)}) or a directory with a config.json"
        )
    return file.parent.resolve().name, parse_config(read_json(file), str(file))


def layout_of(config: Config) -> BlockLayout:
    dims = dimensions_of(config.source.model)[1]
    dtype = config.source.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device_of(config) == "cuda" else "float32"
    return BlockLayout(dims.num_layers, dims.num_kv_heads, dims.head_dim, config.kv.block_tokens, dtype)


def _device(config: Config) -> torch.device:
    if device_of(config) == "cpu":
        return torch.device("cpu")
    if not cuda.is_usable():
        raise ConfigError("--device cuda: no usable NVIDIA GPU was found (see `penstock doctor`)")
    return torch.device("cuda", 0)
