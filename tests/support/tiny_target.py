"""A tiny target on the CPU and text that it wrote, for tests of draft heads. Owns nothing that lasts."""

from __future__ import annotations

import dataclasses

import torch

from penstock.models.decoder import Decoder
from penstock.models.layers import TorchLayerOps
from penstock.models.model import ModelConfig
from penstock.models.progress import silent
from penstock.models.registry import architecture_of
from penstock.models.weights import dummy_weights
from penstock.testing.tiny_models import TINY_LLAMA
from train_mtp.training import Text, Trainable, hidden_states

SMALL = dataclasses.replace(
    TINY_LLAMA, vocab=96, hidden=32, num_heads=2, num_kv_heads=1, ffn=64, max_position=256
)


def tiny_target(dims: ModelConfig = SMALL, seed: int = 0) -> Decoder:
    """Norms differ from one, so that one that is left out shows, and from seed to seed."""
    weights = dummy_weights(dims, seed, torch.device("cpu"), torch.float32, silent)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in weights.items():
        if tensor.dim() == 1 and not name.endswith("_bias"):
            tensor.mul_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
    model = architecture_of(dims).model(dims, weights, TorchLayerOps(), b"")
    assert isinstance(model, Decoder)
    return model


@torch.no_grad()
def written(target: Decoder, num_texts: int, length: int, seed: int, greedy: bool = True) -> list[Text]:
    """Texts behind prompts of two random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.config.vocab, (num_texts, 2), generator=generator)
    logits = Trainable(target, None, 0).target_logits
    while tokens.shape[1] < length:
        scores = logits(hidden_states(target, tokens)[:, -1]).float()
        chosen = (
            scores.argmax(dim=-1)
            if greedy
            else torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[:, 0]
        )
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
    return [Text(row, 2) for row in tokens.tolist()]
