"""What the plug-in knows of the vLLM that it runs in: its configuration, and what decides the meaning of a
block's bytes. Owns the entry point, and the differences between versions outside the tier's class."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.store import FORMAT
from penstock.plugins.weights import weights_digest

TIER = "PenstockTier"
_MODULE = "penstock.plugins.vllm"
_MARK = "remembers_for_penstock"
# Attributes of vLLM's configuration that not every version has. Any other one that is missing is an error:
# what it decides would be missing in the identity of blocks.
_NOT_EVERYWHERE = ("override_attention_dtype", "calculate_kv_scales", "kv_cache_layout")
_CACHE = ("cache_dtype", "calculate_kv_scales", "kv_cache_layout", "prefix_caching_hash_algo")
_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "world_size",
    "cp_kv_cache_interleave_size",
)
_OFFLOAD_OPTIONS = ("block_size", "blocks_per_chunk", "canonical_layout", "spec_name")
_UNSTABLE_WORDS = ("_name_or_path", "transformers_version")  # of a model's config: they change no block


class Configured(NamedTuple):
    """What vLLM gives to a connector, and not to a tier."""

    vllm: Any  # VllmConfig
    kv_cache: Any  # KVCacheConfig


_configured: ContextVar[Configured | None] = ContextVar("penstock_configured", default=None)


def register() -> None:
    """The entry point of the group `vllm.general_plugins`; vLLM calls it in each of its processes, maybe
    twice. A vLLM without tiers is left alone."""
    with contextlib.suppress(ImportError):
        tiers = importlib.import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
        connectors = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        with contextlib.suppress(ValueError):  # it is registered already
            tiers.register_tier(TIER, _MODULE, TIER)
        _remember_configs(connectors.KVConnectorFactory)


def _remember_configs(factory: Any) -> None:
    """Tiers are made while a connector is made, and only the connector gets the configuration."""
    create: Callable[..., Any] = factory.create_connector
    if getattr(create, _MARK, False):
        return

    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_connector(*given: Any, **named: Any) -> Any:
        found = signature.bind(*given, **named).arguments
        config = Configured(found.get("config"), found.get("kv_cache_config"))
        _check_used(config.vllm)
        is_known = config.vllm is not None and config.kv_cache is not None
        with configured(config if is_known else None):
            return create(*given, **named)

    setattr(create_connector, _MARK, True)
    factory.create_connector = create_connector


def _check_used(config: Any) -> None:
    """Raises ConfigError if vLLM would ignore Penstock's tier: its default reads no `secondary_tiers`."""
    transfer = getattr(config, "kv_transfer_config", None)
    extra: Mapping[str, Any] = {} if transfer is None else transfer.kv_connector_extra_config
    is_named = any(tier.get("type") == TIER for tier in extra.get("secondary_tiers", ()))
    if is_named and extra.get("spec_name", "CPUOffloadingSpec") == "CPUOffloadingSpec":
        raise ConfigError(
            "penstock: in kv_connector_extra_config spec_name must be TieringOffloadingSpec: vLLM ignores "
            "secondary_tiers otherwise"
        )


@contextlib.contextmanager
def configured(config: Configured | None) -> Iterator[None]:
    """Tiers made inside belong to this configuration."""
    token = _configured.set(config)
    try:
        yield
    finally:
        _configured.reset(token)


def current_config() -> Configured:
    found = _configured.get()
    if found is None:
        raise ConfigError(
            "penstock's plug-in is not loaded into vLLM: VLLM_PLUGINS must be unset or include penstock"
        )
    return found


# --------------------------------------------------------------------------------------------------- identity


def check_hashes(config: Configured) -> None:
    """Raises ConfigError if block hashes differ in each process: then nothing would be found again."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return
    hashing = importlib.import_module("vllm.v1.core.kv_cache_utils")
    has_fixed_seed = hasattr(hashing, "resolve_none_hash_seed")  # 0.32 has one, 0.28 has none
    algorithm = _value(config.vllm.cache_config, "prefix_caching_hash_algo")
    if not (has_fixed_seed and algorithm.startswith("sha256")):
        raise ConfigError(
            "penstock: vLLM's block hashes are random in each process, so no block would be found after a "
            "restart or by another server: set PYTHONHASHSEED to the same number for all of them"
        )


def facts_of(
    config: Configured,
    offload: Mapping[str, Any],  # kv_connector_extra_config
    version: str,
    device: str,
    weights_id: str | None = None,
) -> dict[str, str]:
    """Everything that decides what a block's bytes mean and that vLLM's block hash leaves out, by name."""
    vllm = config.vllm
    return {
        "format": str(FORMAT),
        "engine": f"vllm {version}",  # the layout is an inner matter of a version
        "device": device,  # the attention backend is chosen for it
        **_model_facts("model", vllm.model_config, vllm.load_config, weights_id),
        **_draft_facts(vllm, weights_id),
        **_facts("cache", vllm.cache_config, *_CACHE),
        **_facts("parallel", vllm.parallel_config, *_PARALLEL),
        "pipeline": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "layout": os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
        "backend": _value(vllm.attention_config, "backend"),
        "runner": _value(vllm, "use_v2_model_runner"),
        "groups": repr([_group(group) for group in config.kv_cache.kv_cache_groups]),
        "tensors": repr([_placement(tensor) for tensor in config.kv_cache.kv_cache_tensors]),
        **{f"offload.{name}": str(offload.get(name)) for name in _OFFLOAD_OPTIONS},
    }


def digest_of(facts: Mapping[str, str]) -> bytes:
    """JSON frames names and values, so different facts never read the same."""
    text = json.dumps(facts, sort_keys=True)
    return blake2b(text.encode(), digest_size=SCOPE_BYTES, person=b"penstock vllm 1").digest()


def data_parallel_folder(config: Configured) -> str:
    """Each data-parallel rank has a scheduler, and a directory has one owner."""
    return f"dp-{_value(config.vllm.parallel_config, 'data_parallel_index')}"


def _model_facts(kind: str, model: Any, load: Any, weights_id: str | None) -> dict[str, str]:
    names = ("dtype", "quantization", "max_model_len", "disable_sliding_window", "override_attention_dtype")
    words = {name: word for name, word in model.hf_config.to_dict().items() if name not in _UNSTABLE_WORDS}
    return {
        **_facts(kind, model, *names),
        f"{kind}.config": json.dumps(words, sort_keys=True, default=str),  # with the user's overrides
        f"{kind}.weights": f"said {weights_id}" if weights_id else _weights_of(model, load),
        f"{kind}.load_format": _value(load, "load_format"),
    }


def _draft_facts(vllm: Any, weights_id: str | None) -> dict[str, str]:
    """A draft model's layers may lie in the same blocks."""
    speculation = vllm.speculative_config
    if speculation is None:
        return {}
    draft = getattr(speculation, "draft_model_config", None)
    found = _facts("draft", speculation, "method")
    if draft is not None and draft.model != vllm.model_config.model:
        found |= _model_facts("draft", draft, vllm.load_config, weights_id)
    return found


def _weights_of(model: Any, load: Any) -> str:
    """Of the files in a local folder, or in Hugging Face's cache."""
    if _value(load, "load_format") == "dummy":
        return f"dummy {model.seed}"
    path = Path(model.model)
    if not path.exists():
        path = _cached_folder(model, load)
    return weights_digest(path)


def _cached_folder(model: Any, load: Any) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = None
    with contextlib.suppress(ValueError):  # no name of a repository
        found = try_to_load_from_cache(
            model.model, "config.json", cache_dir=load.download_dir, revision=model.revision
        )
    if not isinstance(found, str):
        raise ConfigError(
            f"penstock cannot find the files of {model.model} to identify its weights: give the option "
            "weights_id, a text that is the same only for the same weights"
        )
    return Path(found).parent


def _group(group: Any) -> tuple[list[str], str]:
    return list(group.layer_names), repr(group.kv_cache_spec)


def _placement(tensor: Any) -> tuple[list[str], int]:
    """Layers in order, and what a block of theirs takes if vLLM says it here. Not the tensor's size, which
    follows free memory."""
    layers = (
        tensor.layers if hasattr(tensor, "layers") else tensor.shared_by
    )  # the former in 0.32, the latter in 0.28
    return list(layers), getattr(tensor, "block_stride", 0)


def _facts(kind: str, of: Any, *names: str) -> dict[str, str]:
    return {f"{kind}.{name}": _value(of, name) for name in names}


def _value(of: Any, name: str) -> str:
    if not hasattr(of, name):
        if name in _NOT_EVERYWHERE:
            return "-"
        raise ConfigError(
            f"penstock does not know this version of vLLM: its {type(of).__name__} has no {name}"
        )
    return str(getattr(of, name))
