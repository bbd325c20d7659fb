"""How far long work has come, shown on stderr. Owns the display; the work calls it with stage, done and
total."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

FIRST_LINE_S = 1.0  # without a terminal: a stage that takes this long is announced,
NEXT_LINE_S = 10.0  # and then spoken of this often


class ProgressBar:
    """A bar on a terminal; elsewhere a line now and then, so that a log shows that something happens."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        hidden = not self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, transient=True, disable=hidden)
        self._task = self._bar.add_task("", visible=False)
        self._stage = ""
        self._speak_at_s = 0.0

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._speak_at_s = stage, now + FIRST_LINE_S
            self._bar.reset(self._task, description=stage, visible=True)
        self._bar.update(self._task, completed=done, total=total)
        if self._bar.disable and now >= self._speak_at_s and done < total:
            self._console.print(f"{stage}: {100 * done // max(total, 1)} %", highlight=False, markup=False)
            self._speak_at_s = now + NEXT_LINE_S


def plain_console(stderr: bool = False) -> Console:
    """Shows text as it is: no colours of numbers, no markup, no line breaks."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False)
