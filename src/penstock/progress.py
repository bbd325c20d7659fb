"""How far long work has come, shown on stderr. Owns the display; the work calls it with stage, done and
total."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

FIRST_LINE_S = 1.0  # without a terminal: a stage that takes this long is announced,
NEXT_LINE_S = 10.0  # and then spoken of this often


class ProgressBar:
    """A bar on a terminal; elsewhere a line now and then, so that a log shows that something happens."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._speak_at_s = 0.0

    def __enter__(self) -> ProgressBar:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        begins = stage != self._stage
        self._stage = stage
        if self._bar is not None:
            self._draw(self._bar, begins, done, total)
        else:
            self._speak(begins, done, total)

    def _draw(self, bar: Progress, begins: bool, done: int, total: int) -> None:
        if begins or self._task is None:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(self._stage, total=total)
        bar.update(self._task, completed=done, total=total)

    def _speak(self, begins: bool, done: int, total: int) -> None:
        now = time.monotonic()
        if begins:
            self._speak_at_s = now + FIRST_LINE_S
        if now >= self._speak_at_s and done < total:
            self._console.print(
                f"{self._stage}: {100 * done // max(total, 1)} %", highlight=False, markup=False
            )
            self._speak_at_s = now + NEXT_LINE_S
