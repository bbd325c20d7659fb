"""Which idle block is forgotten first. Owns the choice of a policy by its name; each policy is a file of its own."""

from __future__ import annotations

from penstock.config import EVICTIONS
from penstock.errors import ConfigError
from penstock.kv.blocks.eviction.cost import CostOrder
from penstock.kv.blocks.eviction.lru import LruOrder
from penstock.kv.blocks.eviction.order import EvictionOrder
from penstock.kv.blocks.eviction.returning import ReturningOrder
from penstock.kv.blocks.eviction.wanted import PoolWant, WantedLast

__all__ = ["CostOrder", "EvictionOrder", "LruOrder", "PoolWant", "ReturningOrder", "WantedLast", "make_order"]


def make_order(name: str, num_slots: int, block_tokens: int = 16) -> EvictionOrder:
    """An order for one pool of `num_slots` blocks of `block_tokens` tokens."""
    if name == "returning":
        return ReturningOrder(num_slots)
    if name == "lru":
        return LruOrder(num_slots)
    if name == "cost":
        return CostOrder(num_slots, block_tokens)
    raise ConfigError(f"the order of eviction is one of {', '.join(EVICTIONS)}, got {name!r}")
