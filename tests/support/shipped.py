"""Draft heads as Qwen3-Next and Qwen3.5 publish them, tensor by tensor under their names, and a plain float32
reference of what they compute. Owns no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.decoder import Decoder
from penstock.models.model import ModelConfig
from tests.support.contiguous_kv import ContiguousKv
from tests.support.eagle import _turned


def shipped_tensors(dims: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Those of a checkpoint, with all experts in one tensor."""
    hidden, q_rows, kv_rows = dims.hidden, dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (2 * q_rows, hidden),  # each head's gate is behind its query
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.q_norm.weight": (dims.head_dim,),
        "self_attn.k_norm.weight": (dims.head_dim,),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        **_mlp(dims),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
        "mtp.norm.weight": (hidden,),
    }
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def _mlp(dims: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, routing = dims.hidden, dims.routing
    if routing is None:
        rows = {
            "gate_proj": (dims.ffn, hidden),
            "up_proj": (dims.ffn, hidden),
            "down_proj": (hidden, dims.ffn),
        }
        return {f"mlp.{name}.weight": shape for name, shape in rows.items()}
    num, ffn, shared = routing.num_experts, routing.ffn, routing.shared_ffn
    return {
        "mlp.gate.weight": (num, hidden),
        "mlp.experts.gate_up_proj": (num, 2 * ffn, hidden),
        "mlp.experts.down_proj": (num, hidden, ffn),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


class Reference:
    """The head over one sequence, in the words of its checkpoint."""

    def __init__(
        self, dims: ModelConfig, tensors: Mapping[str, Tensor], embedding: Tensor, output: Tensor
    ) -> None:
        self._dims, self._tensors, self._embedding, self._output = dims, tensors, embedding, output
        self._keys = self._values = torch.empty(0, dims.num_kv_heads, dims.head_dim)

    def drafts(self, states: Tensor, tokens: Tensor, num: int) -> list[int]:
        """The likeliest `num` tokens after `tokens`, which follow the target's normalised `states`."""
        self._keys = self._values = self._keys[:0]
        state, found = self._step(states, tokens)[-1:], list[int]()
        while True:
            found.append(int((state @ self._output.T).argmax()))
            if len(found) == num:
                return found
            state = self._step(state, torch.tensor(found[-1:]))

    def _step(self, states: Tensor, tokens: Tensor) -> Tensor:
        embedded = self._norm(F.embedding(tokens, self._embedding), "mtp.pre_fc_norm_embedding")
        x = self._linear(torch.cat((embedded, self._norm(states, "mtp.pre_fc_norm_hidden")), -1), "mtp.fc")
        inner = self._norm(x, "mtp.layers.0.input_layernorm")
        x = x + self._linear(self._attended(inner), "mtp.layers.0.self_attn.o_proj")
        x = x + self._mlp(self._norm(x, "mtp.layers.0.post_attention_layernorm"))
        return self._norm(x, "mtp.norm")

    def _attended(self, x: Tensor) -> Tensor:
        dims, own = self._dims, "mtp.layers.0.self_attn"
        first, turning = len(self._keys), dims.rotary_dim
        q, gate = self._linear(x, f"{own}.q_proj").view(len(x), -1, 2, dims.head_dim).unbind(2)
        k, v = (self._linear(x, f"{own}.{name}_proj").view(len(x), -1, dims.head_dim) for name in "kv")
        q, k = self._norm(q, f"{own}.q_norm"), self._norm(k, f"{own}.k_norm")
        powers = -torch.arange(0, turning, 2) / turning
        angles = torch.arange(first, first + len(x))[:, None] * dims.rope_theta**powers
        q, k = (
            torch.cat((_turned(part[..., :turning], angles[:, None]), part[..., turning:]), dim=-1)
            for part in (q, k)
        )
        self._keys, self._values = torch.cat((self._keys, k)), torch.cat((self._values, v))
        shared = dims.num_heads // dims.num_kv_heads
        keys, values = (part.repeat_interleave(shared, dim=1) for part in (self._keys, self._values))
        scores = torch.einsum("thd,shd->hts", q, keys) * dims.head_dim**-0.5
        later = torch.arange(len(keys)) > torch.arange(first, first + len(x))[:, None]
        shares = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        return (torch.einsum("hts,shd->thd", shares, values) * gate.sigmoid()).flatten(1)

    def _mlp(self, x: Tensor) -> Tensor:
        routing, own, tensors = self._dims.routing, "mtp.layers.0.mlp", self._tensors
        if routing is None:
            return self._gated(x, own)
        shares, chosen = self._linear(x, f"{own}.gate").softmax(dim=-1).topk(routing.top_k)
        if routing.normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out = self._gated(x, f"{own}.shared_expert") * self._linear(x, f"{own}.shared_expert_gate").sigmoid()
        for token in range(len(x)):
            for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
                gate, up = (tensors[f"{own}.experts.gate_up_proj"][expert] @ x[token]).chunk(2)
                out[token] += share * (tensors[f"{own}.experts.down_proj"][expert] @ (F.silu(gate) * up))
        return out

    def _gated(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * (x.square().mean(dim=-1, keepdim=True) + self._dims.norm_eps).rsqrt()
        return scaled * (1 + self._tensors[f"{name}.weight"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._tensors[f"{name}.weight"].T


@torch.inference_mode()
def normed_states(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Of the target, over one sequence: what goes into its output matrix, [T, hidden]."""
    kv = ContiguousKv(model.config, model.rope)
    kv.begin(torch.arange(len(tokens), dtype=torch.int32))
    hidden, residual = model.embed(torch.tensor(tokens, dtype=torch.int32)), None
    for index in range(model.config.num_layers):
        hidden, residual = model.layer(index, hidden, residual, kv)
    assert residual is not None
    total = hidden + residual
    scaled = total * (total.square().mean(dim=-1, keepdim=True) + model.config.norm_eps).rsqrt()
    return scaled * model.norm
