"""`penstock serve`: an engine behind the HTTP server, in processes of their own or in this one. Owns the order of start.

The engine, and torch with it, is imported where it runs: the parent of other processes does without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from socket import socket
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.commands.hub import fetched, hub_name
from penstock.commands.logs import LogSettings, set_up_logs
from penstock.config import GIB, Config, ServerConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop
    from penstock.server.boundary import EngineSetup, FromParent, Wire

logger = logging.getLogger("penstock.serve")


def serve(config: Config, server: ServerConfig, logs: LogSettings) -> int:
    """What is missing, taken or too large is said before the weights are read."""
    run = _server()
    set_up_logs(logs)
    with run.bind(server) as listener:
        name = hub_name(config.source.model)
        if name is not None and not server.served_names:
            server = replace(server, served_names=(name,))  # its directory is named after a revision
        config = fetched(config)
        if server.api_processes == 0:
            return _serve_here(config, server, listener, run)
        from penstock.commands.serve_child import command
        from penstock.server.supervise import supervise

        return supervise(config, server, (logs.level, logs.format), listener, command)


def _serve_here(config: Config, server: ServerConfig, listener: socket, run: ModuleType) -> int:
    """Engine and HTTP in this process."""
    from penstock.engine.build import check_ahead
    from penstock.engine.loop import EngineLoop

    check_ahead(config)
    engine = load_engine(config)
    loop = EngineLoop(engine)

    def prepare(url: str) -> None:
        _log_summary(engine, config, server, url)
        start_loop(loop)

    try:
        run.serve(engine, loop, server, listener, prepare)
    except ConfigError:
        engine.close(timeout_s=20.0)  # nobody else has started or ended anything
        raise
    return 0


def run_engine(setup: EngineSetup, parent: Wire[FromParent]) -> int:
    """In the engine's process. Fronts are started while it loads."""
    from penstock.engine.build import check_ahead, device_for
    from penstock.engine.loop import EngineLoop
    from penstock.server.boundary import Starting
    from penstock.server.engine_process import EngineProcess

    parent.send(Starting(device_for(setup.config).type))
    check_ahead(setup.config)
    engine = load_engine(setup.config)
    loop = EngineLoop(engine)
    _log_summary(engine, setup.config, setup.server, setup.url)
    return EngineProcess(engine, loop, parent, setup.server.shutdown_s).run(lambda: start_loop(loop))


def _log_summary(engine: Engine, config: Config, server: ServerConfig, url: str) -> None:
    facts = summary(engine, config, server, url)
    logger.info("%s", "\n".join(["serving", *(f"  {key}: {value}" for key, value in facts.items())]), extra={"fields": facts})


def load_engine(config: Config) -> Engine:
    from penstock.commands import session

    return session.load_engine(config)


def start_loop(loop: EngineLoop) -> None:
    from penstock.commands import session

    session.start_loop(loop)


def summary(engine: Engine, config: Config, server: ServerConfig, url: str) -> Mapping[str, Any]:
    """What runs here, for whoever reads the log later. No secrets."""
    arena = engine.arena
    kv = {tier: sum(states.values()) for tier, states in engine.stats().kv_blocks.items() if states}
    sizes = ", ".join(f"{tier} {num * arena.layout.block_bytes / GIB:.2f} GiB ({num} blocks)" for tier, num in kv.items())
    shared = [tier for tier in engine.tiers if tier not in kv]
    return {
        "event": "serving",
        "version": __version__,
        "model": ", ".join(server.served_names or (engine.name,)),
        "adapters": len(engine.adapters.all()),
        "device": str(arena.device),
        "dtype": arena.layout.dtype,
        "kv": ", ".join([sizes, *shared]),
        "block_tokens": arena.layout.block_tokens,
        "max_model_len": engine.max_model_len,
        "max_batch": config.engine.max_batch,
        "max_concurrent": server.max_concurrent,
        "key": "needed" if server.api_key is not None else "not needed",
        "url": url,
    }


def _server() -> ModuleType:
    """Before the weights are loaded: what is missing is said at once."""
    try:
        from penstock.server import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "penstock"):
            raise
        raise ConfigError(f"serve needs the package {package}, which is not installed; run: pip install 'penstock[server]'") from None
    return run
