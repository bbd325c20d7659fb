"""Work in a process of its own, of which nothing is left but what it returns. Owns that process; needs nothing that is slow to import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from penstock import errors
from penstock.errors import PenstockError, StepFailed

END_S = 60.0  # for a process that has said everything

Progress = Callable[[str, int, int], None]


def run_in_process(work: Callable[..., Any], args: tuple[Any, ...], progress: Progress) -> Any:
    """What `work` returns in a new process that has nothing of this one; its progress is shown here."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, work, args), name="penstock-bench")
    process.start()
    theirs.close()
    try:
        while True:
            kind, *said = ours.recv()
            if kind == "progress":
                progress(*said)
            elif kind == "error":
                raise _as_error(*said)
            else:
                return said[0]
    except EOFError:
        process.join()
        raise StepFailed(f"a process of the measurement ended with code {process.exitcode} and without a result") from None
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send(("result", work(*args, lambda *said: pipe.send(("progress", *said)))))
    except PenstockError as error:
        pipe.send(("error", type(error).__name__, f"{error}"))


def _as_error(name: str, message: str) -> BaseException:
    """The same kind where that can be made of a message alone."""
    kind: Callable[[str], BaseException] = getattr(errors, name, StepFailed)
    try:
        return kind(message)
    except TypeError:
        return StepFailed(message)
