"""`penstock cache`: inspects, verifies and clears the directory of a disk tier. Owns the questions and the
output; `penstock.kv` reads the files."""

from __future__ import annotations

import datetime
import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from penstock.bench.report import print_table
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.kv.tiers.ssd import survey
from penstock.kv.tiers.ssd.survey import Survey
from penstock.progress import ProgressBar, plain_console

MOST_LINES = 20  # of damage shown; the JSON file has all of it
NUM_DIGITS = 12  # of a space's digest: enough to tell a few apart
_LOOK = {"inspect": survey.inspect, "verify": survey.verify, "clear": survey.clear}


def run(args: Namespace, config: Config) -> int:
    """With `--yes` it clears without asking. 1 where something is damaged that was looked at byte by byte, or
    where nothing was done."""
    say, action, directory = plain_console().print, args.action, Path(args.kv_offload_ssd_dir)
    if action == "clear" and not args.yes and not _confirmed(directory):
        say("nothing was removed")
        return 1
    found = _looked(action, directory)
    if args.json is not None:
        fields = {**asdict(found), "directory": str(found.directory), "num_blocks": found.num_blocks}
        looked = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        args.json.write_text(json.dumps({"action": action, "looked": looked, **fields}, indent=2) + "\n")
    if action == "clear":
        say(f"removed {_files(found)} from {found.directory}")
        return 0
    return _show(found, verified=action == "verify")


def _looked(action: str, directory: Path) -> Survey:
    with ProgressBar() as bar:
        return _LOOK[action](directory, lambda done, total: bar(action, done, total))


def _confirmed(directory: Path) -> bool:
    """Asks the user. Without a terminal that is impossible, so `--yes` is required."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "cache clear asks before it removes anything: give --yes where there is no terminal"
        )
    found = _looked("inspect", directory)
    asked = f"Remove {_files(found)} with {found.num_blocks} blocks from {found.directory}? [y/N] "
    print(asked, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _files(found: Survey) -> str:
    counts = (found.num_segments, "file"), (len(found.snapshots) or None, "snapshot")
    named = (f"{num} {what}{'' if num == 1 else 's'}" for num, what in counts if num is not None)
    return f"{' and '.join(named)} of {_size(found.file_bytes)} in all"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def _show(found: Survey, verified: bool) -> int:
    print_table(["", "number"], _counts(found), f"penstock cache: {found.directory}", left=1)
    if found.spaces:
        _show_spaces(found)
    if found.snapshots:
        _show_snapshots(found)
    unusable = [f"{one.file}: {one.damage}" for one in found.snapshots if one.damage]
    damage = [*found.damaged, *found.corrupt, *found.torn, *unusable]
    say = plain_console().print
    for line in damage[:MOST_LINES]:
        say(f"damaged: {line}")
    if len(damage) > MOST_LINES:
        say(f"and {len(damage) - MOST_LINES} more; --json FILE keeps all of them")
    if verified:
        say(
            "what is damaged counts as missing and is used again; a crash in the middle of a write leaves "
            "such a block, and so does a bad disk"
            if damage
            else "nothing is damaged"
        )
    return int(verified and bool(damage))


def _counts(found: Survey) -> list[tuple[str, str]]:
    counts = {
        "files": found.num_segments,
        "on disk": _size(found.file_bytes),
        "slots": found.num_slots,
        "blocks": found.num_blocks,
        "older copies of them": found.num_older,
        "snapshots": len(found.snapshots),
        "damaged files": len(found.damaged),
        "damaged heads": len(found.corrupt),
    }
    if found.num_good is not None:  # payloads were read
        counts |= {"whole blocks": found.num_good, "torn blocks": len(found.torn)}
    return [(name, str(value)) for name, value in counts.items()]


def _show_spaces(found: Survey) -> None:
    """Spaces are models as they are run; their names are not on disk."""
    lines = []
    for digest, space in sorted(found.spaces.items(), key=lambda item: -item[1].num_bytes):
        times = _time(space.oldest), _time(space.newest)
        lines.append((digest[:NUM_DIGITS], str(space.num_blocks), _size(space.num_bytes), *times))
    titles = ["space", "blocks", "bytes", "oldest, UTC", "newest, UTC"]
    print_table(titles, lines, "by model, data type and layout", left=1)


def _show_snapshots(found: Survey) -> None:
    lines: list[list[str]] = []
    for one in sorted(found.snapshots, key=lambda one: (bool(one.damage), one.created_s)):
        if one.damage:
            lines.append([one.name or "?", "cannot be used", *["?"] * 5])
            continue
        counts = map(str, (one.num_tokens, one.num_blocks, one.num_found))
        expires = "never" if one.expires_s is None else _time(one.expires_s * 1e9)
        lines.append([one.name, one.space[:NUM_DIGITS], *counts, _time(one.created_s * 1e9), expires])
    titles = ["snapshot", "space", "tokens", "blocks", "of them here", "taken, UTC", "expires, UTC"]
    print_table(titles, lines, "snapshots", left=1)


def _time(nanoseconds: float) -> str:
    """Sequences are times as far as the writer's clock was one."""
    try:
        return datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return "?"
