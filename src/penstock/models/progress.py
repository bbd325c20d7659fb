"""How loading tells where it is. Owns the protocol; the caller of the load decides what to show."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often, from the loading thread, with `done` <= `total` in units of the stage's own (bytes,
    mostly)."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""
