"""Training of a multi-token-prediction head by self-distillation. Owns the unrolled forward pass, the loss
and the measure of acceptance; who wrote the text is the caller's business.

The head's steps are run as they are when it drafts: step s of an entry takes the hidden state that step s - 1
guessed, and attends to the first steps of all entries before it and to its own earlier steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.decoder import Decoder
from penstock.models.forms import Matrix
from penstock.models.layers import row_order
from penstock.models.progress import Progress
from penstock.speculation.mtp import head_dims, head_layout, rows_of
from penstock.speculation.vocab import DraftVocab

_STEP_WEIGHT = 0.8  # of each step further ahead: it counts only where those before it were right
_REGRESSION = 0.1  # weight of the hidden state's own loss, beside that of the distribution
_LOGIT_ROWS = 4096  # at once, where nothing is learned from them


class Text(NamedTuple):
    """One training text."""

    tokens: list[int]
    num_prompt: int  # tokens at its start that the target did not write


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    depth: int = 3  # steps that are unrolled
    batch_tokens: int = 16384
    learning_rate: float = 1e-3
    warmup: float = 0.05  # share of the run
    weight_decay: float = 0.01
    max_len: int = 512  # tokens of a text; the rest is left out
    seed: int = 0


class Batch(NamedTuple):
    """Texts of about one length on the device, and what the target makes of them."""

    tokens: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]
    prompts: Tensor  # int64 [B]
    hidden: Tensor  # [B, L, hidden] in the target's dtype


class Trainable:
    """A head while it is trained: float32 tensors under the names of its files."""

    def __init__(self, target: Decoder, vocab: DraftVocab | None, seed: int) -> None:
        if any(isinstance(weight, Matrix) for weight in (target.embedding, target.layers[-1].qkv)):
            raise ConfigError("a head is trained on dense weights: load the target in float32 or bfloat16")
        self.target, self.dims = target, target.config
        self.vocab = None if vocab is None else vocab.to(target.device)
        self.output: Tensor = (
            target.output if self.vocab is None else rows_of(target.output, self.vocab.target_ids)
        )
        self.tensors = _initial(target, seed)
        for tensor in self.tensors.values():
            tensor.requires_grad_(True)

    def stored(self) -> dict[str, Tensor]:
        """As files have them: rows of q, k and v in the order in which the target's own file has its rows."""
        order = row_order(self.dims)
        found = {name: tensor.detach() for name, tensor in self.tensors.items()}
        if order is not None:
            for name in ("layer.qkv", "layer.qkv_bias"):
                if name in found:
                    found[name] = torch.empty_like(found[name]).index_copy_(
                        0, order.to(found[name].device), found[name]
                    )
        return found

    # ------------------------------------------------------------------------------------------- forward pass

    def unrolled(self, hidden: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
        """hidden [B, L, d] of tokens [B, L] -> for each step s from 1 on the guessed hidden states [B, n, d]
        of the tokens s behind the entries; n = L - depth entries."""
        num = tokens.shape[1] - depth
        state, firsts, found = hidden[:, :num], None, []
        chain: list[tuple[Tensor, Tensor]] = []
        for s in range(1, depth + 1):
            positions = torch.arange(s, s + num, device=tokens.device)
            x = self._fused(state, F.embedding(tokens[:, s : s + num], self.target.embedding))
            q, k, v = self._qkv(x, positions)
            if firsts is None:
                firsts = (k, v)
            else:
                chain.append((k, v))
            attended = self._attend(q, firsts, chain)
            x = x + self._linear("out", attended.transpose(1, 2).flatten(2))
            gate, up = self._linear("gate_up", self._norm(x, "layer.ffn_norm")).chunk(2, dim=-1)
            state = x + self._linear("down", F.silu(gate) * up)
            found.append(state)
        return found

    def logits(self, state: Tensor) -> Tensor:
        x = self._norm(state, "norm")
        return F.linear(x.to(self.output.dtype), self.output)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Of the whole vocabulary: [.., vocab]."""
        return F.linear(
            rms(hidden, self.target.norm, self.dims.norm_eps).to(self.target.dtype), self.target.output
        )

    def _fused(self, state: Tensor, embedded: Tensor) -> Tensor:
        both = torch.cat((self._norm(state, "hidden_norm"), self._norm(embedded, "embed_norm")), dim=-1)
        return F.linear(both, self.tensors["fc"])

    def _qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [B, heads, n, head_dim], rotated."""
        heads, kv_heads, dim = self.dims.num_heads, self.dims.num_kv_heads, self.dims.head_dim
        qkv = (
            self._linear("qkv", self._norm(x, "layer.attn_norm"))
            .view(*x.shape[:2], heads + 2 * kv_heads, dim)
            .transpose(1, 2)
        )
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if "layer.q_norm" in self.tensors:
            q = self._norm(q, "layer.q_norm")
        if "layer.k_norm" in self.tensors:
            k = self._norm(k, "layer.k_norm")
        turns = self.target.rope[positions]
        group = heads // kv_heads
        return (
            rotated(q, turns),
            rotated(k, turns).repeat_interleave(group, dim=1),
            v.repeat_interleave(group, dim=1),
        )

    def _attend(
        self, q: Tensor, firsts: tuple[Tensor, Tensor], chain: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        keys, values = firsts
        num, window = q.shape[2], next(iter(head_dims(self.dims).windows), 0)
        if not chain and not 0 < window < num:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=self.dims.scale)
        hidden = torch.ones((num, num), dtype=torch.bool, device=q.device).triu(1)
        # counted from the token that the step stands at, which is as many further as there are steps before
        # it
        if window:
            hidden |= torch.ones_like(hidden).tril(len(chain) - window)
            chain = chain[-window:]
        scores = [(q @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)]
        scores += [(q * k).sum(dim=-1, keepdim=True) for k, _ in chain]
        shares = (torch.cat(scores, dim=-1).float() * self.dims.scale).softmax(dim=-1).to(q.dtype)
        out = shares[..., :num] @ values
        for n, (_, v) in enumerate(chain):
            out = out + shares[..., num + n, None] * v
        return out

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"layer.{name}"], self.tensors.get(f"layer.{name}_bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.tensors[name], self.dims.norm_eps)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Heads [..., n, head_dim] turned by the rows `turns` [n, head_dim] of the rotary table, with a
    gradient."""
    half = x.shape[-1] // 2
    cos, sin = turns[:, :half], turns[:, half:]
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _initial(target: Decoder, seed: int) -> dict[str, Tensor]:
    """The target's last layer and norms, behind a projection that passes the hidden state on."""
    generator = torch.Generator().manual_seed(seed)
    hidden, layer = target.config.hidden, target.layers[-1]
    found: dict[str, Tensor] = {}
    for weight in head_layout(target.config):
        if weight.name == "fc":
            noise = torch.randn(weight.shape, generator=generator) * 0.02
            noise[:, :hidden] += torch.eye(hidden)
            made = noise.to(target.device)
        elif weight.name == "embed_norm":
            made = torch.ones(weight.shape, device=target.device)
        elif weight.name in ("norm", "hidden_norm"):
            made = target.norm
        else:
            made = getattr(layer, weight.name.removeprefix("layer."))
        found[weight.name] = made.detach().float().clone(memory_format=torch.contiguous_format)
    return found


# ------------------------------------------------------------------------------------------ the target's side


class _BatchKv:
    """Implements `PagedKv` for whole texts of one length: nothing is kept."""

    def __init__(self, target: Decoder, num_texts: int, length: int) -> None:
        self._target, self._num_texts, self._length = target, num_texts, length
        self._positions = torch.arange(length, dtype=torch.int32, device=target.device).repeat(num_texts)

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims, turns = self._target.config, self._target.rope[self._positions]
        heads = qkv.view(len(qkv), -1, dims.head_dim)
        q, k, v = heads.split([dims.num_heads, dims.num_kv_heads, dims.num_kv_heads], dim=1)
        q = q if q_norm is None else self._target.ops.rms_norm(q, q_norm, dims.norm_eps)
        k = k if k_norm is None else self._target.ops.rms_norm(k, k_norm, dims.norm_eps)
        q, k = (rotated(x.transpose(0, 1), turns).transpose(0, 1) for x in (q, k))
        return q, k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dims = self._target.config
        q, k, v = (x.reshape(self._num_texts, self._length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        group = dims.num_heads // dims.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mask = None
        if dims.windows and (window := dims.windows[layer]):
            place = torch.arange(self._length, device=q.device)
            mask = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=dims.scale
        )
        return out.transpose(1, 2).reshape(self._num_texts * self._length, -1)


@torch.no_grad()
def hidden_states(target: Decoder, tokens: Tensor) -> Tensor:
    """[B, L] -> the residual stream behind the last layer, [B, L, hidden], by the target's own layers."""
    kv = _BatchKv(target, *tokens.shape)
    hidden, residual = target.embed(tokens.flatten()), None
    for index in range(target.config.num_layers):
        hidden, residual = target.layer(index, hidden, residual, kv)
    assert residual is not None
    return (hidden + residual).view(*tokens.shape, -1)


# ---------------------------------------------------------------------------------------------------- batches


def batches(
    texts: Sequence[Text], target: Decoder, config: TrainingConfig, progress: Progress
) -> list[Batch]:
    """Texts of about the same length together, at most `batch_tokens` with their padding. Hidden states stay
    on the device: they are computed once, and read with every pass."""
    fitting = sorted(
        (text for text in texts if len(text.tokens) > config.depth + 1), key=lambda text: len(text.tokens)
    )
    groups: list[list[Text]] = []
    for text in fitting:
        length = min(len(text.tokens), config.max_len)
        if not groups or (len(groups[-1]) + 1) * length > config.batch_tokens:
            groups.append([])
        groups[-1].append(text)
    found = []
    for group in groups:
        found.append(_padded(group, config.max_len, target))
        progress("reading texts", len(found), len(groups))
    return found


def _padded(texts: Sequence[Text], max_len: int, target: Decoder) -> Batch:
    lengths = [min(len(text.tokens), max_len) for text in texts]
    tokens = torch.zeros((len(texts), max(lengths)), dtype=torch.int64)
    for row, text, length in zip(tokens, texts, lengths, strict=True):
        row[:length] = torch.tensor(text.tokens[:length])
    prompts = torch.tensor([text.num_prompt for text in texts])
    placed = tokens.to(target.device)
    return Batch(
        placed,
        torch.tensor(lengths).to(target.device),
        prompts.to(target.device),
        hidden_states(target, placed),
    )


def token_counts(texts: Sequence[Text], vocab: int) -> Tensor:
    """int64 [vocab]: of what the target wrote."""
    written = [token for text in texts for token in text.tokens[text.num_prompt :]]
    return torch.bincount(torch.tensor(written, dtype=torch.int64), minlength=vocab)


# --------------------------------------------------------------------------------------------------- learning


def loss_of(head: Trainable, batch: Batch, depth: int) -> Tensor:
    """Of the whole batch: divergence from the target's distribution over the draft vocabulary, and the
    distance of hidden states."""
    hidden = batch.hidden
    num = batch.tokens.shape[1] - depth
    with torch.no_grad():
        all_probs = F.softmax(head.target_logits(hidden).float(), dim=-1)
        # Where the target wants a token that cannot be proposed, its share teaches nothing.
        all_probs = all_probs if head.vocab is None else all_probs[..., head.vocab.target_ids]
        certainty = torch.xlogy(all_probs, all_probs).sum(dim=-1)
    total = torch.zeros((), device=hidden.device)
    for s, state in enumerate(head.unrolled(hidden, batch.tokens, depth), start=1):
        real = torch.arange(s, s + num, device=hidden.device)[None, :] < batch.lengths[:, None]
        wanted = hidden[:, s : s + num][real]
        shares = F.log_softmax(head.logits(state[real]).float(), dim=-1)
        divergence = (
            certainty[:, s : s + num][real] - (all_probs[:, s : s + num][real] * shares).sum(dim=-1)
        ).mean()
        eps = head.dims.norm_eps
        unit = torch.ones(head.dims.hidden, device=hidden.device)
        distance = F.smooth_l1_loss(rms(state[real], unit, eps), rms(wanted, unit, eps))
        total = total + _STEP_WEIGHT ** (s - 1) * (divergence + _REGRESSION * distance)
    return total


Done = Callable[[int], float]  # steps that were run -> the share of the run that is over; 1 and more: all
_LEAST_RATE = 0.02  # of the learning rate
_PERCENT = 100


def by_steps(num_steps: int) -> Done:
    return lambda step: step / num_steps


def by_clock(seconds: float, before: float = 0.0, clock: Callable[[], float] = time.monotonic) -> Done:
    """As long as `seconds` from now on, however long a step takes: the first ones are slower, and another
    process may be busy for a while. `before`: the share that an earlier run had done."""
    began_s = clock()
    return lambda step: before + (1 - before) * (clock() - began_s) / max(seconds, 1e-9)


class Training:
    """Steps of an optimiser over batches of texts. All of its state can be kept and put back, at a step."""

    def __init__(self, head: Trainable, texts: Sequence[Batch], config: TrainingConfig, done: Done) -> None:
        if not texts:
            raise ConfigError("there is no text to train on")
        self.head, self.config = head, config
        self.step = 0
        self._done = done
        self._texts = texts
        matrices = [tensor for tensor in head.tensors.values() if tensor.dim() > 1]
        others = [tensor for tensor in head.tensors.values() if tensor.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))

    def _next(self) -> Batch:
        """Every pass over the batches has an order of its own, which its number decides."""
        number, place = divmod(self.step, len(self._texts))
        order = torch.randperm(
            len(self._texts), generator=torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        )
        return self._texts[int(order[place])]

    def run_step(self) -> Tensor:
        """One step; its loss, still on the device."""
        device = self.head.target.device
        rate = self.rate(self.share)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(self.head, self._next(), self.config.depth)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.head.tensors.values()), 1.0)
        self._optimiser.step()
        self.step += 1
        return loss.detach()

    @property
    def share(self) -> float:
        """Of the run that is over."""
        return min(1.0, self._done(self.step))

    def rate(self, share: float) -> float:
        """What is learned by a step, when this share of the run is over: it rises, and falls to a fiftieth at
        the end."""
        warmup = self.config.warmup
        if share < warmup:
            return self.config.learning_rate * max(_LEAST_RATE, share / warmup)
        falling = (share - warmup) / (1 - warmup)
        return self.config.learning_rate * (
            _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * falling))
        )

    def state(self) -> dict[str, Any]:
        tensors = {name: tensor.detach().cpu() for name, tensor in self.head.tensors.items()}
        return {
            "tensors": tensors,
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "share": self.share,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self.head.tensors.items():
                tensor.copy_(state["tensors"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]


def train(
    training: Training, progress: Progress, each: Callable[[Training], bool] | None = None
) -> list[float]:
    """To the end of the run, or until `each`, called behind every step, says True; a step at least. Returns
    the losses."""
    losses: list[Tensor] = []
    while not losses or training.share < 1.0:
        losses.append(training.run_step())
        progress("training", int(_PERCENT * training.share), _PERCENT)
        if each is not None and each(training):
            break
    return torch.stack(losses).tolist() if losses else []


# ------------------------------------------------------------------------------------------------- acceptance


class Acceptance(NamedTuple):
    """Of greedy drafts against the target's greedy choice."""

    rates: list[float]  # by place: share that is kept where all before were
    kept: float  # drafts kept per verified chain, on average

    def line(self) -> str:
        shares = "  ".join(f"{rate:6.1%}" for rate in self.rates)
        return f"{shares}   {1 + self.kept:.2f} tokens a step"


@torch.no_grad()
def measured_acceptance(
    head: Trainable, texts: Sequence[Batch], depth: int, vocabs: Mapping[str, DraftVocab | None]
) -> dict[str, Acceptance]:
    """On texts that the target wrote greedily: chains of drafts from every token of theirs, for each draft
    vocabulary of `vocabs`. A chain is followed as far as the text agrees with it, so that what it is fed is
    what it would have drafted."""
    device = head.target.device
    tried = {name: torch.zeros(depth, device=device) for name in vocabs}
    right = {name: torch.zeros(depth, device=device) for name in vocabs}
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for batch in texts:
            _tally(head, batch, head.unrolled(batch.hidden, batch.tokens, depth), vocabs, tried, right)
    found = {}
    for name in vocabs:
        total = max(1.0, float(tried[name][0]))
        rates = [float(r) / max(1.0, float(t)) for r, t in zip(right[name], tried[name], strict=True)]
        found[name] = Acceptance(rates, float(right[name].sum()) / total)
    return found


def _tally(
    head: Trainable,
    batch: Batch,
    states: Sequence[Tensor],
    vocabs: Mapping[str, DraftVocab | None],
    tried: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
) -> None:
    num, hidden = states[0].shape[1], batch.hidden
    first = torch.arange(1, 1 + num, device=hidden.device)[None, :]
    # A chain starts behind a token that the target wrote, and all of its places lie inside the text.
    inside = (first + len(states) <= batch.lengths[:, None]) & (first >= batch.prompts[:, None])
    alive = dict.fromkeys(vocabs, inside)
    for s, state in enumerate(states, start=1):
        choice = _argmax(head.target_logits, hidden[:, s : s + num], None)
        after = batch.tokens[:, s + 1 : s + 1 + num]
        text = F.pad(after, (0, num - after.shape[1]), value=-1)
        for name, vocab in vocabs.items():
            draft = _argmax(
                lambda x: F.linear(head._norm(x, "norm").to(head.target.dtype), head.target.output),
                state,
                vocab,
            )
            kept = alive[name] & (draft == choice)
            tried[name][s - 1] += alive[name].sum()
            right[name][s - 1] += kept.sum()
            alive[name] = kept & (draft == text)


def _argmax(logits: Callable[[Tensor], Tensor], states: Tensor, vocab: DraftVocab | None) -> Tensor:
    """[B, n]: the likeliest target token of each place, among those of `vocab`."""
    flat, found = states.flatten(0, 1), []
    for begin in range(0, len(flat), _LOGIT_ROWS):
        scores = logits(flat[begin : begin + _LOGIT_ROWS])
        found.append(
            scores.argmax(dim=-1)
            if vocab is None
            else vocab.target_ids[scores[:, vocab.target_ids].argmax(dim=-1)]
        )
    return torch.cat(found).view(states.shape[:2])
