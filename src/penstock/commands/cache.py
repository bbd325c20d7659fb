"""`penstock cache`: inspects, verifies and clears the directory of a disk tier. Owns the questions and the
output; `penstock.kv` reads the files."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.console import Console

from penstock.bench.report import print_table
from penstock.errors import ConfigError
from penstock.kv.tiers.ssd import survey
from penstock.kv.tiers.ssd.survey import SnapshotSurvey, SpaceSurvey, Survey
from penstock.progress import ProgressBar

MOST_LINES = 20  # of damage shown; the JSON file has all of it
NUM_DIGITS = 12  # of a space's digest: enough to tell a few apart


def run_cache(
    action: Literal["inspect", "verify", "clear"], directory: Path, yes: bool, json_file: Path | None
) -> int:
    """With `yes` it clears without asking. 1 where something is damaged that was looked at byte by byte, or
    where nothing was done."""
    if action == "clear" and not yes and not _confirmed(directory):
        _say("nothing was removed")
        return 1
    look = {"inspect": survey.inspect, "verify": survey.verify, "clear": survey.clear}[action]
    with ProgressBar() as bar:
        found = look(directory, lambda done, total: bar(action, done, total))
    if json_file is not None:
        fields = {**asdict(found), "directory": str(found.directory), "num_blocks": found.num_blocks}
        looked = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        json_file.write_text(json.dumps({"action": action, "looked": looked, **fields}, indent=2) + "\n")
    if action == "clear":
        _say(f"removed {_files(found)} from {found.directory}")
        return 0
    return _show(found, verified=action == "verify")


def _confirmed(directory: Path) -> bool:
    """Asks the user. Without a terminal that is impossible, so `--yes` is required."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "cache clear asks before it removes anything: give --yes where there is no terminal"
        )
    with ProgressBar() as bar:
        found = survey.inspect(directory, lambda done, total: bar("inspect", done, total))
    asked = f"Remove {_files(found)} with {found.num_blocks} blocks from {found.directory}? [y/N] "
    print(asked, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say(line: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(line)


def _files(found: Survey) -> str:
    snapshots = (
        (f" and {len(found.snapshots)} snapshot{'' if len(found.snapshots) == 1 else 's'}")
        if found.snapshots
        else ""
    )
    return (
        f"{found.num_segments} file{'' if found.num_segments == 1 else 's'}{snapshots} of "
        f"{_size(found.file_bytes)} in all"
    )


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def _show(found: Survey, verified: bool) -> int:
    print_table(["", "number"], list(_counts(found)), f"penstock cache: {found.directory}", left=1)
    if found.spaces:
        _show_spaces(found.spaces)
    if found.snapshots:
        _show_snapshots(found.snapshots)
    unusable = [f"{one.file}: {one.damage}" for one in found.snapshots if one.damage]
    damage = [*found.damaged, *found.corrupt, *found.torn, *unusable]
    for line in damage[:MOST_LINES]:
        _say(f"damaged: {line}")
    if len(damage) > MOST_LINES:
        _say(f"and {len(damage) - MOST_LINES} more; --json FILE keeps all of them")
    if not verified:
        return 0
    if not damage:
        _say("nothing is damaged")
        return 0
    _say(
        "what is damaged counts as missing and is used again; a crash in the middle of a write leaves such "
        "a block, and so does a bad disk"
    )
    return 1


def _counts(found: Survey) -> Iterator[tuple[str, str]]:
    yield "files", str(found.num_segments)
    yield "on disk", _size(found.file_bytes)
    yield "slots", str(found.num_slots)
    yield "blocks", str(found.num_blocks)
    yield "older copies of them", str(found.num_older)
    yield "snapshots", str(len(found.snapshots))
    yield "damaged files", str(len(found.damaged))
    yield "damaged heads", str(len(found.corrupt))
    if found.num_good is not None:  # payloads were read
        yield "whole blocks", str(found.num_good)
        yield "torn blocks", str(len(found.torn))


def _show_spaces(spaces: dict[str, SpaceSurvey]) -> None:
    """Spaces are models as they are run; their names are not on disk."""
    lines = [
        (
            digest[:NUM_DIGITS],
            str(space.num_blocks),
            _size(space.num_bytes),
            _time(space.oldest),
            _time(space.newest),
        )
        for digest, space in sorted(spaces.items(), key=lambda item: -item[1].num_bytes)
    ]
    print_table(
        ["space", "blocks", "bytes", "oldest, UTC", "newest, UTC"],
        lines,
        "by model, data type and layout",
        left=1,
    )


def _show_snapshots(snapshots: list[SnapshotSurvey]) -> None:
    lines: list[list[str]] = []
    for one in sorted(snapshots, key=lambda one: (bool(one.damage), one.created_s)):
        if one.damage:
            lines.append([one.name or "?", "cannot be used", *["?"] * 5])
            continue
        expires = "never" if one.expires_s is None else _time(int(one.expires_s * 1e9))
        counts = str(one.num_tokens), str(one.num_blocks), str(one.num_found)
        lines.append([one.name, one.space[:NUM_DIGITS], *counts, _time(int(one.created_s * 1e9)), expires])
    print_table(
        ["snapshot", "space", "tokens", "blocks", "of them here", "taken, UTC", "expires, UTC"],
        lines,
        "snapshots",
        left=1,
    )


def _time(nanoseconds: int) -> str:
    """Sequences are times as far as the writer's clock was one."""
    try:
        return datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return "?"
