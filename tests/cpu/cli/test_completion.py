"""Completion, in the shells themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cpu.cli.conftest import Ran

# What each shell does with a line that is not finished: it prints what the line could go on with.
_BASH = """
source {script}
COMP_WORDS=({line}); [[ "{line}" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )) COMP_LINE="{line}"
$(complete -p penstock | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
_FISH = "source {script}; complete -C '{line}' | string replace -r '\\t.*' ''"
# zsh completes only as one types: it needs a terminal, and has to be at its prompt. READY is written in two
# parts, so that the echo of the command is not taken for its output.
_ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D'
zpty -w shell 'setopt nolistambiguous; print REA""DY'
zpty -r -m shell seen '*READY*2004h*'
zpty -w -n shell '{line}'$'\t'
zpty -w shell $'\x15print DO""NE'
zpty -r -m shell seen '*DONE*'
print -r -- $seen
"""
_ESCAPES = r"\x1b\[[?\d;]*[A-Za-z]|[\x07\x08]"  # what a terminal does with a line
SHELLS = {"bash": ["bash", "-c", _BASH], "fish": ["fish", "-c", _FISH], "zsh": ["zsh", "-fc", _ZSH]}
COMPLETED = {
    "penstock s": {"serve"},
    "penstock serve --kv-offload-s": {"--kv-offload-ssd-dir", "--kv-offload-ssd-gib"},
    "penstock serve --device c": {"cpu", "cuda"},
    "penstock bench de": {"decode", "deep"},
    "penstock generate --model tiny-q": {"tiny-qwen3", "tiny-qwen3-moe"},
    "penstock serve --config set": {"settings.toml"},
    "penstock serve --kv-offload-ssd-dir k": {"kv"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_flags_and_values(
    penstock: Callable[..., Ran], tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "settings.toml").touch()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kx").touch()  # no folder
    script = tmp_path / "scripts" / "_penstock"
    script.parent.mkdir()
    script.write_text(penstock(f"completion {shell}").out)
    *command, program = SHELLS[shell]
    for line, expected in COMPLETED.items():
        text = program.format(script=script, folder=script.parent, line=line)
        ran = subprocess.run([*command, text], capture_output=True, text=True, cwd=tmp_path)
        found = {word.rstrip("/") for word in re.sub(_ESCAPES, " ", ran.stdout).split()}
        assert expected <= found, (line, ran)
        assert not {"kx", "chat", "--device-kv-gib"} & found


def test_another_shell_is_refused(penstock: Callable[..., Ran]) -> None:
    ran = penstock("completion tcsh")
    assert ran.code == 2 and "invalid choice: 'tcsh'" in ran.err
