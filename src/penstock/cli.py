"""The command line: arguments -> config -> call, and errors -> one line and an exit code. Owns no work of its
own.

Commands are imported when they run, so that `--help` and argument errors need neither torch nor a web
framework.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from penstock.commands.bench_arguments import add_bench
from penstock.config import LoraConfig, ModelSource, ServerConfig
from penstock.errors import ConfigError, PenstockError, UserError
from penstock.flags import (
    Parser,
    add_flags,
    config_of,
    engine_flags,
    new_file,
    number,
    positive,
    sampling_flags,
    sampling_of,
    without_secrets,
)
from penstock.installation import described
from penstock.settings_file import SettingsFile, add_settings_file, shown, take_in

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `--help` and `--version` raise SystemExit, as argparse has
    it."""
    argv = sys.argv[1:] if argv is None else argv
    _ready_streams()
    file = SettingsFile()
    try:
        args = make_parser().parse_args(argv)
        file = take_in(args, argv)
        code: int = args.run(args)
        sys.stdout.flush()  # while a closed pipe can still be dealt with
        return code
    except PenstockError as error:
        code = EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED
        return _failed(file.explained(str(error)), [*argv, *file.texts], code)
    except ModuleNotFoundError as error:
        if (error.name or "penstock").partition(".")[0] == "penstock":
            raise
        return _failed(f"this command needs the package {error.name}, which is not installed", argv)
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno is None and not isinstance(error, BrokenPipeError):
            raise
        _drop_output()
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            return EXIT_FAILED
        return _failed(str(error), argv)


def _failed(message: str, argv: Sequence[str], code: int = EXIT_FAILED) -> int:
    print(f"penstock: error: {' '.join(without_secrets(message, argv).split())}", file=sys.stderr)
    return code


def _ready_streams() -> None:
    """Replace a standard stream that was closed before the start, so that no other file gets its number.
    Undecodable bytes, and characters that the terminal lacks, show as replacements instead of ending the
    program."""
    # in this order: the system assigns the lowest free number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Python flushes stdout once more at exit and must not fail on output that could not be written."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    with contextlib.suppress(io.UnsupportedOperation):  # not a file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    about = "An LLM inference engine whose KV cache outlives the accelerator."
    parser = Parser(prog="penstock", description=about)
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show versions, and what is installed",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=parser.show_help)
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_demo(commands)
    add_bench(commands, _run)
    _add_cache(commands)
    _add_doctor(commands)
    _add_completion(commands, parser)
    return parser


class _Version(argparse.Action):
    """Looks for versions only when it is asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(described())
        parser.exit()


def _run(args: argparse.Namespace) -> int:
    """The config first: an error in it is said before a command is imported."""
    config = config_of(args)
    if "print_config" in args and args.print_config:
        print("\n".join(shown(args)))
        return 0
    code: int = importlib.import_module(f"penstock.commands.{args.command}").run(args, config)
    return code


def _write(args: argparse.Namespace) -> int:
    """For commands that write text, from one model."""
    args.sampling = sampling_of(args)
    if len(args.lora) > 1:
        names = ", ".join(name for name, _ in args.lora)
        raise ConfigError(
            f"argument --lora: answers can come from one adapter, and {len(args.lora)} are given: {names}"
        )
    return _run(args)


# --------------------------------------------------------------------------------------------------- commands


def _add_serve(commands: Any) -> None:
    about = "Serve a model over HTTP, compatible with OpenAI's API."
    parents = [engine_flags(LoraConfig, ServerConfig)]
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=about, parents=parents)
    text = f"the same as --model (unset: {ModelSource().model})"
    parser.add_argument("served_model", nargs="?", metavar="MODEL", help=text)
    add_settings_file(parser)
    parser.set_defaults(run=_run, command="serve", model=None)  # so that two models are noticed


def _add_generate(commands: Any) -> None:
    about = "Write one answer to PROMPT on stdout, as it is generated; progress and figures go to stderr."
    parents = [engine_flags(LoraConfig)]
    parser = commands.add_parser("generate", help="answer one prompt", description=about, parents=parents)
    sampling_flags(parser, temperature=0.0, max_tokens=256)
    parser.add_argument("prompt", metavar="PROMPT", help="what to answer; - reads it from stdin")
    text = "continue PROMPT as it stands, without the model's chat template"
    parser.add_argument("--raw", action="store_true", help=text)
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop where the model would")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write text and figures there, too")
    add_settings_file(parser)
    parser.set_defaults(run=_write, command="chat")


def _add_chat(commands: Any) -> None:
    about = "Talk with a model. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."
    parents = [engine_flags(LoraConfig)]
    parser = commands.add_parser("chat", help="talk with a model", description=about, parents=parents)
    sampling_flags(parser, temperature=0.7, max_tokens=1024)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_settings_file(parser)
    parser.set_defaults(run=_write, command="chat")


def _add_demo(commands: Any) -> None:
    about = (
        "Show in a minute what Penstock is for: a question about a long document, computed, and again with "
        "its KV from host memory, from disk after a restart, and from a store shared with another engine."
    )
    parser = commands.add_parser("demo", help="see what it is for, in a minute", description=about)
    add_flags(parser, "model", "load_format", "device", "dtype", "weights", "deterministic")
    add_flags(parser, "no_download", "kv_offload_ssd_dir")
    text = "tokens of the document, cut or repeated (unset: all of it, some 2,000)"
    number(parser, "--tokens", text, kind=positive)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there")
    parser.set_defaults(run=_run, command="demo")


def _add_cache(commands: Any) -> None:
    about = "Look into the directory of a disk tier, which no other process may be using meanwhile."
    parser = commands.add_parser("cache", help="look into a disk cache of KV", description=about)
    actions = parser.add_subparsers(title="what to do", metavar="ACTION")
    parser.set_defaults(run=parser.show_help)
    for action, does in (
        ("inspect", "say whose blocks are there, and how many"),
        ("verify", "read every block and report those that are damaged; exit code 1 where there are any"),
        ("clear", "remove the cache's files, and nothing else from the directory"),
    ):
        one = actions.add_parser(action, help=does, description=f"{does[0].upper()}{does[1:]}.")
        add_flags(one, "kv_offload_ssd_dir", required=True)
        one.add_argument("--json", type=new_file, metavar="FILE", help="write what was found there")
        one.set_defaults(run=_run, command="cache", action=action)
        if action == "clear":
            one.add_argument("--yes", action="store_true", help="do not ask first")


def _add_doctor(commands: Any) -> None:
    about = (
        "Check that this machine can run Penstock: packages, devices, memory, a tiny generation; and "
        "whether a model would load."
    )
    parser = commands.add_parser("doctor", help="check this machine, and a model", description=about)
    add_flags(parser, "model", "device", "dtype", "weights", "device_kv_gib", "max_model_len")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the checks there")
    parser.set_defaults(run=_run, command="doctor")


def _add_completion(commands: Any, whole: argparse.ArgumentParser) -> None:
    about = "Print a script by which a shell completes commands, flags and what they take."
    parser = commands.add_parser("completion", help="completion for a shell", description=about)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that is to complete")
    parser.set_defaults(run=_run, command="completion", whole=whole)
