"""How the KV of one block lies in its page: a pure value, declared and never guessed from shapes. Owns no memory.

    page of one slot:  [layer][k|v][token][kv_head][head_dim]

A page is contiguous, so one block is one copy; the layers of a page are in order, so a run of layers is one copy too.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError, InvariantBroken

NAME = "block-major"
VERSION = 1  # of the meaning of the bytes: changes when the same dimensions are laid out in another way
K, V = 0, 1

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Dimensions of one block's page."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a KV layout needs a positive {name}, got {getattr(self, name)}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV can be stored as {', '.join(ITEM_BYTES)}, not as {self.dtype!r}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_tokens, self.num_kv_heads, self.head_dim)

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """In elements, of the dimensions of `shape`; a slot's page is `num_layers * strides[0]` elements."""
        token = self.num_kv_heads * self.head_dim
        part = self.block_tokens * token
        return (2 * part, part, token, self.head_dim, 1)

    @property
    def part_bytes(self) -> int:
        """K, or V, of one layer of one block."""
        return self.strides[1] * ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return 2 * self.part_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def offset(self, layer: int, part: int) -> int:
        """Byte at which K (0) or V (1) of `layer` starts within its page."""
        if not 0 <= layer < self.num_layers or part not in (K, V):
            raise InvariantBroken(f"no part {part} of layer {layer} in a page of {self.num_layers} layers")
        return layer * self.layer_bytes + part * self.part_bytes

    def extent(self, layers: tuple[int, int]) -> tuple[int, int]:
        """(first byte, number of bytes) within a page of layers `[layers[0], layers[1])`."""
        first, end = layers
        if not 0 <= first <= end <= self.num_layers:
            raise InvariantBroken(f"no layers {first} to {end} in a page of {self.num_layers} layers")
        return first * self.layer_bytes, (end - first) * self.layer_bytes

    def fingerprint(self) -> bytes:
        """Equal exactly where pages are interchangeable byte by byte. Readable, for whoever looks into a stored cache."""
        layers, _, tokens, heads, dim = self.shape
        return f"{NAME}/{VERSION} layers={layers} block_tokens={tokens} kv_heads={heads} head_dim={dim} dtype={self.dtype}".encode()
