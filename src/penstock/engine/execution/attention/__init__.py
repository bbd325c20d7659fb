"""Attention over the paged KV cache: the interface of a backend, and its sizes. Each backend has a file of
its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.engine.execution.batch import StepInputs
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig


class Partial(NamedTuple):
    """Attention of a step's tokens over some of their keys; more keys can be added."""

    out: Tensor  # float32 [T, heads * head_dim]
    lse: Tensor  # float32 [T, heads]: log-sum-exp of the scores, in the backend's own base


class Attention(Protocol):
    """One backend over one arena. Built as `Backend(arena, config, rope, blank_from)`, where `arena` is the
    block-major tensor [num_slots + 1, layers, 2, block_tokens, kv_heads, head_dim] whose last slot is the
    padding block, `config` the ModelConfig and `rope` the model's rotary tables (`rope_table`). From layer
    `blank_from` on, keys that are all zeros are masked: tokens that the draft model skipped. None: in no
    layer."""

    arena: Tensor
    lse_nats: float  # one unit of `Partial.lse`, in nats

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Compile and plan all that steps may need, on the thread that will launch them. Chunks have at most
        `max_chunk` tokens, sequences `max_tokens`."""

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor: ...

    def attend_resident(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Partial:
        """The same over the blocks on the device only, for a step with sequences that begin in host
        memory."""

    def fetch(self, layer: int, host: Tensor, tables: Tensor, first: int, into: Tensor) -> None:
        """Copy one layer of blocks from the arena `host` into `into`: contiguous keys and values [2, tokens,
        kv_heads, head_dim]. Their slots are in `tables` from `first` on."""

    def add_piece(self, partial: Partial, q: Tensor, rows: tuple[int, int], piece: Tensor) -> None:
        """Add fetched keys and values to `partial`. All of the tokens `rows` attend to all of them."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the arena [num_slots + 1, layers, 2, block_tokens, kv_heads, head_dim] and of the heads that
    read it."""

    num_layers: int
    block_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    windows: tuple[int, ...]  # by layer: tokens that a token sees, itself included; 0: all before it
    ropes: tuple[int, ...]  # by layer: the number of its rotary table
    blank_from: int  # first layer in which keys of zeros are masked

    @classmethod
    def of(cls, arena: Tensor, config: ModelConfig, rope: Tensor, blank_from: int | None) -> Geometry:
        """Raises InvariantBroken unless all dimensions agree. There are no later checks."""
        expected = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        if (
            arena.dim() != 6
            or (arena.shape[1], arena.shape[2], arena.shape[4], arena.shape[5]) != expected
            or arena.shape[0] < 1
        ):
            raise InvariantBroken(
                f"arena {tuple(arena.shape)} is not [slots, {config.num_layers}, 2, block_tokens, "
                f"{config.num_kv_heads}, {config.head_dim}]"
            )
        if arena.stride(5) != 1:
            raise InvariantBroken(f"arena strides {arena.stride()}: a head's values must be adjacent")
        if config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise InvariantBroken(
                f"{config.num_heads} heads over {config.num_kv_heads} KV heads of {config.head_dim} cannot "
                "be grouped or rotated"
            )
        if tuple(rope.shape) != config.rope_shape:
            raise InvariantBroken(f"rope table {tuple(rope.shape)} is not {list(config.rope_shape)}")
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
            ropes=config.ropes,
            blank_from=config.num_layers if blank_from is None else blank_from,
        )

    def rope_tables(self, rope: Tensor) -> list[Tensor]:
        """By layer: its table [max_position, head_dim]."""
        tables = rope.view(max(self.ropes, default=0) + 1, -1, self.head_dim)
        return [tables[number] for number in self.ropes]

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, and so the exact length of such a table."""
        return -(-num_tokens // self.block_tokens)
