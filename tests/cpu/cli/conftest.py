"""Running commands in this process: what they return, print and say."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(line: str = "", *more: str) -> Ran:
        """`line` is split at its spaces."""
        capsys.readouterr()
        try:
            code = main([*line.split(" "), *more] if line else [])
        except SystemExit as left:  # --help and --version
            code = left.code
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def tiny() -> tuple[str, ...]:
    return ("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "256")
