"""How `penstock demo` looks: bars that grow on a terminal, plain lines elsewhere. Owns the form; the figures
are those of the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.commands.demo_stages import COLD, DemoAnswer, DemoStage, factor
from penstock.progress import ProgressBar, plain_console

MIN_COLUMNS = 76  # of bars; narrower terminals get lines
_BAR = (10, 40)  # characters
_WIDE = 20  # of them: room for a longer title
_SCALE_S = 4.0  # what a full bar is at first, while nothing is known
_REFRESHED = 12  # times a second
_EIGHTHS = " ▏▎▍▌▋▊▉"
_TITLE, _SECONDS, _RATIO, _REUSED, _COMPUTED = 23, 7, 6, 12, 8  # widths of the other columns
_FIXED = _TITLE + _SECONDS + _RATIO + _REUSED + _COMPUTED + 10  # with the space between them


class DemoView(Protocol):
    """What happens, in its order."""

    def __enter__(self) -> DemoView: ...
    def __exit__(self, *error: object) -> None: ...

    def progress(self, stage: str, done: int, total: int) -> None: ...

    def asking(self, stage: DemoStage) -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def answered(self, answer: DemoAnswer) -> None: ...

    def note(self, text: str) -> None: ...


def view_for(console: Console) -> DemoView:
    drawn = console.is_terminal and not console.is_dumb_terminal and can_draw(console)
    return BarView(console) if drawn else LineView()


def can_draw(console: Console) -> bool:
    return console.width >= MIN_COLUMNS and console.encoding.startswith("utf")


def seconds(value_s: float) -> str:
    return f"{value_s:.2f} s" if value_s >= 1 else f"{value_s * 1000:.0f} ms"


def times(value: float) -> str:
    return f"{value:.1f}x" if 1 != value < 10 else f"{value:.0f}x"


def printable(text: str) -> str:
    """What a model writes must not drive the terminal."""
    return "".join(one if one.isprintable() else " " for one in text)


# ---------------------------------------------------------------------------------------------------- drawing


def bar(share: float, width: int) -> str:
    """At least an eighth of a character."""
    eighths = max(1, round(min(1.0, share) * width * 8))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def bars(
    answers: Sequence[DemoAnswer], width: int, waiting: DemoStage | None = None, waited_s: float = 0.0
) -> Table:
    """Answers so far, and one that is awaited, as wide as a console of `width`."""
    most = max(_BAR[0], min(_BAR[1], width - _FIXED))
    table = _empty(most)
    cold_s = answers[0].ttft_s if answers else max(_SCALE_S, waited_s)
    for number, answer in enumerate(answers, 1):
        title = f"{number} {answer.stage.title}"
        line = Text(bar(answer.ttft_s / cold_s, most), "red" if answer.stage.tier is None else "green")
        ratio = Text(times(factor(answers[0], answer)), "bold")
        origin = answer.reused or "-", f"{answer.source.computed:,}"
        table.add_row(title, line, seconds(answer.ttft_s), ratio, *origin)
    if waiting is not None:
        line = Text(bar(waited_s / cold_s, most), "yellow")
        table.add_row(f"{len(answers) + 1} {waiting.title}", line, f"{waited_s:.1f} s")
    return table


def _empty(most: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    first = "time to first token" if most > _WIDE else "first token"
    for title, width in (("", _TITLE), (first, most)):
        table.add_column(title, width=width, no_wrap=True)
    for title, width in (("", _SECONDS), ("faster", _RATIO)):
        table.add_column(title, width=width, no_wrap=True, justify="right")
    table.add_column("reused from", width=_REUSED)
    table.add_column("computed", width=_COMPUTED, no_wrap=True, justify="right")
    return table


class BarView:
    """On a terminal of at least `MIN_COLUMNS`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()  # it is drawn by a thread of its own
        self._answers: list[DemoAnswer] = []
        self._waiting: DemoStage | None = None
        self._asked_s = self._stage_s = 0.0
        self._ttft_s: float | None = None
        self._status = ""
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=_REFRESHED)

    def __enter__(self) -> DemoView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting, self._status = None, ""
        self._live.stop()

    def progress(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if not self._status.startswith(stage):
                self._stage_s = time.monotonic()
            self._status = f"{stage} {100 * done // max(1, total)} %" if done else stage

    def asking(self, stage: DemoStage) -> None:
        self.progress(f"asking: {stage.question}", 0, 1)
        with self._lock:
            self._waiting, self._ttft_s, self._asked_s = stage, None, time.monotonic()

    def first_token(self, ttft_s: float) -> None:
        with self._lock:
            self._ttft_s = ttft_s

    def answered(self, answer: DemoAnswer) -> None:
        with self._lock:
            self._answers.append(answer)
            self._waiting = None

    def note(self, text: str) -> None:
        self._console.print(Text(text, "yellow"))

    def _draw(self) -> RenderableType:
        with self._lock:
            now_s = time.monotonic()
            waited_s = now_s - self._asked_s if self._ttft_s is None else self._ttft_s
            table = bars(self._answers, self._console.width, self._waiting, waited_s)
            status = f"{self._status} ({now_s - self._stage_s:.0f} s)" if self._status else ""
        return Group(table, Text(status, "dim", no_wrap=True, overflow="ellipsis"))


class LineView:
    """Elsewhere: a line for each answer on stdout, and what is happening on stderr."""

    def __init__(self) -> None:
        self._bar = ProgressBar()
        self._said = plain_console(stderr=True)
        self._cold: DemoAnswer | None = None
        self._num = 0

    def __enter__(self) -> DemoView:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def progress(self, stage: str, done: int, total: int) -> None:
        self._bar(stage, done, total)

    def asking(self, stage: DemoStage) -> None:
        self._bar(f"asking: {stage.title}", 0, 1)
        if not self._said.is_terminal:
            self._said.print(f"asking: {stage.title}")

    def first_token(self, ttft_s: float) -> None:
        """The line comes with the whole answer."""

    def answered(self, answer: DemoAnswer) -> None:
        self._cold, self._num = self._cold or answer, self._num + 1
        print(f"{self._num} {line(answer, self._cold)}", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


def line(answer: DemoAnswer, cold: DemoAnswer) -> str:
    """All figures of an answer."""
    ratio, than = factor(cold, answer), ""
    if answer.stage != COLD:
        than = f" ({times(max(ratio, 1 / ratio))} {'faster' if ratio >= 1 else 'slower'} than cold)"
    origin = ", ".join(filter(None, (answer.reused, f"{answer.source.computed:,} computed")))
    return (
        f"{answer.stage.title}: first token after {seconds(answer.ttft_s)}{than}; "
        f"{answer.prompt_tokens:,} prompt tokens: {origin}"
    )


# ---------------------------------------------------------------------------------------------------- the end


def verdict(answers: Sequence[DemoAnswer], console: Console, identical: bool = True) -> RenderableType:
    """The answers, one below the other, and whether they are the same."""
    same = [answer for answer in answers if answer.stage.question == answers[0].stage.question]
    lines = [Text(answers[0].stage.question, "bold")]
    lines += [_answer_line(answers, answer) for answer in same]
    mark = "✓ " if console.encoding.startswith("utf") else ""
    ok = f"{mark}identical, compared token by token: {len(same)} answers of {len(same[0].tokens)} tokens"
    lines.append(
        Text(ok, "green") if identical else Text("NOT IDENTICAL, compared token by token", "bold red")
    )
    for answer in answers:
        if answer not in same:
            lines += [Text(answer.stage.question, "bold"), _answer_line(answers, answer)]
    return Group(*lines)


def _answer_line(answers: Sequence[DemoAnswer], answer: DemoAnswer) -> Text:
    return Text(f"  {answers.index(answer) + 1} {printable(answer.text)}")
