"""Matrices in 4 and 8 bits and in bfloat16: the values they hold, how exact their products are, and how a
form is chosen and kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config import ModelSource, WeightsName
from penstock.cores import AllowedCores
from penstock.errors import ConfigError
from penstock.models import form_choice, gguf_file
from penstock.models.decoder import Decoder
from penstock.models.form_choice import (
    ROWS,
    Measurement,
    fastest_forms,
    kept_measurement,
    pinned_forms,
    wanted,
)
from penstock.models.forms import (
    GROUP,
    Forms,
    Matrix,
    Quants,
    empty_matrix,
    has_exact_products,
    matrix_of_quants,
)
from penstock.models.gguf_file import GgufFile
from penstock.models.hashed_file import WeightFile
from penstock.models.layers import TorchLayerOps
from penstock.models.llama import SMOLLM2_135M
from penstock.models.loader import inspect_model
from penstock.models.progress import silent
from penstock.models.registry import BUILT_IN, layout
from penstock.testing.tiny_models import TINY_LLAMA, write_tiny_model
from tests.support.loading import load_on_cpu
from tests.support.tiny_gguf import write_tiny_gguf

INT8 = Forms(torch.bfloat16, 8)
INT4 = Forms(torch.bfloat16, 8, 8)
TINY = BUILT_IN["tiny-llama"]
CPU = ("cpu", torch.float32)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(values: Tensor, name: str = "layers.0.qkv", forms: Forms = INT8, tied: bool = False) -> Matrix:
    matrix = empty_matrix(name, tuple(values.shape), tied, forms)
    matrix.fill(slice(None), values)
    return matrix


def load(weights: WeightsName, **source: object) -> Decoder:
    chosen = ModelSource("tiny-llama", "dummy", weights=weights, **source)  # type: ignore[arg-type]
    return load_on_cpu(chosen).model


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_row_in_8_bits_is_within_one_step_of_its_values_and_both_forms_hold_the_same() -> None:
    values = some(48, 64)
    values[5] = 0.0
    matrix = made(values)
    assert matrix.packed is not None and matrix.scale is not None and matrix.wide is not None
    held = matrix.packed.float() * matrix.scale.float()[:, None]
    # Half a step, and at the largest value another half of a scale that was rounded down to bfloat16.
    assert bool(((held - values).abs() <= 0.76 * matrix.scale.float()[:, None]).all())
    assert torch.equal(matrix.wide, held.bfloat16())


def test_products_of_few_and_of_many_rows_are_those_of_the_same_values() -> None:
    matrix, ops, bias = made(some(96, 64)), TorchLayerOps(), some(96, seed=3)
    assert matrix.packed is not None and matrix.scale is not None
    for rows in (1, 8, 9, 40):
        x = some(rows, 64, seed=1)
        exact = x @ (matrix.packed.float() * matrix.scale.float()[:, None]).t()
        assert relative(matrix.product(x).float(), exact) < 4e-3, "more than rounding to bfloat16"
        assert ops.linear(x, matrix).dtype == torch.float32
        assert torch.equal(ops.linear(x, matrix, bias), matrix.product(x).float() + bias)


@pytest.mark.skipif(
    not has_exact_products(), reason="this CPU has no VNNI: logits are products like any other"
)
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_are_exact_products_of_8_bit_weights(rows: int) -> None:
    x = some(rows, 576, seed=2)
    x[:, 7] = 300.0  # an outlier, which a single 8-bit number per activation would drown the others in
    matrix = made(some(500, 576), "embed", tied=True)
    assert matrix.packed is not None and matrix.scale is not None and matrix.wide is None
    exact = (x.double() @ (matrix.packed.double() * matrix.scale.double()[:, None]).t()).float()
    assert relative(matrix.logits(x), exact) < 4e-4, "bfloat16 would be off by 2e-3"
    assert torch.equal(matrix.logits(torch.zeros(1, 576)), torch.zeros(1, 500))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_bytes_are_counted_as_they_are_held(tmp_path: Path, weights: WeightsName) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", encoding_of=of_4_bits("Q4_1"))
    model, facts = opened(path, weights), inspect_model(ModelSource(str(path)))
    model.output.logits(torch.ones(1, model.config.hidden))  # type: ignore[attr-defined]
    forms = pinned_forms(weights, facts.in_4_bits)
    shapes = [(w.name, w.shape) for w in layout(model.config)]
    held = [model.embedding, model.norm, *(t for layer in model.layers for t in vars(layer).values())]
    held += [] if model.config.tied_embeddings else [model.output]  # type: ignore[attr-defined]
    parts = [t for one in held for t in (one.tensors if isinstance(one, Matrix) else [one])]
    tensors = [t for t in parts if isinstance(t, Tensor)]
    assert forms is not None
    assert sum(t.nbytes for t in tensors) == forms.num_bytes(
        shapes, model.config.tied_embeddings, facts.in_4_bits
    )


# ----------------------------------------------------------------------------------------------------- 4 bits


def of_4_bits(encoding: str, embedding: str = "Q8_0") -> Callable[[str], str]:
    return lambda name: encoding if ".layers." in name else embedding


def unpacked(matrix: Matrix) -> Tensor:
    """What its product multiplies with, a column at a time."""
    width = matrix.shape[1]
    return torch.cat([matrix.product(torch.eye(width)[at : at + 1]).float() for at in range(width)]).t()


def test_numbers_of_4_bits_are_those_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    for encoding in ("Q4_0", "Q4_1", "Q4_K"):
        kind = gguf.GGMLQuantizationType[encoding]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(0).integers(0, 256, (6, 512 // block, block_bytes), dtype=np.uint8)
        # the factors; of Q4_0 the second is numbers
        raw[..., :4] = np.array([0.013, -0.021], np.float16).view(np.uint8)
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("one", raw.reshape(6, -1), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with WeightFile(path) as file:
            source = GgufFile(file)
            (found,) = source.quants(source.tensors["one"], None)
        steps = found.numbers.reshape(6, -1, 32) - np.float32(8)
        values = (steps * found.scale[..., None] + found.zero[..., None]).reshape(6, 512)
        assert np.allclose(values, gguf.dequantize(raw.reshape(6, -1), kind), rtol=0, atol=1e-6)
        assert found.numbers.max() == 15 and found.numbers.min() == 0


@pytest.mark.parametrize("rows", [80, 1104])
def test_a_matrix_in_4_bits_has_the_values_of_the_file_in_both_forms(rows: int) -> None:
    """Rows that fill no tile of the product, and more than are packed at a time, among them."""
    for encoding in ("Q4_0", "Q4_1"):
        values, kind = some(rows, 96), gguf.GGMLQuantizationType[encoding]
        raw = gguf.quantize(values.numpy(), kind)
        in_file = torch.tensor(gguf.dequantize(raw, kind))
        found = (torch.from_numpy(part.reshape(rows, -1)) for part in gguf_file._QUANTS[kind.name](raw))
        matrix = matrix_of_quants(Quants(*found), INT4)
        assert matrix.wide is not None and matrix.shape == (rows, 96)
        # A scale rounded to bfloat16 is off by 2**-9, and so is a zero; a value is up to 8 steps from it.
        bound = 2**-8 * in_file.abs().max()
        assert float((unpacked(matrix) - in_file).abs().max()) < bound
        assert float((matrix.wide.float() - in_file).abs().max()) < bound
        assert relative(unpacked(matrix), matrix.wide.float()) < 3e-3, "the same values, but for rounding"
        x = some(9, 96, seed=5)
        assert relative(matrix.product(x[:8]).float(), matrix.product(x)[:8].float()) < 5e-3


def test_a_file_in_4_bits_is_taken_as_it_is_and_the_rest_of_it_is_in_8(tmp_path: Path) -> None:
    """Heads that are interleaved in the file, and parts that are stacked, come to the rows where a decoded
    copy has them."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", encoding_of=lambda n: "Q8_0" if "down_proj" in n else of_4_bits("Q4_1")(n)
    )
    model, exact = opened(path, "int4"), opened(path, "float32")
    for layer, reference in zip(model.layers, exact.layers, strict=True):  # type: ignore[attr-defined]
        assert {name: getattr(layer, name).is_in_4_bits for name in ("qkv", "out", "gate_up", "down")} == {
            "qkv": True,
            "out": True,
            "gate_up": True,
            "down": False,
        }
        for name in ("qkv", "out", "gate_up"):
            assert relative(unpacked(getattr(layer, name)), getattr(reference, name)) < 4e-3, name
        assert layer.down.packed.dtype == torch.int8
    assert model.embedding.packed is None and model.output.packed.dtype == torch.int8  # type: ignore[attr-defined]


def test_only_matrices_that_a_file_has_in_4_bits_throughout_and_in_order_are_held_so(tmp_path: Path) -> None:
    """Files that mix encodings have the values of attention, and others, in more bits than the rest."""
    names = ("qkv", "out", "gate_up", "down")
    parts = {"v_proj": "qkv", "q_proj": "qkv", "up_proj": "gate_up", "gate_proj": "gate_up"}
    reordered = dataclasses.replace(TINY_LLAMA, architecture="phi3", rotary_dim=TINY_LLAMA.head_dim // 2)
    for part, held in {**parts, "reordered": "qkv"}.items():

        def encoding_of(name: str, part: str = part) -> str:
            return "Q8_0" if part in name else of_4_bits("Q4_1")(name)

        config = reordered if part == "reordered" else TINY_LLAMA
        path = write_tiny_gguf(tmp_path / f"{part}.gguf", config, encoding_of=encoding_of)
        for layer in opened(path, "int4").layers:
            assert [name for name in names if not getattr(layer, name).is_in_4_bits] == [held]
    eight = write_tiny_gguf(tmp_path / "eight.gguf", encoding_of=lambda name: "Q8_0")
    for source in (eight, write_tiny_model(tmp_path / "directory")):
        with pytest.raises(ConfigError, match="--weights int4 needs a GGUF file with matrices in Q4_0, Q4_1"):
            opened(source, "int4")
    with pytest.raises(ConfigError, match="--weights int4 needs a GGUF file"):
        load("int4")


@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
def test_auto_takes_4_bits_where_the_file_has_them_and_keeps_the_keys_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(
        form_choice, "kept_measurement", lambda _: measured({1: 2.0}, bfloat16=3.0, int4={1: 1.0})
    )
    monkeypatch.delenv("PENSTOCK_WEIGHTS")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", encoding_of=of_4_bits(encoding))
    same = {"Q4_1": "int4", "Q8_0": "int8"}[encoding]
    assert opened(path, "auto").digest == opened(path, same).digest  # type: ignore[arg-type]
    others = {opened(path, name).digest for name in ("float32", "bfloat16", "int8")}  # type: ignore[arg-type]
    assert (opened(path, "auto").digest in others) == (encoding == "Q8_0")


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("rotary_dim", [0, TINY_LLAMA.head_dim // 2])
def test_a_gguf_file_and_safetensors_of_one_model_become_the_same_forms(
    tmp_path: Path, weights: WeightsName, rotary_dim: int
) -> None:
    """Heads that llama.cpp's converter interleaves, stacked parts and rows in another order included; nothing
    is written. Of rows that were put into another order all forms hold the same values, too."""
    config = (
        TINY_LLAMA
        if not rotary_dim
        else dataclasses.replace(TINY_LLAMA, architecture="phi3", rotary_dim=rotary_dim)
    )
    from_gguf = opened(write_tiny_gguf(tmp_path / "tiny.gguf", config), weights)
    from_directory = opened(write_tiny_model(tmp_path / "directory", config), weights)
    for one, other in zip(from_gguf.layers, from_directory.layers, strict=True):  # type: ignore[attr-defined]
        for name in ("qkv", "out", "gate_up", "down"):
            pairs = zip(getattr(one, name).tensors, getattr(other, name).tensors, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
            held: Matrix = getattr(one, name)
            if held.packed is not None and held.scale is not None and held.wide is not None:
                assert torch.equal((held.packed * held.scale.float().unsqueeze(1)).bfloat16(), held.wide), (
                    name
                )


def opened(path: Path, weights: WeightsName, max_model_len: int | None = None) -> Decoder:
    source = ModelSource(str(path), weights=weights)
    return load_on_cpu(source, max_model_len=max_model_len).model


@pytest.mark.parametrize("width", [24, 33])
def test_rows_that_the_product_of_8_bits_would_read_past_are_held_wide(width: int) -> None:
    matrix = empty_matrix("layers.0.out", (48, width), False, INT8)
    values = torch.randn(48, width, generator=torch.Generator().manual_seed(0))
    matrix.fill(slice(None), values)
    x = torch.ones(1, width)
    assert matrix.packed is None
    torch.testing.assert_close(matrix.product(x).float(), x @ values.t(), rtol=2e-2, atol=5e-2)
    assert INT8.num_bytes([("layers.0.out", (48, width))], False) == sum(
        t.numel() * t.element_size() for t in matrix.tensors
    )


@pytest.mark.parametrize("forms", [INT8, INT4, Forms(torch.bfloat16), Forms(torch.float32)], ids=str)
def test_a_row_of_a_steady_form_is_the_same_bits_among_any_others(forms: Forms) -> None:
    steady = forms.made_steady()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (64, 96), generator=generator, dtype=torch.uint8)
    scale, zero = (torch.rand(64, 96 // GROUP, generator=generator) for _ in range(2))
    matrix = empty_matrix("layers.0.out", (64, 96), False, steady)
    if steady.few_rows_of_4:
        matrix = matrix_of_quants(Quants(numbers, scale, zero), steady)
    else:
        matrix.fill(slice(None), numbers * scale.repeat_interleave(GROUP, dim=1))
    x = torch.randn(200, 96, generator=generator)
    whole = matrix.product(x)
    assert all(
        torch.equal(matrix.product(x[i : i + num]), whole[i : i + num])
        for i in (0, 5)
        for num in (1, 2, 7, 16, 33, 190)
    )
    assert matrix.shape == (64, 96) and (matrix.wide is None) == bool(steady.few_rows)
    assert steady.scope != forms.scope and str(steady).endswith("for any number of rows")


# --------------------------------------------------------------------------------------------- identity of KV


def test_every_form_has_keys_of_its_own_and_the_number_of_rows_none() -> None:
    digests = {name: load(name).digest for name in ("float32", "bfloat16", "int8")}  # type: ignore[arg-type]
    assert len(set(digests.values())) == 3
    assert load("auto").digest == digests["float32"], (
        "random weights have nothing to lose, and measure nothing"
    )
    assert Forms(torch.bfloat16, 4).scope == INT8.scope == "int8+bfloat16" != Forms(torch.bfloat16).scope
    assert Forms(torch.bfloat16, 4, 2).scope == INT4.scope == "int4+int8+bfloat16"
    assert INT4.of(frozenset()) == INT8 and INT4.of({"layers.0.qkv"}) == INT4


# ------------------------------------------------------------------------------------------------- the choice


def measured(
    int8: dict[int, float], bfloat16: float = 2.0, float32: float = 4.0, int4: dict[int, float] | None = None
) -> Measurement:
    """`int4`: None where the form takes no such shape."""
    ms = {str(rows): {"int8": int8.get(rows, 9.0), "bfloat16": bfloat16, "float32": float32} for rows in ROWS}
    for rows, of in ms.items():
        of |= {} if int4 is None else {"int4": int4.get(int(rows), 9.0)}
    return Measurement("a CPU", "2.13", 2, (8, 8, 8), ms, others=0.0)


def test_each_number_of_rows_gets_the_form_that_was_fastest() -> None:
    assert measured({1: 1.0, 2: 1.0, 4: 1.9}).forms == Forms(torch.bfloat16, 4)
    assert measured({1: 1.0, 2: 3.0, 4: 1.0}).forms == Forms(torch.bfloat16, 1), (
        "one that loses in between ends there"
    )
    assert measured({}).forms == Forms(torch.bfloat16)
    assert measured({1: 1.0}, bfloat16=5.0).forms == Forms(torch.float32, 1), (
        "a CPU without units for bfloat16"
    )
    assert measured({}, bfloat16=5.0).forms is None
    assert measured({1: 1.0, 2: 1.0}, int4={1: 0.5, 2: 0.9, 4: 1.9}).forms == Forms(torch.bfloat16, 2, 4)
    assert measured({1: 1.0, 2: 1.0}, int4={1: 1.1, 2: 0.9}).forms == Forms(torch.bfloat16, 2), (
        "8 bits are faster for a row alone"
    )
    assert measured({}, int4={1: 0.5}).forms == Forms(torch.bfloat16, 0, 1)


def test_a_cpu_is_measured_once_and_again_where_the_file_is_no_longer_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    times = []

    def count(*_: object) -> Measurement:
        times.append(1)
        return dataclasses.replace(
            measured({1: 1.0}),
            **dict(zip(("cpu", "torch", "threads", "shape"), form_choice._place(TINY), strict=True)),
        )

    monkeypatch.setattr(form_choice, "measure", count)
    assert kept_measurement(TINY) is None
    assert fastest_forms(TINY, silent) == fastest_forms(TINY, silent) == Forms(torch.bfloat16, 1)
    assert len(times) == 1
    (file,) = (tmp_path / "forms").iterdir()
    raw = json.loads(file.read_text())
    for damaged in (
        "{",
        "[]",
        json.dumps({**raw, "ms": {}}),
        json.dumps({**raw, "cpu": "another"}),
        json.dumps({**raw, "threads": 99}),
    ):
        file.write_text(damaged)
        assert kept_measurement(TINY) is None, damaged
    assert fastest_forms(TINY, silent) is not None and len(times) == 2
    assert kept_measurement(SMOLLM2_135M) is None, "another shape"


@pytest.mark.parametrize(
    ("then", "now", "again"), [(0.0, 0.0, False), (64.0, 0.0, True), (64.0, 64.0, False), (0.0, 64.0, False)]
)
def test_what_was_measured_on_crowded_cores_is_measured_again_when_they_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: float, now: float, again: bool
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(form_choice, "allowed_cores", lambda: AllowedCores(frozenset(range(64)), None))
    place = dict(zip(("cpu", "torch", "threads", "shape"), form_choice._place(TINY), strict=True))
    found = [
        dataclasses.replace(measured({1: 1.0}), others=then, **place),
        dataclasses.replace(measured({}), others=0.0, **place),
    ]
    monkeypatch.setattr(form_choice, "measure", lambda *_: found.pop(0))
    monkeypatch.setattr(form_choice, "used_by_others", lambda: now)
    assert fastest_forms(TINY, silent) == Forms(torch.bfloat16, 1)
    assert fastest_forms(TINY, silent) == (Forms(torch.bfloat16) if again else Forms(torch.bfloat16, 1))


def test_the_environment_says_what_auto_means_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WEIGHTS", "bfloat16")
    assert wanted("auto", *CPU) == "bfloat16" and wanted("int8", *CPU) == "int8"
    assert wanted("auto", "cuda", torch.bfloat16) == "float32", "there the dtype alone counts"
    monkeypatch.delenv("PENSTOCK_WEIGHTS")
    assert wanted("auto", *CPU) == "auto"
    monkeypatch.setenv("PENSTOCK_WEIGHTS", "int3")
    with pytest.raises(ConfigError, match=r"\$PENSTOCK_WEIGHTS must be one of"):
        wanted("auto", *CPU)


def test_a_form_is_refused_where_the_dtype_already_says_it() -> None:
    with pytest.raises(ConfigError, match="--weights int8 needs --device cpu and --dtype float32"):
        load_on_cpu(ModelSource("tiny-llama", "dummy", weights="int8"), torch.bfloat16)
    with pytest.raises(ConfigError, match="--weights must be auto, float32, bfloat16, int8 or int4"):
        ModelSource(weights="int3")  # type: ignore[arg-type]
