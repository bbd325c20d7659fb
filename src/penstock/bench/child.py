"""Work in a new process that has nothing of this one. Owns the process, what it says on its way, and how its
result or error gets here; needs no torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from penstock.errors import PenstockError, StepFailed

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """What would end this process waits, so that a child that starts now is known before. The child inherits
    the mask: Ctrl-C at a terminal reaches it, too.

    A mask holds for one thread, and any thread may get a signal: in the main thread handlers note it instead.
    """
    came: list[int] = []
    with contextlib.ExitStack() as leaving:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        leaving.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        leaving.callback(_send_here, came)
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                # the child inherits that a signal is ignored, too
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before = signal.signal(number, lambda number, _: came.append(number))
                    leaving.callback(signal.signal, number, before)
        yield


def _send_here(numbers: list[int]) -> None:
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), number)


def run_in_process(work: Callable[..., Any], args: tuple[Any, ...], listen: Callable[..., None]) -> Any:
    """What `work` returns in a new process that has nothing of this one. Its last argument is called there,
    and `listen` is called here."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, work, args), name="penstock-bench")
    resource_tracker.ensure_running()  # its start would let signals through
    try:
        with signals_held():
            process.start()
        theirs.close()
        while (said := ours.recv())[0] == "progress":
            listen(*said[1:])
    except EOFError:
        process.join()
        raise StepFailed(
            f"a process of the measurement ended with code {process.exitcode} and without a result"
        ) from None
    finally:
        if process.pid is not None:
            process.kill()  # it has nothing more to do
            process.join()
        ours.close()
    kind, result, *message = said
    if kind == "result":
        return result
    try:
        raise result(*message)
    except TypeError:  # that kind is not made from a message alone
        raise StepFailed(*message) from None


def _serve(pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent's word counts
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        pipe.send(("result", work(*args, lambda *said: pipe.send(("progress", *said)))))
    except PenstockError as error:
        pipe.send(("error", type(error), f"{error}"))
