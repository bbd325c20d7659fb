"""LoRA adapters from PEFT's files to logits: the same as with the update merged into the weights; a clear
refusal of everything else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import ModelSource
from penstock.contract import Adapter, Chunk
from penstock.errors import ModelError
from penstock.models.adapters import read_adapter
from penstock.models.decoder import Decoder
from penstock.models.hashed_file import WeightFile
from penstock.models.layers import TorchLayerOps
from penstock.models.loader import load_model
from penstock.models.lora import AdapterWeights, LoraRun, LoraRuns, lora_runs
from penstock.models.model import ModelConfig
from penstock.models.progress import silent
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3, tiny_tensors, write_tiny_model
from tests.support.adapters import (
    ALL_MODULES,
    ATTENTION,
    PREFIX,
    adapter_tensors,
    merged,
    write_adapter,
    write_random_adapter,
)
from tests.support.contiguous_kv import ContiguousKv, forward

IDS = list(range(3, 43))
TOLERANCE = 1e-5  # of the largest logit, in float32


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(ModelSource(str(directory)), torch.device("cpu"), dtype, TorchLayerOps(), silent).model


@pytest.fixture
def llama(tmp_path: Path) -> Decoder:
    return load(write_tiny_model(tmp_path / "base"))


def logits(model: Decoder, *weights: AdapterWeights, ids: list[int] = IDS) -> torch.Tensor:
    """Each of `weights` applies to all tokens."""
    runs = LoraRuns([LoraRun(0, len(ids), each) for each in weights]) if weights else None
    return forward(model, ContiguousKv(model.config, model.rope), ids, runs)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


# --------------------------------------------------------------------------------- the same as merged weights


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    "modules", [ALL_MODULES, ATTENTION, ("q_proj", "v_proj"), ("up_proj",), ("k_proj", "down_proj")], ids=len
)
def test_logits_are_those_of_merged_weights(
    tmp_path: Path, config: ModelConfig, modules: tuple[str, ...]
) -> None:
    tensors, base = adapter_tensors(config, seed=1, rank=4, modules=modules), tiny_tensors(config)
    adapter = write_adapter(tmp_path / "adapter", tensors, lora_alpha=6)
    model = load(write_tiny_model(tmp_path / "base", config, tensors=base))
    dense = load(write_tiny_model(tmp_path / "merged", config, tensors=merged(base, tensors, 6 / 4)))
    found, expected, plain = logits(model, read_adapter(adapter, model).weights), logits(dense), logits(model)
    assert error(found, expected) < TOLERANCE
    assert error(plain, expected) > 1e-2, "an adapter that changes nothing proves nothing"


SCALES: dict[str, tuple[dict[str, Any], float | dict[str, float]]] = {
    "alpha over r": ({"lora_alpha": 16}, 4.0),
    "a fraction": ({"lora_alpha": 0.5}, 0.125),
    "rank-stabilised": ({"lora_alpha": 16, "use_rslora": True}, 8.0),
    "alpha by module": (
        {"lora_alpha": 8, "alpha_pattern": {"q_proj": 32, "mlp.up_proj": 2, "up_proj": 100}},
        dict.fromkeys(ALL_MODULES, 2.0) | {"q_proj": 8.0, "up_proj": 0.5},
    ),
    "an anchored name": (
        {"lora_alpha": 8, "alpha_pattern": {"^q_proj": 32, r"self_attn\.k_proj$": 12}},
        dict.fromkeys(ALL_MODULES, 2.0) | {"k_proj": 3.0},
    ),
}


@pytest.mark.parametrize(("fields", "scale"), SCALES.values(), ids=SCALES)
def test_the_scale_follows_the_config(
    tmp_path: Path, llama: Decoder, fields: dict[str, Any], scale: Any
) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=2)
    dense = load(
        write_tiny_model(tmp_path / "merged", tensors=merged(tiny_tensors(TINY_LLAMA), tensors, scale))
    )
    weights = read_adapter(write_adapter(tmp_path / "adapter", tensors, **fields), llama).weights
    assert error(logits(llama, weights), logits(dense)) < TOLERANCE


def test_ranks_may_differ_by_module(tmp_path: Path, llama: Decoder) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=3) | adapter_tensors(
        TINY_LLAMA, seed=4, rank=2, modules=("k_proj", "up_proj")
    )
    adapter = write_adapter(
        tmp_path / "adapter", tensors, r=4, lora_alpha=4, rank_pattern={"k_proj": 2, "up_proj": 2}
    )
    scales = dict.fromkeys(ALL_MODULES, 1.0) | {"k_proj": 2.0, "up_proj": 2.0}
    dense = load(
        write_tiny_model(tmp_path / "merged", tensors=merged(tiny_tensors(TINY_LLAMA), tensors, scales))
    )
    assert error(logits(llama, read_adapter(adapter, llama).weights), logits(dense)) < TOLERANCE


TARGETS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "in capitals": {"target_modules": "All-Linear"},
    "a regular expression": {"target_modules": r".*\.(self_attn|mlp)\.[a-z_]+_proj"},
    "names that the model does not have": {"target_modules": [*ALL_MODULES, "query_key_value"]},
    "whole names": {
        "target_modules": [f"model.layers.{i}.{m}" for i in range(8) for m in ("self_attn", "mlp")]
        + list(ALL_MODULES)
    },
    "an exclusion that meets nothing": {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
    "an unknown field of no value": {"some_new_field": None},
    "a neutral initialisation": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("fields", TARGETS.values(), ids=TARGETS)
def test_targets_may_be_written_in_every_way(tmp_path: Path, llama: Decoder, fields: dict[str, Any]) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    found = read_adapter(write_adapter(tmp_path / "adapter", tensors, **fields), llama)
    assert found.digest == read_adapter(write_adapter(tmp_path / "usual", tensors), llama).digest
    assert all(layer.keys() == {"qkv", "out", "gate_up", "down"} for layer in found.weights.layers)


def test_some_layers_may_stay_as_they_are(tmp_path: Path, llama: Decoder) -> None:
    tensors = {
        name: tensor for name, tensor in adapter_tensors(TINY_LLAMA, seed=1).items() if ".layers.1." in name
    }
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=r"model\.layers\.1\..*")
    dense = load(
        write_tiny_model(tmp_path / "merged", tensors=merged(tiny_tensors(TINY_LLAMA), tensors, 2.0))
    )
    assert error(logits(llama, read_adapter(adapter, llama).weights), logits(dense)) < TOLERANCE


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_adapters_in_half_precision_are_taken_as_they_are(
    tmp_path: Path, llama: Decoder, stored: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in adapter_tensors(TINY_LLAMA, seed=1).items()}
    dense = load(
        write_tiny_model(tmp_path / "merged", tensors=merged(tiny_tensors(TINY_LLAMA), tensors, 2.0))
    )
    assert (
        error(
            logits(llama, read_adapter(write_adapter(tmp_path / "a", tensors), llama).weights), logits(dense)
        )
        < TOLERANCE
    )


def test_a_model_in_bf16_stays_near_its_merged_weights(tmp_path: Path) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    model = load(write_tiny_model(tmp_path / "base"), torch.bfloat16)
    dense = load(
        write_tiny_model(tmp_path / "merged", tensors=merged(tiny_tensors(TINY_LLAMA), tensors, 2.0))
    )
    weights = read_adapter(write_adapter(tmp_path / "adapter", tensors), model).weights
    assert all(
        part.b.dtype == torch.bfloat16
        for layer in weights.layers
        for weight in layer.values()
        for part in weight.parts
    )
    assert error(logits(model, weights), logits(dense)) < 0.05 < error(logits(model), logits(dense))


# ------------------------------------------------------------------------------------------- tokens of a step


def test_each_run_changes_its_own_tokens_and_no_others(tmp_path: Path, llama: Decoder) -> None:
    one, two = (
        read_adapter(write_random_adapter(tmp_path / str(seed), TINY_LLAMA, seed), llama).weights
        for seed in (1, 2)
    )
    x = torch.randn(10, TINY_LLAMA.hidden, generator=torch.Generator().manual_seed(0))
    runs = LoraRuns([LoraRun(2, 5, one), LoraRun(5, 6, two)])
    for name, width in (("qkv", TINY_LLAMA.qkv_width), ("gate_up", 2 * TINY_LLAMA.ffn)):
        y = torch.zeros(10, width)
        runs.add(1, name, x, y)
        alone = {}
        for key, weights in (("one", one), ("two", two)):
            alone[key] = torch.zeros(10, width)
            LoraRuns([LoraRun(0, 10, weights)]).add(1, name, x, alone[key])
        assert not y[:2].any() and not y[6:].any()
        assert torch.allclose(y[2:5], alone["one"][2:5], atol=1e-6) and torch.allclose(
            y[5:6], alone["two"][5:6], atol=1e-6
        )
        assert not torch.allclose(alone["one"][5], alone["two"][5], atol=1e-2)


def chunk(num_tokens: int, adapter: Adapter | None) -> Chunk:
    return Chunk("r", 0, 0, (1,) * num_tokens, np.zeros(1, np.int32), True, 1, adapter)


def test_neighbours_with_the_same_content_are_one_run() -> None:
    weights = {digest: AdapterWeights(()) for digest in "xy"}
    a, twin, b = Adapter("a", "x"), Adapter("twin", "x"), Adapter("b", "y")
    step = [
        chunk(1, a),
        chunk(1, twin),
        chunk(1, b),
        chunk(2, None),
        chunk(3, b),
        chunk(4, b),
        chunk(1, None),
    ]
    found = lora_runs(step, lambda adapter: weights[adapter.digest])
    assert found is not None
    assert [(run.start, run.end, run.weights is weights["x"]) for run in found.runs] == [
        (0, 2, True),
        (2, 3, False),
        (5, 12, False),
    ]


def test_a_step_without_adapters_has_no_runs() -> None:
    assert lora_runs([chunk(3, None), chunk(1, None)], lambda _: pytest.fail("no weights are wanted")) is None


# ----------------------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_the_content_and_of_nothing_else(tmp_path: Path, llama: Decoder) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    first = read_adapter(write_adapter(tmp_path / "first", tensors), llama).digest
    assert len(bytes.fromhex(first)) == 32
    again = write_adapter(
        tmp_path / "again", dict(reversed(tensors.items())), lora_dropout=0.3, base_model_name_or_path="x"
    )
    assert read_adapter(again, llama).digest == first
    name = f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"
    nudged = tensors | {name: tensors[name].clone()}
    nudged[name][0, 0] += 1e-6
    halved = {name: tensor.half() for name, tensor in tensors.items()}
    others = [
        write_adapter(tmp_path / "alpha", tensors, lora_alpha=7),
        write_adapter(tmp_path / "rslora", tensors, use_rslora=True),
        write_adapter(tmp_path / "nudged", nudged),
        write_adapter(tmp_path / "halved", halved),
        write_adapter(tmp_path / "fewer", adapter_tensors(TINY_LLAMA, seed=1, modules=ATTENTION)),
    ]
    digests = {read_adapter(other, llama).digest for other in others}
    assert len(digests) == len(others) and first not in digests


def test_an_adapter_that_is_written_to_while_it_is_read_is_refused(
    tmp_path: Path, llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    other = (
        write_random_adapter(tmp_path / "other", TINY_LLAMA, seed=2) / "adapter_model.safetensors"
    ).read_bytes()
    os.utime(adapter / "adapter_model.safetensors", (1, 1))
    read = WeightFile.read

    def read_and_replace(self: WeightFile, start: int, num_bytes: int) -> bytes:
        data = read(self, start, num_bytes)
        self.path.write_bytes(other)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(WeightFile, "read", read_and_replace)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors was written to while it was read"):
            read_adapter(adapter, llama)
    assert read_adapter(adapter, llama).digest == read_adapter(tmp_path / "other", llama).digest


# ---------------------------------------------------------------------------------------------------- refused

REFUSED_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "DoRA": ({"use_dora": True}, "DoRA is not supported"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "input-major weights": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "chosen layers": ({"layers_to_transform": [0]}, "layers_to_transform"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "trained tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    "biases": ({"bias": "all"}, "bias is 'all'"),
    "B biases": ({"lora_bias": True}, "lora_bias"),
    "parameters": ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
    "a classifier": ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "a field from the future": ({"use_wonder": True}, "unknown fields.*'use_wonder'"),
    "rank zero": ({"r": 0}, "r must be a positive whole number"),
    "a rank that is no number": ({"r": "8"}, "r must be a positive whole number"),
    "an alpha that is no number": ({"lora_alpha": None}, "lora_alpha must be a number"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
    "an alpha beyond all floats": ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
    "no targets": ({"target_modules": None}, "adapts nothing"),
    "odd targets": ({"target_modules": {"q_proj": 1}}, "target_modules must be a list"),
    "a target that is no name": (
        {"target_modules": [*ALL_MODULES, 7]},
        "target_modules must be a list of names",
    ),
    "an exclusion that is no name": ({"exclude_modules": [None]}, "exclude_modules must be a list of names"),
    "a target of no letters": (
        {"target_modules": [*ALL_MODULES, ""]},
        "target_modules must be a list of names",
    ),
    "the head": ({"target_modules": [*ALL_MODULES, "lm_head"]}, "adapting lm_head is not supported"),
    "embeddings": (
        {"target_modules": [*ALL_MODULES, "embed_tokens"]},
        r"adapting model\.embed_tokens is not supported",
    ),
    "a regular expression of alphas": ({"alpha_pattern": {".*q_proj": 4}}, "alpha_pattern takes names"),
    "a pattern that is none": ({"rank_pattern": [4]}, "rank_pattern must be an object"),
    "rslora of no kind": ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    "another rank than the tensors'": (
        {"r": 8},
        r"misshapen tensors: .*_proj\.lora_A\.weight is \[4, \d+\], expected \[8, \d+\]",
    ),
    "targets without tensors": (
        {"exclude_modules": None, "target_modules": ["q_proj"]},
        "not targeted: .*k_proj",
    ),
    "excluded tensors": ({"exclude_modules": ["q_proj"]}, "not targeted: .*q_proj"),
}


@pytest.mark.parametrize(("fields", "said"), REFUSED_FIELDS.values(), ids=REFUSED_FIELDS)
def test_a_config_that_cannot_be_honoured_is_refused(
    tmp_path: Path, llama: Decoder, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_adapter(
            write_adapter(tmp_path / "adapter", adapter_tensors(TINY_LLAMA, seed=1), **fields), llama
        )


Q_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


def without(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


REFUSED_TENSORS: dict[str, tuple[Any, str]] = {
    "half a pair": (lambda t: without(Q_B, t), r"missing tensors: .*0\.self_attn\.q_proj\.lora_B"),
    "a module too few": (lambda t: without(Q_A, without(Q_B, t)), r"missing tensors: .*q_proj\.lora_A"),
    "a layer too many": (
        lambda t: t | {Q_A.replace(".0.", ".99."): t[Q_A]},
        r"fit no module of the model: .*layers\.99",
    ),
    "another model": (
        lambda t: {n.replace("model.layers", "transformer.h"): x for n, x in t.items()},
        "fit no module of the model",
    ),
    "a magnitude vector": (
        lambda t: t | {Q_A.replace("lora_A.weight", "lora_magnitude_vector"): t[Q_A]},
        "lora_magnitude_vector",
    ),
    "a transposed tensor": (lambda t: t | {Q_A: t[Q_A].t().contiguous()}, "misshapen tensors"),
    "one dimension": (lambda t: t | {Q_A: t[Q_A].flatten()}, "misshapen tensors"),
    "whole numbers": (
        lambda t: t | {Q_A: t[Q_A].to(torch.int8)},
        "dtypes other than F32, BF16, F16: .*torch.int8",
    ),
    "eight bits": (
        lambda t: t | {Q_A: t[Q_A].to(torch.float8_e4m3fn)},
        "dtypes other than F32, BF16, F16: .*float8_e4m3fn",
    ),
    "no number": (lambda t: t | {Q_A: t[Q_A] * torch.nan}, "not finite: .*q_proj"),
    "nothing": (lambda t: {}, "missing tensors"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, llama: Decoder, change: Any, said: str) -> None:
    tensors = change(adapter_tensors(TINY_LLAMA, seed=1))
    with pytest.raises(ModelError, match=said):
        read_adapter(
            write_adapter(tmp_path / "adapter", tensors, r=4, target_modules=list(ALL_MODULES)), llama
        )


def test_an_adapter_of_another_size_is_refused(tmp_path: Path, llama: Decoder) -> None:
    with pytest.raises(ModelError, match="do not fit the model"):
        read_adapter(write_random_adapter(tmp_path / "adapter", TINY_QWEN3, seed=1), llama)


@pytest.mark.parametrize(("gone", "said"), [(Q_A, "lora_A"), (Q_B, "lora_B")])
def test_half_a_pair_is_refused_also_where_nobody_says_which_modules_are_adapted(
    tmp_path: Path, llama: Decoder, gone: str, said: str
) -> None:
    tensors = without(gone, adapter_tensors(TINY_LLAMA, seed=1))
    with pytest.raises(ModelError, match=rf"missing tensors: .*0\.self_attn\.q_proj\.{said}"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, target_modules=".*proj"), llama)


def test_a_regular_expression_beside_no_tensors_adapts_nothing(tmp_path: Path, llama: Decoder) -> None:
    with pytest.raises(ModelError, match="holds no tensors"):
        read_adapter(write_adapter(tmp_path / "adapter", {}, target_modules=".*proj"), llama)


def test_a_regular_expression_out_of_a_file_is_never_run(tmp_path: Path, llama: Decoder) -> None:
    """This one takes longer than anybody lives, and holds the interpreter all the while."""
    endless = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, 1, target_modules=r"([a-z_.0-9]+)+!")
    assert read_adapter(endless, llama).digest


def test_damaged_and_missing_files_are_refused(tmp_path: Path, llama: Decoder) -> None:
    for name, data, said in (
        ("adapter_config.json", b"{", "is not valid JSON"),
        ("adapter_config.json", b"[]", "must hold a JSON object"),
        ("adapter_model.safetensors", b"garbage", "damaged or not a safetensors file"),
        ("adapter_config.json", None, r"has no adapter_config\.json"),
        ("adapter_model.safetensors", None, r"has no adapter_model\.safetensors"),
    ):
        adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
        (adapter / name).unlink()
        if data is not None:
            (adapter / name).write_bytes(data)
        with pytest.raises(ModelError, match=said):
            read_adapter(adapter, llama)
    with pytest.raises(ModelError, match="is no directory"):
        read_adapter(tmp_path / "nowhere", llama)


def test_every_cut_of_the_tensor_file_is_refused(tmp_path: Path, llama: Decoder) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    file = adapter / "adapter_model.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="damaged or not a safetensors file"):
            read_adapter(adapter, llama)


def test_an_adapter_that_does_not_fit_into_memory_says_so(
    tmp_path: Path, llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)

    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3 GiB"
    for error in (torch.OutOfMemoryError("tried to allocate 3 GiB"), RuntimeError(said)):

        def full(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(torch, "cat", full)
        with pytest.raises(
            ModelError,
            match=r"does not fit into the memory of cpu: .*tried to allocate 3 GiB",
        ):
            read_adapter(adapter, llama)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F8_E8M0"])
def test_a_dtype_that_the_format_has_and_torch_has_not_is_refused(
    tmp_path: Path, llama: Decoder, dtype: str
) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    header = json.dumps(
        {
            Q_A: {
                "dtype": dtype,
                "shape": [8],
                "data_offsets": [0, {"F4": 4, "F6_E2M3": 6, "F8_E8M0": 8}[dtype]],
            }
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (adapter / "adapter_model.safetensors").write_bytes(
        data[: len(data) - {"F4": 4, "F6_E2M3": 2, "F8_E8M0": 0}[dtype]]
    )
    with pytest.raises(
        ModelError, match=f"adapter_model.safetensors is damaged or not a safetensors file: .*{dtype}"
    ):
        read_adapter(adapter, llama)


TOO_LARGE = {
    "a scale beyond F32": (torch.float32, 1e40, "lora_B", 1.0),
    "an A beyond BF16": (torch.bfloat16, 4, "lora_A", 3.4e38),
    "a B beyond BF16": (torch.bfloat16, 4, "lora_B", 3.4e38),
}


@pytest.mark.parametrize(("dtype", "alpha", "part", "large"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_weights_that_are_not_finite_once_they_are_in_the_model_are_refused(
    tmp_path: Path, dtype: torch.dtype, alpha: float, part: str, large: float
) -> None:
    """Every answer with such an adapter would be noise."""
    model = load(write_tiny_model(tmp_path / "model"), dtype)
    tensors = {
        n: torch.full_like(t, large) if part in n else t
        for n, t in adapter_tensors(TINY_LLAMA, seed=1).items()
    }
    with pytest.raises(ModelError, match=r"weights of model\.layers\.0\..*_proj.* are not finite"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, r=4, lora_alpha=alpha), model)


def test_a_pickle_is_not_opened(tmp_path: Path, llama: Decoder) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="is a pickle, which can run code"):
        read_adapter(adapter, llama)


# ----------------------------------------------------------------------------- faults that turn the above red


def faulty(weights: AdapterWeights, fault: str) -> AdapterWeights:
    """What a wrong reader would have made of the same files."""
    layers = [dict(layer) for layer in weights.layers]
    qkv = layers[0]["qkv"]
    if fault == "unscaled":
        parts = tuple(part._replace(b=part.b / 2) for part in qkv.parts)
    elif fault == "k and v exchanged":
        q, k, v = qkv.parts
        parts = (q, k._replace(columns=v.columns), v._replace(columns=k.columns))
    else:
        q, k, v = qkv.parts
        parts = (q, k._replace(ranks=q.ranks), v)
    layers[0]["qkv"] = qkv._replace(parts=parts)
    return AdapterWeights(tuple(layers))


@pytest.mark.parametrize("fault", ["unscaled", "k and v exchanged", "the A of another module"])
def test_the_comparison_with_merged_weights_turns_red_with(
    tmp_path: Path, llama: Decoder, fault: str
) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    dense = load(
        write_tiny_model(tmp_path / "merged", tensors=merged(tiny_tensors(TINY_LLAMA), tensors, 2.0))
    )
    weights = read_adapter(write_adapter(tmp_path / "adapter", tensors), llama).weights
    assert error(logits(llama, faulty(weights, fault)), logits(dense)) > 100 * TOLERANCE


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_enough_to_refuse_an_adapter(
    tmp_path: Path, llama: Decoder, wrong: float
) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    name = next(name for name in tensors if name.endswith("k_proj.lora_B.weight"))
    tensors[name][-1, -1] = wrong
    with pytest.raises(ModelError, match=r"not finite: .*k_proj"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors), llama)
