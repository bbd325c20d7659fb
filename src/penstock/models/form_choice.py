"""Which forms this CPU multiplies fastest, measured once and kept in the cache folder. Owns the measurement
and its file."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, astuple, dataclass
from itertools import takewhile
from pathlib import Path

import torch

from penstock.config import WEIGHT_FORMS, WeightsName
from penstock.cores import Others, allowed_cores, busy_seconds
from penstock.errors import ConfigError
from penstock.models.embedded import cache_dir
from penstock.models.forms import GROUP, Forms, Matrix, Quants, empty_matrix, matrix_of_quants, takes_4_bits
from penstock.models.model import ModelConfig
from penstock.models.progress import Progress

log = logging.getLogger(__name__)

PINNED = "PENSTOCK_WEIGHTS"  # what `--weights auto` means, where it is set
FEW_ROWS = 8  # with `--weights int8` and `int4`, which measure nothing
ROWS = (1, 2, 4, 8, 16, 32, 128)  # that are measured; the last stands for all larger ones
_ROUNDS = 5
_CANDIDATES = {
    "int4": Forms(torch.bfloat16, 0, max(ROWS)),
    "int8": Forms(torch.bfloat16, max(ROWS)),
    "bfloat16": Forms(torch.bfloat16),
    "float32": Forms(torch.float32),
}
_ROW_STEP = 64  # rows of a measured matrix are a multiple: every form takes them
# of a core that others may take from the threads that measure: what is found then is kept for good
_QUIET = 0.3
_LOOK_S = 0.2  # for what others use now
# weights measured: more than caches hold in any form, and a second or two of products
_SAMPLE_VALUES = 16 << 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of the same products in each form, by number of rows; and what they were measured on."""

    cpu: str
    torch: str
    threads: int
    shape: tuple[int, int, int]  # width, rows of q, k and v together, width inside the gated part
    ms: Mapping[str, Mapping[str, float]]  # rows -> form -> best of some rounds
    others: float  # cores that other processes used meanwhile

    @property
    def forms(self) -> Forms | None:
        """The fastest. None: float32 alone."""
        most, one = self.ms[str(ROWS[-1])], self.ms["1"]
        wide = "bfloat16" if most["bfloat16"] < most["float32"] else "float32"
        of_4 = self._rows_won("int4", wide) if one.get("int4", math.inf) < one["int8"] else 0
        forms = Forms(getattr(torch, wide), self._rows_won("int8", wide), of_4)
        return None if forms == Forms(torch.float32) else forms

    def _rows_won(self, narrow: str, wide: str) -> int:
        """Up to how many rows `narrow` is the faster of the two; one that loses in between ends there."""
        times = ((rows, self.ms[str(rows)]) for rows in ROWS[:-1])
        return max(
            (rows for rows, ms in takewhile(lambda item: item[1][narrow] < item[1][wide], times)), default=0
        )


def pinned_forms(weights: WeightsName, in_4_bits: Collection[str] = ()) -> Forms | None:
    """What a name stands for that measures nothing, for weights of which some are `in_4_bits`. None:
    float32."""
    if weights == "int4" and not in_4_bits:
        raise ConfigError(
            "--weights int4 needs a GGUF file with matrices in Q4_0, Q4_1 or Q4_K: no others are rounded "
            "to 4 bits"
        )
    few, of_4 = FEW_ROWS * (weights in ("int4", "int8")), FEW_ROWS * (weights == "int4")
    return None if weights == "float32" else Forms(torch.bfloat16, few, of_4)


def wanted(weights: WeightsName, device: str, dtype: torch.dtype) -> WeightsName:
    """What `--weights` comes to: the environment may say what auto means. Other devices and dtypes hold
    matrices in the dtype alone."""
    if device != "cpu" or dtype != torch.float32:
        if weights != "auto":
            raise ConfigError(
                f"--weights {weights} needs --device cpu and --dtype float32: elsewhere --dtype says how "
                "weights are held"
            )
        return "float32"
    named = os.environ.get(PINNED) or "auto"
    for name in WEIGHT_FORMS:
        if named == name:
            return weights if weights != "auto" else name
    raise ConfigError(f"${PINNED} must be one of {', '.join(WEIGHT_FORMS)}, got {named!r}")


def chosen_forms(
    weights: WeightsName,
    config: ModelConfig,
    deterministic: bool,
    progress: Progress,
    in_4_bits: Collection[str] = (),
) -> Forms | None:
    """The forms for `weights`, which `wanted` has returned. None: float32, in tensors of torch's own."""
    forms = fastest_forms(config, progress) if weights == "auto" else pinned_forms(weights, in_4_bits)
    if forms is not None:
        forms = forms.of(in_4_bits)
    if forms == Forms(torch.float32):  # 4 bits would have been faster, and the file has none
        forms = None
    return (forms or Forms(torch.float32)).made_steady() if deterministic else forms


def _others() -> Others:
    return Others(functools.partial(busy_seconds, allowed_cores().cores))


def used_by_others() -> float:
    """Cores that other processes use, by a short look."""
    others = _others()
    time.sleep(_LOOK_S)
    return others.look()


def _is_crowded(others: float) -> bool:
    """Whether the threads that measure have to share cores with others."""
    return others + torch.get_num_threads() > allowed_cores().num + _QUIET


def fastest_forms(config: ModelConfig, progress: Progress) -> Forms | None:
    """By the measurement that is kept for this CPU, torch, number of threads and shape, or by one made now.
    One that was made on crowded cores is made anew where they no longer are."""
    found = kept_measurement(config)
    if found is None or (_is_crowded(found.others) and not _is_crowded(used_by_others())):
        found = measure(config, progress)
        _keep(found, _file(config))
    return found.forms


def kept_measurement(config: ModelConfig) -> Measurement | None:
    """None: there is none for this machine and this shape, or it cannot be read."""
    try:
        raw = json.loads(_file(config).read_bytes())
        found = Measurement(**{**raw, "shape": tuple(raw["shape"])})
        _ = found.forms  # raises where a figure is missing
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if astuple(found)[:4] == _place(config) else None


def measure(
    config: ModelConfig, progress: Progress, clock: Callable[[], float] = time.perf_counter
) -> Measurement:
    """Products of the model's shapes in every form, in turns, so that what else the machine does meets all
    alike; the best of each."""
    samples = {name: _sample(config, forms) for name, forms in _CANDIDATES.items()}
    samples = {name: matrices for name, matrices in samples.items() if matrices}
    others = _others()
    ms: dict[str, dict[str, float]] = {}
    for done, rows in enumerate(ROWS):
        inputs = {width: torch.ones(rows, width) for width in {matrix.shape[1] for matrix in samples["int8"]}}
        times: dict[str, list[float]] = {name: [] for name in samples}
        for _ in range(_ROUNDS + 1):
            for name, matrices in samples.items():
                start = clock()
                for matrix in matrices:
                    matrix.product(inputs[matrix.shape[1]])
                times[name].append(clock() - start)
        # the first warms up
        ms[str(rows)] = {name: round(min(found[1:]) * 1000, 3) for name, found in times.items()}
        progress("measuring this CPU (once)", done + 1, len(ROWS))
    return Measurement(*_place(config), ms, round(others.look(), 2))


def _sample(config: ModelConfig, forms: Forms) -> list[Matrix]:
    """Matrices of some layers; of one layer's first rows where it is large. None at all where the form takes
    no such width."""
    width, qkv, ffn = _place(config)[3]
    shapes = ((qkv, width), (width, config.num_heads * config.head_dim), (2 * ffn, width), (width, ffn))
    layer = sum(rows * columns for rows, columns in shapes)
    share = min(1.0, _SAMPLE_VALUES / layer)
    taken = [(-(-int(rows * share) // _ROW_STEP) * _ROW_STEP, columns) for rows, columns in shapes]
    if forms.few_rows_of_4 and not all(map(takes_4_bits, taken)):
        return []
    return [
        _ones(shape, forms)
        for _ in range(max(1, min(config.num_layers, _SAMPLE_VALUES // layer)))
        for shape in taken
    ]


def _ones(shape: tuple[int, int], forms: Forms) -> Matrix:
    if forms.few_rows_of_4:
        scale = torch.ones(shape[0], shape[1] // GROUP)
        return matrix_of_quants(Quants(torch.full(shape, 8, dtype=torch.uint8), scale, scale), forms)
    matrix = empty_matrix("sample", shape, False, forms)
    matrix.fill(slice(None), torch.ones(shape))
    return matrix


def _place(config: ModelConfig) -> tuple[str, str, int, tuple[int, int, int]]:
    ffn = config.ffn if config.routing is None else config.routing.ffn
    shape = (config.hidden, config.qkv_width, ffn)
    return cpu_name(), str(torch.__version__), torch.get_num_threads(), shape


def _file(config: ModelConfig) -> Path:
    place = repr((_place(config), ROWS, tuple(_CANDIDATES))).encode()
    return cache_dir() / "forms" / f"{hashlib.blake2b(place, digest_size=16).hexdigest()}.json"


def _keep(found: Measurement, file: Path) -> None:
    """A folder that cannot be written costs a measurement at every start, and nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(found), indent=1))  # half a file cannot be read, and is none
    except OSError as error:
        log.warning(
            "what was measured of this CPU cannot be kept in %s, and is measured again at the next start: %s",
            file.parent,
            error,
        )


def cpu_name() -> str:
    """/proc/cpuinfo knows the name that people use; elsewhere the platform's own word."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
