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

from penstock.contract import Adapter, Chunk
from penstock.errors import ModelError
from penstock.models.adapters import AdapterConfig, parse_adapter_config, read_adapter
from penstock.models.decoder import Decoder
from penstock.models.hashed_file import WeightFile
from penstock.models.lora import AdapterWeights, LoraRun, LoraRuns, lora_runs
from penstock.testing.tiny_models import (
    TINY_LLAMA,
    TINY_MIXTRAL,
    TINY_QWEN2_MOE,
    TINY_QWEN3,
    tiny_tensors,
    write_tiny_model,
)
from tests.support.adapters import (
    ALL_MODULES,
    ATTENTION,
    PREFIX,
    adapter_tensors,
    merged,
    write_adapter,
    write_random_adapter,
)
from tests.support.contiguous_kv import logits_of
from tests.support.loading import load_on_cpu

IDS = list(range(3, 43))
TOLERANCE = 1e-5  # of the largest logit, in float32
TENSORS = "adapter_model.safetensors"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_on_cpu(directory, dtype).model


@pytest.fixture
def llama(tmp_path: Path) -> Decoder:
    return load(write_tiny_model(tmp_path / "base"))


def logits(model: Decoder, *weights: AdapterWeights) -> torch.Tensor:
    """Each of `weights` applies to all tokens."""
    runs = LoraRuns([LoraRun(0, len(IDS), each) for each in weights]) if weights else None
    return logits_of(model, IDS, runs)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def dense(path: Path, tensors: dict[str, torch.Tensor], scale: Any, config: Any = TINY_LLAMA) -> torch.Tensor:
    """Logits of the model with the adapter merged into its weights."""
    base = merged(tiny_tensors(config), tensors, scale)
    return logits(load(write_tiny_model(path / "merged", config, tensors=base)))


# --------------------------------------------------------------------------------- the same as merged weights


def test_logits_are_those_of_merged_weights(tmp_path: Path) -> None:
    for config in (TINY_LLAMA, TINY_QWEN3, TINY_QWEN2_MOE):
        model = load(write_tiny_model(tmp_path / "base", config))
        for modules in (ALL_MODULES, ATTENTION, ("q_proj", "v_proj"), ("up_proj",), ("k_proj", "down_proj")):
            tensors = adapter_tensors(config, seed=1, rank=4, modules=modules)
            adapter = write_adapter(tmp_path / "adapter", tensors, lora_alpha=6)
            expected = dense(tmp_path, tensors, 6 / 4, config)
            assert error(logits(model, read_adapter(adapter, model).weights), expected) < TOLERANCE
            assert error(logits(model), expected) > 1e-2, "an adapter that changes nothing proves nothing"


OF_ALL = dict.fromkeys(ALL_MODULES, 2.0)
SCALES: list[tuple[dict[str, Any], float | dict[str, float]]] = [
    ({"lora_alpha": 16}, 4.0),
    ({"lora_alpha": 0.5}, 0.125),
    ({"lora_alpha": 16, "use_rslora": True}, 8.0),
    (
        {"alpha_pattern": {"q_proj": 32, "mlp.up_proj": 2, "up_proj": 100}},
        OF_ALL | {"q_proj": 8.0, "up_proj": 0.5},
    ),
    ({"alpha_pattern": {"^q_proj": 32, r"self_attn\.k_proj$": 12}}, OF_ALL | {"k_proj": 3.0}),
]


def test_the_scale_and_the_rank_follow_the_config(tmp_path: Path, llama: Decoder) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=2)
    for fields, scale in SCALES:
        adapter = write_adapter(tmp_path / "adapter", tensors, **{"lora_alpha": 8, **fields})
        found = logits(llama, read_adapter(adapter, llama).weights)
        assert error(found, dense(tmp_path, tensors, scale)) < TOLERANCE
    tensors |= adapter_tensors(TINY_LLAMA, seed=4, rank=2, modules=("k_proj", "up_proj"))
    ranks = {"k_proj": 2, "up_proj": 2}
    adapter = write_adapter(tmp_path / "adapter", tensors, r=4, lora_alpha=4, rank_pattern=ranks)
    expected = dense(tmp_path, tensors, dict.fromkeys(ALL_MODULES, 1.0) | {"k_proj": 2.0, "up_proj": 2.0})
    assert error(logits(llama, read_adapter(adapter, llama).weights), expected) < TOLERANCE


WHOLE_NAMES = [f"model.layers.{i}.{module}" for i in range(8) for module in ("self_attn", "mlp")]
TARGETS: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": "All-Linear"},
    {"target_modules": r".*\.(self_attn|mlp)\.[a-z_]+_proj"},
    {"target_modules": [*ALL_MODULES, "query_key_value"]},  # names that the model does not have
    {"target_modules": [*WHOLE_NAMES, *ALL_MODULES]},
    {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
    {"some_new_field": None},
    {"init_lora_weights": "gaussian"},
]


def test_targets_may_be_written_in_every_way(tmp_path: Path, llama: Decoder) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    usual = read_adapter(write_adapter(tmp_path / "usual", tensors), llama).digest
    for fields in TARGETS:
        found = read_adapter(write_adapter(tmp_path / "adapter", tensors, **fields), llama)
        assert found.digest == usual
        assert all(layer.keys() == {"qkv", "out", "gate_up", "down"} for layer in found.weights.layers)
    some = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
    adapter = write_adapter(tmp_path / "adapter", some, target_modules=r"model\.layers\.1\..*")
    found = logits(llama, read_adapter(adapter, llama).weights)
    assert error(found, dense(tmp_path, some, 2.0)) < TOLERANCE, "some layers may stay as they are"


def test_adapters_and_models_in_half_precision(tmp_path: Path, llama: Decoder) -> None:
    for stored in (torch.float16, torch.bfloat16, torch.float32):
        tensors = {name: tensor.to(stored) for name, tensor in adapter_tensors(TINY_LLAMA, seed=1).items()}
        weights = read_adapter(write_adapter(tmp_path / "a", tensors), llama).weights
        assert error(logits(llama, weights), dense(tmp_path, tensors, 2.0)) < TOLERANCE
    model = load(write_tiny_model(tmp_path / "base"), torch.bfloat16)
    weights = read_adapter(tmp_path / "a", model).weights
    parts = [part for layer in weights.layers for weight in layer.values() for part in weight.parts]
    assert {part.b.dtype for part in parts} == {torch.bfloat16}
    assert error(logits(model, weights), dense(tmp_path, tensors, 2.0)) < 0.05
    assert error(logits(model), dense(tmp_path, tensors, 2.0)) > 0.05


# ------------------------------------------------------------------------------------------- tokens of a step


def test_each_run_changes_its_own_tokens_and_no_others(tmp_path: Path, llama: Decoder) -> None:
    one, two = (
        read_adapter(write_random_adapter(tmp_path / str(seed), TINY_LLAMA, seed), llama).weights
        for seed in (1, 2)
    )
    x = torch.randn(10, TINY_LLAMA.hidden, generator=torch.Generator().manual_seed(0))

    def added(width: int, *runs: LoraRun) -> torch.Tensor:
        y = torch.zeros(10, width)
        LoraRuns(runs).add(1, "qkv" if width == TINY_LLAMA.qkv_width else "gate_up", x, y)
        return y

    for width in (TINY_LLAMA.qkv_width, 2 * TINY_LLAMA.ffn):
        y = added(width, LoraRun(2, 5, one), LoraRun(5, 6, two))
        alone = [added(width, LoraRun(0, 10, weights)) for weights in (one, two)]
        assert not y[:2].any() and not y[6:].any()
        assert torch.allclose(y[2:5], alone[0][2:5], atol=1e-6)
        assert torch.allclose(y[5:6], alone[1][5:6], atol=1e-6)
        assert not torch.allclose(alone[0][5], alone[1][5], atol=1e-2)


def chunk(num_tokens: int, adapter: Adapter | None) -> Chunk:
    return Chunk("r", 0, 0, (1,) * num_tokens, np.zeros(1, np.int32), True, 1, adapter)


def test_neighbours_with_the_same_content_are_one_run() -> None:
    weights = {digest: AdapterWeights(()) for digest in "xy"}
    a, twin, b = Adapter("a", "x"), Adapter("twin", "x"), Adapter("b", "y")
    step = ((1, a), (1, twin), (1, b), (2, None), (3, b), (4, b), (1, None))
    found = lora_runs([chunk(*each) for each in step], lambda adapter: weights[adapter.digest])
    assert found is not None
    runs = [(run.start, run.end, run.weights is weights["x"]) for run in found.runs]
    assert runs == [(0, 2, True), (2, 3, False), (5, 12, False)]
    assert lora_runs([chunk(3, None)], lambda _: pytest.fail("no weights are wanted")) is None


# --------------------------------------------------------------------------------------- the names of modules

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]


def config(**fields: Any) -> AdapterConfig:
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    return parse_adapter_config({**usual, **fields}, "here")


def test_a_name_is_a_whole_ending_of_a_module_and_exclusions_come_first() -> None:
    def targeted(names: Any, *excluded: str) -> list[str]:
        adapter = config(target_modules=names, exclude_modules=list(excluded))
        return [module.removeprefix("model.layers.") for module in MODULES if adapter.targets(module)]

    q = [f"{layer}.self_attn.q_proj" for layer in (0, 1, 11)]
    assert targeted(["q_proj"]) == targeted("ALL-linear", "o_proj", "up_proj") == q
    assert targeted(["1.mlp.up_proj"]) == ["1.mlp.up_proj"], "layer 11 does not end in layer 1"
    assert targeted(["proj", "p_proj", "attn.q_proj"]) == []
    assert targeted(["q_proj", "up_proj"], "mlp.up_proj", "layers.0.self_attn.q_proj") == q[1:]
    assert config(target_modules="all-linear").targets("lm_head") is False


# ----------------------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_the_content_and_of_nothing_else(tmp_path: Path, llama: Decoder) -> None:
    tensors = adapter_tensors(TINY_LLAMA, seed=1)
    first = read_adapter(write_adapter(tmp_path / "first", tensors), llama).digest
    assert len(bytes.fromhex(first)) == 32
    other = dict(reversed(tensors.items()))
    again = write_adapter(tmp_path / "again", other, lora_dropout=0.3, base_model_name_or_path="x")
    assert read_adapter(again, llama).digest == first
    name = f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"
    nudged = tensors | {name: tensors[name].clone()}
    nudged[name][0, 0] += 1e-6
    others = [
        write_adapter(tmp_path / "alpha", tensors, lora_alpha=7),
        write_adapter(tmp_path / "rslora", tensors, use_rslora=True),
        write_adapter(tmp_path / "nudged", nudged),
        write_adapter(tmp_path / "halved", {name: tensor.half() for name, tensor in tensors.items()}),
        write_adapter(tmp_path / "fewer", adapter_tensors(TINY_LLAMA, seed=1, modules=ATTENTION)),
    ]
    digests = {read_adapter(other, llama).digest for other in others}
    assert len(digests) == len(others) and first not in digests


def test_an_adapter_that_is_written_to_while_it_is_read_is_refused(
    tmp_path: Path, llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    other = (write_random_adapter(tmp_path / "other", TINY_LLAMA, seed=2) / TENSORS).read_bytes()
    os.utime(adapter / TENSORS, (1, 1))
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

REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"use_dora": True}, "DoRA is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"layers_to_transform": [0]}, "layers_to_transform"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"use_wonder": True}, "unknown fields.*'use_wonder'"),
    ({"r": 0}, "r must be a positive whole number"),
    ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
    ({"target_modules": None}, "adapts nothing"),
    ({"target_modules": [*ALL_MODULES, 7]}, "target_modules must be a list of names"),
    ({"target_modules": [*ALL_MODULES, "lm_head"]}, "adapting lm_head is not supported"),
    ({"target_modules": [*ALL_MODULES, "embed_tokens"]}, r"adapting model\.embed_tokens is not supported"),
    ({"alpha_pattern": {".*q_proj": 4}}, "alpha_pattern takes names"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    ({"r": 8}, r"misshapen tensors: .*_proj\.lora_A\.weight is \[4, \d+\], expected \[8, \d+\]"),
    ({"exclude_modules": None, "target_modules": ["q_proj"]}, "not targeted: .*k_proj"),
]
Q_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


def without(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


REFUSED_TENSORS: list[tuple[Any, str]] = [
    (lambda t: without(t, Q_B), r"missing tensors: .*0\.self_attn\.q_proj\.lora_B"),
    (lambda t: t | {Q_A.replace(".0.", ".99."): t[Q_A]}, r"fit no module of the model: .*layers\.99"),
    (lambda t: {n.replace("model.layers", "h"): x for n, x in t.items()}, "fit no module of the model"),
    (lambda t: t | {Q_A.replace("lora_A", "lora_magnitude_vector"): t[Q_A]}, "lora_magnitude_vector"),
    (lambda t: t | {Q_A: t[Q_A].t().contiguous()}, "misshapen tensors"),
    (lambda t: t | {Q_A: t[Q_A].to(torch.int8)}, "dtypes other than F32, BF16, F16: .*torch.int8"),
    (lambda t: t | {Q_A: t[Q_A] * torch.nan}, "not finite: .*q_proj"),
    (lambda t: t | {Q_A: t[Q_A].index_fill(0, torch.tensor([1]), torch.inf)}, "not finite: .*q_proj"),
    (lambda t: adapter_tensors(TINY_QWEN3, seed=1), "do not fit the model"),
]


def test_configs_and_tensors_that_cannot_be_honoured_are_refused(tmp_path: Path, llama: Decoder) -> None:
    tensors, path = adapter_tensors(TINY_LLAMA, seed=1), tmp_path / "adapter"
    for fields, said in REFUSED_FIELDS:
        with pytest.raises(ModelError, match=said):
            read_adapter(write_adapter(path, tensors, **fields), llama)
    for change, said in REFUSED_TENSORS:
        with pytest.raises(ModelError, match=said):
            read_adapter(write_adapter(path, change(tensors), r=4, target_modules=list(ALL_MODULES)), llama)


@pytest.mark.parametrize(
    ("config", "module"),
    [
        (TINY_QWEN2_MOE, "mlp.experts.3.up_proj"),
        (TINY_QWEN2_MOE, "mlp.shared_expert.down_proj"),
        (TINY_QWEN2_MOE, "mlp.shared_expert_gate"),
        (TINY_QWEN2_MOE, "mlp.gate"),
        (TINY_MIXTRAL, "block_sparse_moe.experts.0.w1"),
    ],
)
def test_an_adapter_on_experts_or_a_router_is_refused_by_name(
    tmp_path: Path, config: Any, module: str
) -> None:
    model, name = load(write_tiny_model(tmp_path / "base", config)), f"model.layers.2.{module}"
    tensors = adapter_tensors(config, seed=1)
    tensors |= {f"{PREFIX}{name}.lora_{which}.weight": torch.ones(4, 64) for which in "AB"}
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules="all-linear")
    with pytest.raises(ModelError, match=f"adapting experts and routers is not supported: {name}"):
        read_adapter(adapter, model)


def test_where_a_regular_expression_names_the_modules_the_tensors_say_which(
    tmp_path: Path, llama: Decoder
) -> None:
    """One out of a file is never run: this one takes longer than anybody lives."""
    assert read_adapter(
        write_random_adapter(tmp_path / "endless", TINY_LLAMA, 1, target_modules=r"([a-z_.0-9]+)+!"), llama
    ).digest
    tensors, path = adapter_tensors(TINY_LLAMA, seed=1), tmp_path / "adapter"
    for gone, said in ((Q_A, "lora_A"), (Q_B, "lora_B")):
        with pytest.raises(ModelError, match=rf"missing tensors: .*0\.self_attn\.q_proj\.{said}"):
            read_adapter(write_adapter(path, without(tensors, gone), target_modules=".*proj"), llama)
    with pytest.raises(ModelError, match="holds no tensors"):
        read_adapter(write_adapter(path, {}, target_modules=".*proj"), llama)


def test_damaged_and_missing_files_are_refused(tmp_path: Path, llama: Decoder) -> None:
    whole = (write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1) / TENSORS).read_bytes()
    damaged = "damaged or not a safetensors file"
    header = json.dumps({Q_A: {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}).encode()
    of_4_bits = len(header).to_bytes(8, "little") + header + bytes(4)  # the format has it, torch has not
    cuts = [whole[:length] for length in (0, 8, len(whole) - 1)]
    for name, data, said in (
        ("adapter_config.json", b"{", "is not valid JSON"),
        ("adapter_config.json", None, r"has no adapter_config\.json"),
        (TENSORS, None, r"has no adapter_model\.safetensors"),
        (TENSORS, of_4_bits, f"{damaged}: .*F4"),
        *((TENSORS, data, damaged) for data in (b"garbage", *cuts)),
    ):
        adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
        (adapter / name).unlink()
        if data is not None:
            (adapter / name).write_bytes(data)
        with pytest.raises(ModelError, match=said):
            read_adapter(adapter, llama)
    (adapter / TENSORS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="is a pickle, which can run code"):
        read_adapter(adapter, llama)
    with pytest.raises(ModelError, match="is no directory"):
        read_adapter(tmp_path / "nowhere", llama)


def test_weights_that_are_not_finite_once_they_are_in_the_model_are_refused(tmp_path: Path) -> None:
    """Every answer with such an adapter would be noise."""
    for dtype, alpha, part, large in (
        (torch.float32, 1e40, "lora_B", 1.0),
        (torch.bfloat16, 4, "lora_A", 3.4e38),
        (torch.bfloat16, 4, "lora_B", 3.4e38),
    ):
        model = load(write_tiny_model(tmp_path / "model"), dtype)
        tensors = {
            name: torch.full_like(tensor, large) if part in name else tensor
            for name, tensor in adapter_tensors(TINY_LLAMA, seed=1).items()
        }
        with pytest.raises(ModelError, match=r"weights of model\.layers\.0\..*_proj.* are not finite"):
            read_adapter(write_adapter(tmp_path / "adapter", tensors, r=4, lora_alpha=alpha), model)
