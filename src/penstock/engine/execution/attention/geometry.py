"""The sizes that an attention backend works with. Owns the one check that arena, model and rope table fit each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the arena [num_slots + 1, layers, 2, block_tokens, kv_heads, head_dim] and of the heads that read it."""

    num_layers: int
    block_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    windows: tuple[int, ...]  # by layer: tokens that a token sees, itself included; 0: all before it

    @classmethod
    def of(cls, arena: Tensor, config: ModelConfig, rope: Tensor) -> Geometry:
        """Raises InvariantBroken unless all dimensions agree; nothing is checked again after this."""
        expected = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        if arena.dim() != 6 or (arena.shape[1], arena.shape[2], arena.shape[4], arena.shape[5]) != expected or arena.shape[0] < 1:
            raise InvariantBroken(
                f"arena {tuple(arena.shape)} is not [slots, {config.num_layers}, 2, block_tokens, {config.num_kv_heads}, {config.head_dim}]"
            )
        if arena.stride(5) != 1:
            raise InvariantBroken(f"arena strides {arena.stride()}: a head's values must be adjacent")
        if config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise InvariantBroken(
                f"{config.num_heads} heads over {config.num_kv_heads} KV heads of {config.head_dim} cannot be grouped or rotated"
            )
        if tuple(rope.shape) != (config.max_position, config.head_dim):
            raise InvariantBroken(f"rope table {tuple(rope.shape)} is not [{config.max_position}, {config.head_dim}]")
        windows = config.windows or (0,) * config.num_layers
        if len(windows) != config.num_layers or min(windows) < 0:
            raise InvariantBroken(f"windows {windows} of {config.num_layers} layers")
        return cls(
            num_layers=config.num_layers,
            block_tokens=arena.shape[3],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.scale,
            norm_eps=config.norm_eps,
            windows=windows,
        )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, and so the exact length of such a table."""
        return -(-num_tokens // self.block_tokens)
