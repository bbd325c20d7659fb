"""Where on a thread something happened: its call stack without the observer's own frames. Owns frames, each made once and shared."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

_DEPTH = 12  # frames that a report shows
_MAX_KEPT = 4096  # distinct stacks that are shared; a program that has more starts over
_OWN = ("penstock/sanitizer/", "penstock/lanes/", "penstock/testing/sequenc")


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stacks:
    """Call stacks, the same object for the same place: there are as many places that submit as lines that do, and deeds by the million."""

    def __init__(self) -> None:
        self._is_own: dict[str, bool] = {}  # by file
        self._known: dict[tuple[str | int, ...], tuple[Frame, ...]] = {}  # by files and lines

    def __len__(self) -> int:
        return len(self._known)

    def here(self) -> tuple[Frame, ...]:
        """The caller's, innermost frame first, without the lane's own and ours."""
        places: list[str | int] = []
        frame: FrameType | None = sys._getframe(1)
        top, is_own = frame, self._is_own
        while frame is not None and len(places) < 2 * _DEPTH:
            file = frame.f_code.co_filename
            own = is_own.get(file)
            if own is None:
                own = is_own[file] = any(part in file for part in _OWN)
            if not own:
                places.append(file)
                places.append(frame.f_lineno)
            frame = frame.f_back
        key = tuple(places)
        found = self._known.get(key)
        return self._keep(key, top) if found is None else found

    def _keep(self, key: tuple[str | int, ...], frame: FrameType | None) -> tuple[Frame, ...]:
        frames: list[Frame] = []
        while frame is not None and len(frames) < _DEPTH:
            if not self._is_own[frame.f_code.co_filename]:
                frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
            frame = frame.f_back
        if len(self._known) >= _MAX_KEPT:
            self._known.clear()
        found = self._known[key] = tuple(frames)
        return found
