"""Tiny EAGLE-3 heads on disk, tensor by tensor under the names of published checkpoints, and a plain float32
reference of what they compute. Owns no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from penstock.models.decoder import Decoder
from penstock.models.model import ModelConfig
from tests.support.contiguous_kv import ContiguousKv

# Unlike the layers of any tiny target.
HEADS, KV_HEADS, DIM, FFN, THETA, EPS = 6, 3, 16, 80, 5e4, 1e-6


def eagle_tensors(target: ModelConfig, draft_ids: Tensor | None = None, seed: int = 0) -> dict[str, Tensor]:
    """As EAGLE's own checkpoints have them. `draft_ids`: the target's token of each that the head knows."""
    hidden, num = target.hidden, target.vocab if draft_ids is None else len(draft_ids)
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, HEADS * DIM),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (FFN, hidden),
        "midlayer.mlp.up_proj.weight": (FFN, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, FFN),
        "norm.weight": (hidden,),
        "lm_head.weight": (num, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return tensors | ({} if draft_ids is None else maps(target, draft_ids))


def maps(target: ModelConfig, draft_ids: Tensor) -> dict[str, Tensor]:
    """d2t holds what is added to each draft id; t2d says which tokens the head knows."""
    known = torch.zeros(target.vocab, dtype=torch.bool)
    known[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": known}


def eagle_config(target: ModelConfig, taps: Sequence[int], draft_vocab: int | None = None) -> dict[str, Any]:
    """A config.json as EAGLE, SGLang and SpecForge write it. `taps` are inputs of layers."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target.hidden,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "max_position_embeddings": 32,  # many published heads state fewer than their target has
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab,
        "draft_vocab_size": draft_vocab or target.vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
    }


def as_speculators(config: Mapping[str, Any], **stated: Any) -> dict[str, Any]:
    """The same as vLLM's speculators write it."""
    own = ("architectures", "draft_vocab_size", "eagle_config")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": {name: value for name, value in config.items() if name not in own},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        **stated,
    }


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names that speculators have."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def write_eagle(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Reference:
    """The head over one sequence, as its authors describe it, in the words of its checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], embedding: Tensor, is_normed: bool = False) -> None:
        """`is_normed`: norm_before_residual."""
        self._tensors, self._embedding, self._is_normed = renamed(tensors), embedding, is_normed
        self._keys = self._values = torch.empty(0, KV_HEADS, DIM)

    def fused(self, tapped: Tensor) -> Tensor:
        if "input_norm.weight" in self._tensors:
            tapped = self._norm(tapped, "input_norm")
        return self._linear(tapped, "fc")

    def step(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States [T, hidden] and the tokens after them, behind the content of the cache: the states and the
        scores of draft ids that come out."""
        embedded = self._norm(F.embedding(tokens, self._embedding), "layers.0.input_layernorm")
        normed = self._norm(state, "layers.0.hidden_norm")
        both = torch.cat((embedded, normed), dim=-1)
        x = (normed if self._is_normed else state) + self._linear(
            self._attended(both), "layers.0.self_attn.o_proj"
        )
        inner = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(inner, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        y = x + self._linear(F.silu(gate) * up, "layers.0.mlp.down_proj")
        return y, self._linear(self._norm(y, "norm"), "lm_head")

    def drafts(self, tapped: Tensor, tokens: Tensor, num: int) -> list[int]:
        """The likeliest `num` tokens after `tokens`, which follow the states [T, 3 * hidden]."""
        self._keys = self._values = self._keys[:0]
        state, logits = self.step(self.fused(tapped), tokens)
        found = [self._likeliest(logits)]
        while len(found) < num:
            state, logits = self.step(state[-1:], torch.tensor(found[-1:]))
            found.append(self._likeliest(logits))
        return found

    def _likeliest(self, logits: Tensor) -> int:
        best = int(logits[-1].argmax())
        return best + int(self._tensors["d2t"][best]) if "d2t" in self._tensors else best

    def _attended(self, x: Tensor) -> Tensor:
        first = len(self._keys)
        q, k, v = (
            self._linear(x, f"layers.0.self_attn.{name}_proj").unflatten(1, (-1, DIM)) for name in "qkv"
        )
        angles = torch.arange(first, first + len(x))[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        q, k = (_turned(part, angles[:, None]) for part in (q, k))
        self._keys, self._values = torch.cat((self._keys, k)), torch.cat((self._values, v))
        keys, values = (
            part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (self._keys, self._values)
        )
        scores = torch.einsum("thd,shd->hts", q, keys) * DIM**-0.5
        hidden = torch.arange(len(keys)) > torch.arange(first, first + len(x))[:, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", shares, values).flatten(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * self._tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._tensors[f"{name}.weight"].T


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.inference_mode()
def tapped_states(model: Decoder, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Of the target, over one sequence: [T, 3 * hidden]. State i is the input of layer i."""
    kv = ContiguousKv(model.config, model.rope)
    kv.begin(torch.arange(len(tokens), dtype=torch.int32))
    hidden, residual = model.embed(torch.tensor(tokens, dtype=torch.int32)), None
    states = [hidden]
    for index in range(model.config.num_layers):
        hidden, residual = model.layer(index, hidden, residual, kv)
        states.append(hidden + residual)
    return torch.cat([states[layer] for layer in taps], dim=-1)
