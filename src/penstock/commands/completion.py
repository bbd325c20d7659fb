"""`penstock completion`: a script by which a shell completes commands, flags and their values. Owns which
flags take files, folders and names; the parsers have the rest."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

import shtab

from penstock.config import DUMMIES, EMBEDDED, Config

_NAMES = " ".join((EMBEDDED, *DUMMIES))
_MODELS = {
    "bash": "_penstock_models",
    "zsh": "_penstock_models",
    "fish": f"(string split ' ' '{_NAMES}'; __fish_complete_path (commandline -ct))",
    "preamble": {
        "bash": f'_penstock_models() {{ compgen -W "{_NAMES}" -- "$1"; _shtab_compgen_files "$1"; }}',
        "zsh": f"_penstock_models() {{ compadd {_NAMES}; _files }}",
    },
}
_BY_METAVAR = {"FILE": shtab.FILE, "TRACE": shtab.FILE, "DIR": shtab.DIRECTORY}


def run(args: Namespace, config: Config) -> int:
    for action in _actions(args.whole):
        complete = (
            _MODELS if action.dest in ("model", "served_model") else _BY_METAVAR.get(str(action.metavar))
        )
        if complete is not None:
            action.complete = complete  # type: ignore[attr-defined]
    print(shtab.complete(args.whole, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of the command and all below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _actions(one)
