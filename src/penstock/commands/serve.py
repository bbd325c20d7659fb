"""`penstock serve`: an engine behind the HTTP server, in processes of their own or in this one. Owns the
order of start, how log lines look, and what the processes that it starts have in common: `python -m
penstock.commands.serve KIND PARENT SOCKET...`.

The engine, and torch with it, is imported where it runs: the parent of other processes does without, and so
do fronts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from socket import socket
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.config import GIB, Config, ServerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.figures import STATES
from penstock.models.hub import fetched, hub_name
from penstock.observe import Observers
from penstock.ranks.launched import is_follower

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop
    from penstock.server.boundary import EngineSetup, FromParent, Wire
    from penstock.server.lives import Lives

logger = logging.getLogger("penstock.serve")

_PR_SET_PDEATHSIG = 1
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(args: Namespace, config: Config) -> int:
    if args.api_key is None:
        args.api_key = os.environ.get("PENSTOCK_API_KEY")
    if args.api_key is not None and not args.api_key.strip():
        raise ConfigError("--api-key (or $PENSTOCK_API_KEY) is empty: leave it out to serve without one")
    if args.otlp_endpoint is not None and not _has_opentelemetry():
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry's SDK, which is not installed; run: pip install "
            "'penstock[otel]'"
        )
    if args.kv_events is not None:
        if importlib.util.find_spec("zmq") is None:
            raise ConfigError(
                "--kv-events needs pyzmq, which is not installed; run: pip install 'penstock[events]'"
            )
        config = replace(config, kv=replace(config.kv, events=True))
    if args.served_model is not None:
        if args.model is not None:
            raise ConfigError(f"two models are given: {args.served_model} and --model {args.model}")
        config = replace(config, source=replace(config.source, model=args.served_model))
    if is_follower(config, os.environ):
        from penstock.engine.follower import follow_launcher

        follow_launcher(config)
        return 0
    return serve(config, ServerConfig.of(vars(args)))


def _has_opentelemetry() -> bool:
    """Looked for, not imported: without the flag nothing of it is."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def serve(config: Config, server: ServerConfig) -> int:
    """What is missing, taken or too large is said before the weights are read."""
    run = _server()
    set_up_logs(server.log_level, server.log_format)
    with run.bind(server) as listener:
        name = hub_name(config.source.model)
        if name is not None and not server.served_names:
            server = replace(server, served_names=(name,))  # its directory is named after a revision
        from penstock.progress import ProgressBar

        with ProgressBar() as bar:
            config = fetched(config, bar)
        if server.api_processes == 0:
            return _serve_here(config, server, listener, run)
        from penstock.server.supervise import Supervisor

        return Supervisor(
            config, server, (server.log_level, server.log_format), listener, child_command
        ).run()


def _serve_here(config: Config, server: ServerConfig, listener: socket, run: ModuleType) -> int:
    """Engine and HTTP in this process."""
    from penstock.answer import start_loop

    with _publishing(server) as publish:
        engine, loop, lives = _loaded(config, server)
        try:
            http = run.server_here(engine, loop, server, listener, lives)
            _log_summary(engine, config, server, http.url)
            publish(engine)
            start_loop(loop)  # what takes long before the first request
            http.run()
        except ConfigError:
            engine.close(timeout_s=20.0)  # nothing else was started
            raise
    return 0


@contextlib.contextmanager
def _publishing(server: ServerConfig) -> Iterator[Callable[[Engine], None]]:
    """The sockets of KV events, taken before the weights are read; what is yielded starts to send. Nothing of
    it is imported if there are none."""
    if server.kv_events is None:
        yield lambda engine: None
        return
    from penstock.server.kv_events import listening

    with listening(server) as publisher:

        def publish(engine: Engine) -> None:
            assert engine.cache.events is not None
            publisher.start(engine.cache.events, engine.cache.block_tokens)

        yield publish


def run_engine(setup: EngineSetup, parent: Wire[FromParent]) -> int:
    """In the engine's process. Fronts are started while it loads."""
    from penstock.answer import start_loop
    from penstock.engine.build import device_for
    from penstock.server.boundary import Starting, unpacked
    from penstock.server.links import EngineProcess

    config, server = unpacked(setup.config, Config), unpacked(setup.server, ServerConfig)
    parent.send(Starting(device_for(config).type))
    with _publishing(server) as publish:
        engine, loop, lives = _loaded(config, server)
        _log_summary(engine, config, server, setup.url)
        publish(engine)
        process = EngineProcess(engine, loop, parent, server.shutdown_s, lives)
        return process.run(lambda: start_loop(loop))


def _loaded(config: Config, server: ServerConfig) -> tuple[Engine, EngineLoop, Lives | None]:
    """Requests are observed only for the page."""
    from penstock.answer import load_engine
    from penstock.engine.build import check_ahead
    from penstock.engine.loop import EngineLoop
    from penstock.server.lives import Lives

    check_ahead(config)
    lives = Lives() if server.has_viewers else None
    engine = load_engine(config, Observers() if lives is None else Observers(requests=(lives,)))
    return engine, EngineLoop(engine), lives


def _log_summary(engine: Engine, config: Config, server: ServerConfig, url: str) -> None:
    facts = summary(engine, config, server, url)
    lines = "\n".join(["serving", *(f"  {key}: {value}" for key, value in facts.items())])
    logger.info("%s", lines, extra={"fields": facts})


def summary(engine: Engine, config: Config, server: ServerConfig, url: str) -> dict[str, Any]:
    """A summary of the configuration for the log. No secrets."""
    layout, dims = engine.parts.arena.layout, engine.parts.executor.target.model.config
    sizes = []
    for tier, slots in engine.stats().kv_blocks.items():
        num = sum(slots.values())  # a shared store has none of its own
        each, what = (dims.state_bytes, "") if tier.endswith(STATES) else (layout.block_bytes, " blocks")
        sizes.append(f"{tier} {num * each / GIB:.2f} GiB ({num}{what})" if slots else tier)
    threads = {} if engine.parts.threads is None else {"threads": str(engine.parts.threads)}
    return {
        "event": "serving",
        "version": __version__,
        "model": ", ".join(server.served_names or (engine.name,)),
        "adapters": len(engine.adapters.all()),
        "device": str(engine.parts.arena.device),
        "dtype": layout.dtype,
        "weights": engine.parts.weights,
        **threads,
        **({} if engine.parts.ranks.size == 1 else {"ranks": engine.parts.ranks.size}),
        "kv": ", ".join(sizes),
        "block_tokens": layout.block_tokens,
        "max_model_len": engine.max_model_len,
        "max_batch": config.engine.max_batch,
        "max_concurrent": server.max_concurrent,
        "key": "needed" if server.api_key is not None else "not needed",
        **({} if server.kv_events is None else {"kv_events": server.kv_events}),
        "url": url,
    }


def _server() -> ModuleType:
    """Before the weights are loaded, so that a missing package is reported at once."""
    try:
        from penstock.server import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "penstock"):
            raise
        raise ConfigError(
            f"serve needs the package {package}, which is not installed; run: pip install 'penstock[server]'"
        ) from None
    return run


# -------------------------------------------------------------------------------------------------- log lines


class JsonLines(logging.Formatter):
    """One JSON object a line. A record's `fields` are fields of it, instead of text that would have to be
    taken apart again."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs(level: str, format: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


# -------------------------------------------------------------------------------------------------- processes


def child_command(kind: str, fds: Sequence[int]) -> list[str]:
    """The command line of a child of this process."""
    return [sys.executable, "-m", "penstock.commands.serve", kind, str(os.getpid()), *map(str, fds)]


def run_child(argv: Sequence[str]) -> int:
    from penstock.server import boundary
    from penstock.server.boundary import EngineSetup, FromParent, FrontSetup, ProtocolBroken, Wire

    _, parent_pid, *fds = argv
    _end_with(int(parent_pid))
    sockets = [int(fd) for fd in fds]
    parent: Wire[FromParent] = Wire(socket(fileno=sockets[0]), FromParent)
    setup = parent.receive()
    try:
        if not isinstance(setup, EngineSetup | FrontSetup):
            raise ProtocolBroken(f"a new process got {type(setup).__name__} as its first message")
        if setup.version != boundary.VERSION:
            raise ProtocolBroken(
                f"the parent speaks version {setup.version} of the protocol, and this process "
                f"{boundary.VERSION}"
            )
        set_up_logs(*setup.logs)
        if isinstance(setup, EngineSetup):
            return run_engine(setup, parent)
        from penstock.server.run import run_front

        run_front(setup, parent, socket(fileno=sockets[1]), socket(fileno=sockets[2]), sockets[3])
        return 0
    except PenstockError as error:
        parent.send(boundary.Broken(boundary.fault_from(error)))
        return 1


def _end_with(parent_pid: int) -> None:
    """A terminal and systemd send signals to all processes: the parent's word counts. Should it be killed, so
    is this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Ends without waiting for threads that are left: what has to be closed is closed by then, and the parent
    waits."""
    code = 1
    try:
        code = run_child(sys.argv[1:])
    except BaseException:
        logger.exception("this process cannot go on")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
