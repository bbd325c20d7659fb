"""The arithmetic of gated delta layers in plain PyTorch: the causal convolution, and the delta rule in two
forms, for one token of many requests and for many tokens of one. Owns no state.

A state S [key_dim, value_dim] of each head changes with every token: S decays, forgets what it holds under
the token's key k, and stores the value v there, both as far as beta says. The output is what S holds under q.

    S = exp(decay) S        S = S + k (beta (v - k S))        out = q S
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.model import Recurrence

CHUNK_TOKENS = 64  # solved as one triangular system
_LEAST_SQUARE = 1e-6  # added to the square of a length


class LayerStates(NamedTuple):
    """One layer of the states of all rows, changed in place."""

    windows: Tensor  # [rows, window - 1, width]
    matrices: Tensor  # [rows, heads, key_dim, value_dim]


class DeltaInputs(NamedTuple):
    """Of one layer, by token."""

    qkv: Tensor  # [T, width], perhaps a part of wider rows
    conv: Tensor  # [width, 1, window]
    decay: Tensor  # float32 [T, heads], its logarithm
    beta: Tensor  # float32 [T, heads]


class Prompts(NamedTuple):
    """Requests with tokens of any number."""

    rows: Tensor  # int32 [N]: of their states
    starts: Tensor  # int32 [N + 1]: their tokens are counted from here on,
    before: int  # less so many
    longest: int  # tokens, at most
    lengths: Sequence[int] | None  # None: the host does not know them, and there may be tokens of no request


class DeltaForm(Protocol):
    """How tokens run through states. Returns float32 [T, heads, value_dim]."""

    needs_lengths: bool  # of prompts; such a step cannot be captured

    def steps(self, states: LayerStates, rows: Tensor, inputs: DeltaInputs) -> Tensor:
        """One token of the request in each of `rows`."""

    def prompts(self, states: LayerStates, prompts: Prompts, inputs: DeltaInputs) -> Tensor: ...


class ReadableDelta:
    """Implements `DeltaForm` in PyTorch."""

    needs_lengths = True

    def __init__(self, dims: Recurrence) -> None:
        self._dims = dims

    def steps(self, states: LayerStates, rows: Tensor, inputs: DeltaInputs) -> Tensor:
        return self._run(states, rows, 1, inputs)

    def prompts(self, states: LayerStates, prompts: Prompts, inputs: DeltaInputs) -> Tensor:
        """One by one."""
        found, at = [], 0
        assert prompts.lengths is not None
        for number, length in enumerate(prompts.lengths):
            own, at = slice(at, at + length), at + length
            parts = DeltaInputs(inputs.qkv[own], inputs.conv, inputs.decay[own], inputs.beta[own])
            found.append(self._run(states, prompts.rows[number : number + 1], length, parts))
        return torch.cat(found)

    def _run(self, states: LayerStates, rows: Tensor, length: int, inputs: DeltaInputs) -> Tensor:
        """As many tokens of each of the requests in `rows`."""
        qkv, conv, decay, beta = inputs
        rows, parts = rows.long(), (qkv.float(), decay, beta)
        qkv, decay, beta = (part.unflatten(0, (-1, length)) for part in parts)
        mixed, window = convolved(qkv, states.windows.index_select(0, rows), conv)
        states.windows.index_copy_(0, rows, window)
        heads = heads_of(mixed, decay, beta, self._dims)
        run = one_step if length == 1 else many_steps
        out, state = run(heads, states.matrices.index_select(0, rows))
        states.matrices.index_copy_(0, rows, state)
        return out.transpose(1, 2).flatten(0, 1)


class Heads(NamedTuple):
    """The inputs of the delta rule, float32, by head: q, k and v [..., heads, T, dim], decay (its logarithm)
    and beta [..., heads, T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def convolved(qkv: Tensor, window: Tensor, conv: Tensor) -> tuple[Tensor, Tensor]:
    """`qkv` [N, T, width] after `window` [N, tokens before, width], each value over time by its row of `conv`
    [width, 1, tokens]. Returns it behind its activation, and the next window."""
    num_before, num_tokens = window.shape[1], qkv.shape[1]
    whole = torch.cat((window, qkv), dim=1)
    # Sums of products in float32: cuDNN would round them to tf32.
    out = whole[:, num_before:] * conv[:, 0, num_before]
    for place in range(num_before):
        out = torch.addcmul(out, whole[:, place : place + num_tokens], conv[:, 0, place])
    return F.silu(out), whole[:, num_tokens:]


def heads_of(qkv: Tensor, decay: Tensor, beta: Tensor, dims: Recurrence) -> Heads:
    """`qkv` [N, T, width] behind the convolution, `decay` and `beta` [N, T, value heads]. A key head stands
    beside each of its value heads. Keys and queries have length 1; queries are scaled as in attention."""
    key_width, shared = dims.num_key_heads * dims.key_dim, dims.num_value_heads // dims.num_key_heads
    q, k, v = qkv.split_with_sizes((key_width, key_width, dims.out_width), dim=-1)
    q, k = (_unit(rows.unflatten(-1, (dims.num_key_heads, dims.key_dim))) for rows in (q, k))
    q, k = (rows.repeat_interleave(shared, dim=2).transpose(1, 2) for rows in (q, k))
    v = v.unflatten(-1, (dims.num_value_heads, dims.value_dim)).transpose(1, 2)
    return Heads(q * dims.key_dim**-0.5, k, v, decay.transpose(1, 2), beta.transpose(1, 2))


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + _LEAST_SQUARE)


def one_step(heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N requests: `state` [N, heads, key_dim, value_dim]. Returns [N, heads, 1,
    value_dim] and the next states."""
    state = state * heads.decay.exp().unsqueeze(-1)
    change = (heads.v - heads.k @ state) * heads.beta.unsqueeze(-1)
    state = torch.addcmul(state, heads.k.transpose(-1, -2), change)
    return heads.q @ state, state


def many_steps(heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for T tokens, chunk by chunk: [N, heads, T, value_dim].

    In a chunk, what each token stores depends on what those before it have stored. With the decay between two
    tokens in the products of their keys this is one triangular system, solved for all chunks at once. Only
    what a chunk takes from the state before it is computed in order.
    """
    num_tokens = heads.q.shape[-2]
    size = min(CHUNK_TOKENS, num_tokens)
    q, k, v, decay, beta = (_in_chunks(part, size, num_tokens) for part in heads)
    # A padded token has no decay and stores nothing.
    total = decay.cumsum(dim=-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    weight = between.masked_fill(later, -torch.inf).exp()
    scaled = k * beta.unsqueeze(-1)
    system, keys = (scaled @ k.transpose(-1, -2)) * weight, scaled * total.exp().unsqueeze(-1)
    # only the part below the diagonal is read, and ones in its place
    stored, taken = torch.linalg.solve_triangular(
        system, torch.cat((v * beta.unsqueeze(-1), keys), dim=-1), upper=False, unitriangular=True
    ).split_with_sizes((v.shape[-1], k.shape[-1]), dim=-1)
    inside = (q @ k.transpose(-1, -2)) * weight
    q, k = q * total.exp().unsqueeze(-1), k * (total[..., -1:] - total).exp().unsqueeze(-1)
    kept, out = total[..., -1].exp()[..., None, None], torch.empty_like(v)
    for i in range(q.shape[2]):
        new = stored[:, :, i] - taken[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + inside[:, :, i] @ new
        state = state * kept[:, :, i] + k[:, :, i].transpose(-1, -2) @ new
    return out.flatten(2, 3)[:, :, :num_tokens], state


def _in_chunks(part: Tensor, size: int, num_tokens: int) -> Tensor:
    """[N, heads, T, ...] -> [N, heads, chunks, size, ...], padded with zeros."""
    more = -num_tokens % size
    padded = F.pad(part, (0, more) if part.dim() == 3 else (0, 0, 0, more))
    return padded.unflatten(2, (-1, size))
