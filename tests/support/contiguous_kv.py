"""A KV cache of one sequence in plain growing tensors: a readable reference for the paged one. Owns no blocks
and no batching."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.decoder import Decoder
from penstock.models.lora import LoraRuns
from penstock.models.model import ModelConfig


class ContiguousKv:
    """Implements `PagedKv` and `RecurrentStates` for one sequence. `begin` binds it to a step's positions,
    which must continue where the last step ended."""

    def __init__(self, config: ModelConfig, rope: Tensor) -> None:
        self._config, self._ropes = config, rope.view(-1, config.max_position, config.head_dim)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}  # by recurrent layer: those of its convolution
        self._states: dict[int, Tensor] = {}
        self._positions = torch.empty(0, dtype=torch.int32)
        self.num_tokens = 0

    def begin(self, positions: Tensor) -> None:
        expected = torch.arange(
            self.num_tokens, self.num_tokens + len(positions), dtype=positions.dtype, device=positions.device
        )
        if not torch.equal(positions, expected):
            raise ValueError(f"positions {positions.tolist()} do not go on from token {self.num_tokens}")
        self._positions = positions
        self.num_tokens += len(positions)

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, heads = self._config, qkv.view(len(qkv), -1, self._config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        rope = self._ropes[config.ropes[layer]]
        q, k = (self._turned(x, norm, rope) for x, norm in ((q, q_norm), (k, k_norm)))
        self._keys[layer] = torch.cat((self._keys[layer], k)) if layer in self._keys else k
        self._values[layer] = torch.cat((self._values[layer], v)) if layer in self._values else v
        return q, k, v

    def _turned(self, heads: Tensor, norm: Tensor | None, rope: Tensor) -> Tensor:
        """Normalised where a weight is given, then rotated by position."""
        x = heads.float()
        if norm is not None:
            x = F.rms_norm(x, (x.shape[-1],), None, self._config.norm_eps).to(heads.dtype) * norm
        cos, sin = rope[self._positions.long()].unsqueeze(1).chunk(2, dim=-1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        visible = torch.arange(len(keys), device=q.device)[None, :] <= self._positions[:, None]
        if self._config.windows and (window := self._config.windows[layer]):
            visible &= torch.arange(len(keys), device=q.device)[None, :] > self._positions[:, None] - window
        group = self._config.num_heads // self._config.num_kv_heads
        keys, values = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (keys, values))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, attn_mask=visible, scale=self._config.scale
        )
        return out.transpose(0, 1).reshape(len(q), -1)

    def advance(self, layer: int, qkv: Tensor, conv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Token by token."""
        dims = self._config.recurrence
        assert dims is not None
        shape = (dims.num_value_heads, dims.key_dim, dims.value_dim)
        before = self._inputs.get(layer, qkv.new_zeros(dims.window - 1, dims.qkv_width))
        state, inputs = self._states.get(layer, qkv.new_zeros(shape)), torch.cat((before, qkv))
        found = []
        for token in range(len(qkv)):
            mixed = F.silu((inputs[token : token + dims.window] * conv[:, 0].t()).sum(0))
            q, k, v = mixed.split([dims.num_key_heads * dims.key_dim] * 2 + [dims.out_width])
            q, k = (F.normalize(x.view(dims.num_key_heads, -1), dim=1, eps=1e-3) for x in (q, k))
            shared = dims.num_value_heads // dims.num_key_heads
            q, k = (x.repeat_interleave(shared, dim=0) for x in (q * dims.key_dim**-0.5, k))
            state = state * decay[token].exp()[:, None, None]
            change = v.view(-1, dims.value_dim) - torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum("hk,hv->hkv", k, change * beta[token][:, None])
            found.append(torch.einsum("hkv,hk->hv", state, q))
        self._inputs[layer], self._states[layer] = inputs[len(qkv) :], state
        return torch.stack(found)


@torch.inference_mode()
def forward(model: Decoder, kv: ContiguousKv, tokens: Sequence[int], lora: LoraRuns | None = None) -> Tensor:
    """One step of `tokens` after the content of `kv`; logits of all of them, [T, vocab]."""
    positions = torch.arange(
        kv.num_tokens, kv.num_tokens + len(tokens), dtype=torch.int32, device=model.device
    )
    kv.begin(positions)
    hidden, residual = model.embed(torch.tensor(tokens, dtype=torch.int32, device=model.device)), None
    for index in range(model.config.num_layers):
        hidden, residual = model.layer(index, hidden, residual, kv, lora)
    assert residual is not None
    return model.head(hidden, residual)


def logits_of(model: Decoder, tokens: Sequence[int], lora: LoraRuns | None = None) -> Tensor:
    """Of a whole sequence, [T, vocab]."""
    return forward(model, ContiguousKv(model.config, model.rope), tokens, lora)


def generate(model: Decoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation: the reference that any engine's output is compared with."""
    kv = ContiguousKv(model.config, model.rope)
    logits = forward(model, kv, prompt)
    output = [int(logits[-1].argmax())]
    while len(output) < num_tokens:
        output.append(int(forward(model, kv, output[-1:])[-1].argmax()))
    return output


TIE = 1e-5  # of logits: two tokens are equally likely, and rounding decides


def assert_greedy(model: Decoder, prompt: Sequence[int], found: Sequence[int]) -> None:
    """`found` is the greedy continuation, up to a token that rounding may have chosen."""
    for place, (token, right) in enumerate(zip(found, generate(model, prompt, len(found)), strict=False)):
        if token != right:
            logits = logits_of(model, [*prompt, *found[:place]])[-1]
            assert logits[right] - logits[token] < TIE, f"token {place} is {token} instead of {right}"
            return
