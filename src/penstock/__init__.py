"""Penstock: an LLM inference engine whose KV cache outlives the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.contract import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads the engine, and torch with it, on first use."""
    if name in ("LLM", "Completion"):
        from penstock import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
