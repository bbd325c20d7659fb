"""`penstock serve`: an engine behind the HTTP server. Owns the order of start; the server owns the rest of the process's life."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.commands.session import load_engine, start_loop
from penstock.config import Config, ServerConfig
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import ConfigError

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def serve(config: Config, server: ServerConfig, log_level: str) -> int:
    run = _server()
    logging.basicConfig(level=log_level.upper(), format=_LOG_FORMAT)
    engine = load_engine(config)
    try:
        loop = EngineLoop(engine)
        run(engine, loop, server, lambda: start_loop(loop))
    except ConfigError:
        engine.close(timeout_s=20.0)  # the address was no good, so nobody else has started or ended anything
        raise
    return 0


def _server() -> Callable[[Engine, EngineLoop, ServerConfig, Callable[[], None]], None]:
    """Before the weights are loaded: what is missing is said at once."""
    try:
        from penstock.server.run import serve as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "penstock"):
            raise
        raise ConfigError(f"serve needs the package {package}, which is not installed; run: pip install 'penstock[server]'") from None
    return run
