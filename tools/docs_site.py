"""Lays the repository out for mkdocs, as a hook of it: pages under their own paths, so that a link that works
in the repository works on the site, and the generated reference. Owns which files the site has; mkdocs.yml
owns the order.

`python tools/docs_site.py` prints them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL)
REFERENCE = {
    "cli": "Flags of every command",
    "config": "Configuration file",
    "http": "Routes and fields",
    "metrics": "Metrics",
}


# -------------------------------------------------------------------------------------------- what there is


def pages() -> list[str]:
    """Every page that somebody wrote."""
    patterns = ("*.md", "docs/**/*.md", "stores/*/README.md", "heads/*.md")
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def targets(page: str) -> Iterator[tuple[str, str]]:
    """Path from the root, and heading, of each link to a file that is not in code."""
    for found in LINK.finditer(CODE.sub("", (ROOT / page).read_text())):
        if not re.match(r"[a-z]+:", found[2]):
            yield _resolved(page, found[2]), found[3].strip("#)")


def _resolved(page: str, link: str) -> str:
    return (ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT).as_posix()


def linked() -> Iterator[str]:
    """Files that are no pages, and folders."""
    for page in pages():
        yield from (path for path, _ in targets(page) if not path.endswith(".md"))


def folders() -> set[str]:
    return {path for path in linked() if (ROOT / path).is_dir()}


def listing(folder: str) -> list[str]:
    """What a link to the folder leads to: its pages, those of its folders, or else its files."""
    below = ROOT / folder
    found = sorted([*below.glob("*.md"), *below.glob("*/README.md")])
    found = found or sorted(path for path in below.iterdir() if path.is_file())
    return [path.relative_to(below).as_posix() for path in found]


def title(page: Path) -> str:
    heading = re.search(r"^# (.+)$", page.read_text(), flags=re.MULTILINE) if page.suffix == ".md" else None
    return page.name if heading is None else heading[1]


def nav_of(folder: str) -> list[dict[str, str]]:
    return [{title(ROOT / folder / name): f"{folder}/{name}"} for name in listing(folder)]


def reference() -> dict[str, str]:
    """Its pages, made anew. Without the program that makes them there are none."""
    program = ROOT / "tools" / "reference.py"
    if not program.exists():
        return {}
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, program, made], cwd=ROOT, check=True)
        return {name: (Path(made) / f"{name}.md").read_text() for name in REFERENCE}


# --------------------------------------------------------------------------------------- what mkdocs calls


def on_config(config: Any) -> Any:
    """A folder in the navigation stands for its pages."""
    for group in config.nav:
        for entries in group.values():
            for entry in entries if isinstance(entries, list) else ():
                for name, path in entry.items():
                    if (ROOT / path).is_dir():
                        entry[name] = [{name: f"{path}/index.md"}, *nav_of(path)]
            if entries and entries[0] == {"Reference": "docs/reference.md"}:
                entries += [{said: f"docs/reference/{name}.md"} for name, said in REFERENCE.items()]
    config.watch += [str(ROOT / name) for name in ("docs", *{page for page in pages() if "/" not in page})]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    inside = {f"{folder}/{name}" for folder in folders() for name in listing(folder)}
    pictures = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "pictures").iterdir()}
    for path in sorted({*pages(), *linked(), *inside, *pictures}):
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for folder in sorted(folders()):
        lines = [f"- [{title(ROOT / folder / name)}]({name})" for name in listing(folder)]
        listed = File.generated(config, f"{folder}/index.md", content="\n".join([f"# {folder}", "", *lines]))
        listed.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(listed)
    for name, text in reference().items():
        files.append(File.generated(config, f"docs/reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a folder leads to its list, and the generated pages have links here."""
    here = page.file.src_uri
    if "/decisions/" in here:
        page.meta["search"] = {"boost": 0.3}  # what to do is found before why it is so

    def leads(found: re.Match[str]) -> str:
        link = found[2]
        if re.match(r"[a-z]+:", link) or not (ROOT / here).parent.joinpath(link).is_dir():
            return found[0]
        return f"{found[1]}{link.rstrip('/')}/index.md{found[3]}"

    if here == "docs/reference.md":
        markdown = re.sub(r"`(\w+)\.md`", r"[\1](reference/\1.md)", markdown)
    return LINK.sub(leads, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """In tables a bar in code is written `\\|`."""
    return re.sub(r"<code>[^<]*</code>", lambda found: found[0].replace("\\|", "|"), html)


if __name__ == "__main__":
    print("\n".join(pages()))
