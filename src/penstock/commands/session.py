"""An engine for one command: loaded with its progress shown, run on a thread of its own, closed on every way out. Owns no requests."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.commands.hub import fetched
from penstock.commands.progress import ProgressBar
from penstock.config import Config
from penstock.contract import Adapter
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop


def load_engine(config: Config) -> Engine:
    """A model on the hub is fetched first, unless its files are here."""
    config = fetched(config)
    with ProgressBar() as bar:
        return build(config, bar)


@contextmanager
def running_engine(config: Config) -> Iterator[Engine]:
    """What still runs when the block is left is cancelled."""
    engine = load_engine(config)
    loop = EngineLoop(engine)
    start_loop(loop)
    try:
        yield engine
    finally:
        loop.close(deadline_s=0.0)


def start_loop(loop: EngineLoop) -> None:
    with ProgressBar() as bar:
        loop.start(bar)


def given_adapter(engine: Engine) -> Adapter | None:
    """What answers come from where a command was given an adapter; None: the model as it is."""
    loaded = engine.adapters.all()
    return loaded[0].adapter if loaded else None


def tolerate_encodings() -> None:
    """Bytes that are no text, and characters that the terminal does not have, show as replacements instead of ending the program."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
