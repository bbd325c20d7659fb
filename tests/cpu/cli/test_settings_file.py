"""Settings from a file: the same names, rules and messages as those of flags, and flags win.

Holds invariant 26: a setting that is unknown or has no effect is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import make_parser
from penstock.config import ServerConfig
from penstock.flags import config_of
from penstock.settings_file import take_in
from tests.cpu.cli.conftest import Ran

Penstock = Callable[..., Ran]
Written = Callable[[str], str]

FULL = """
# one of each kind
port = 9100
max_batch = 12
kv-offload = false
no-prefix-cache = true
device-kv-gib = 2
served-model-name = ["a", "b"]
lora = ["x=/tmp", "y=/tmp"]
kv-pin-spans = "0-64"
kv-residency = "scored"
sanitize = true
"""
REFUSED = {
    "prot = 1": "line 1: prot is no setting of `penstock serve`; did you mean --port?",
    "\nmax-num-seqs = 3": "line 2: max-num-seqs is no setting of `penstock serve`; --max-num-seqs is vLLM's",
    "stop = ['x']": "line 1: stop is no setting of `penstock serve`",
    "config = 'x'": "line 1: config is no setting of `penstock serve`",
    "no-kv-offload = true": "line 1: no-kv-offload is no setting: write kv-offload = false",
    "[server]\nport = 1": "line 1: server is a table; settings stand in the file without tables",
    "max-batch = 2\nmax_batch = 3": "line 2: max-batch is given twice",
    "port = '1'": "line 1: port must be a whole number, not a string",
    "port = true": "line 1: port must be a whole number, not a boolean",
    "device-kv-gib = 2026-01-01": "line 1: device-kv-gib must be a number, not a date or time",
    "deterministic = 1": "line 1: deterministic must be true or false, not an integer",
    "lora = [1]": "line 1: lora must be a string, not an integer",
    "lora = 'x'": "line 1: argument --lora: 'x' must be a name and a directory",
    "device = 'gpu'": "line 1: argument --device: invalid choice: 'gpu'",
    "kv-offload-ssd-dir = ''": "line 1: argument --kv-offload-ssd-dir: it is empty",
    "port = 99999": "--port must be between 0 and 65535, got 99999 (--port is in {file}, line 1)",
    "kv-offload-ssd-gib = 1": "needs --kv-offload-ssd-dir (--kv-offload-ssd-gib is in {file}, line 1)",
    "port = \n": "is not TOML: Invalid value (at line 1, column 8)",
}


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> str:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return write


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_as_a_flag_is_refused_with_its_line(
    penstock: Penstock, written: Written, text: str
) -> None:
    file = written(text)
    ran = penstock("serve --print-config --config", file)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert file in ran.err and REFUSED[text].format(file=file) in ran.err


def test_values_are_those_of_the_same_flags(written: Written) -> None:
    flags = (
        "--port 9100 --max-batch 12 --no-kv-offload --no-prefix-cache --device-kv-gib 2 --sanitize "
        "--served-model-name a b --lora x=/tmp --lora y=/tmp --kv-pin-spans 0-64 --kv-residency scored"
    )
    argv = ["serve", "--config", written(FULL)]
    from_file, from_flags = (
        make_parser().parse_args(argv),
        make_parser().parse_args(["serve", *flags.split()]),
    )
    take_in(from_file, argv)
    assert config_of(from_file) == config_of(from_flags)
    assert ServerConfig.of(vars(from_file)) == ServerConfig.of(vars(from_flags)) != ServerConfig()


def test_flags_win_and_lists_are_replaced(penstock: Penstock, written: Written) -> None:
    file = written(FULL + "model = 'tiny-llama'\n")
    flags = ("--port=1", "--lora", "z=/tmp", "--kv-offload")
    out = penstock("serve tiny-qwen3 --print-config --config", file, *flags).out
    assert "port = 1  # flag\n" in out and 'lora = ["z=/tmp"]  # flag\n' in out
    assert "kv-offload = true  # flag\n" in out and 'model = "tiny-qwen3"  # flag\n' in out
    assert f"max-batch = 12  # {file}, line 4\n" in out and "block-tokens = 16  # default\n" in out


def test_what_is_printed_is_a_file_with_the_same_settings(penstock: Penstock, written: Written) -> None:
    def settings(out: str) -> str:
        return re.sub(r"  # .*", "", out)

    first = penstock("serve --print-config --config", written(FULL)).out
    assert len(first.splitlines()) > 50
    assert settings(penstock("serve --print-config --config", written(first)).out) == settings(first)


def test_secrets_are_not_printed_and_others_must_not_read_them(
    penstock: Penstock, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "fr0m-there")
    assert "# api-key: set  # $PENSTOCK_API_KEY\n" in penstock("serve --print-config").out
    file = written("api-key = 's3cret'\nkv-offload-remote = 'valkey://u:pa55@h:1/0'\n")
    ran = penstock("serve --print-config --config", file)
    assert ran.err == "" and "# api-key: set" in ran.out and "# kv-offload-remote: valkey://h:1" in ran.out
    Path(file).chmod(0o644)
    ran = penstock("serve --print-config --config", file)
    assert ran.code == 0 and f"which has api-key and kv-offload-remote; run: chmod 600 {file}" in ran.err
    file = written("model = 's3://u:pa55@h/x'\napi-key = 's3cret'\n")
    wrong = penstock("serve --port 0 --api-processes 0 --config", file)  # its message names the model
    assert wrong.code == 2 and "s3://h" in wrong.err
    for one in (ran, wrong):
        assert "s3cret" not in one.out + one.err and "pa55" not in one.out + one.err


def test_an_empty_file_changes_nothing_and_a_missing_one_is_refused(
    penstock: Penstock, written: Written, tmp_path: Path
) -> None:
    assert penstock("serve --print-config --config", written("")).out == penstock("serve --print-config").out
    missing = penstock("serve --config", str(tmp_path / "none.toml"))
    assert missing.code == 2 and "none.toml cannot be read: No such file or directory" in missing.err


def test_commands_that_write_text_take_a_file_too(penstock: Penstock, written: Written, tiny) -> None:
    file = written(
        "model = 'tiny-llama'\nload-format = 'dummy'\ndevice = 'cpu'\nmax-tokens = 3\nstop = ['x']\n"
    )
    ran = penstock("generate hello --device-kv-blocks 64 --config", file)
    assert ran.code == 0 and "3 tokens" in ran.err, ran
