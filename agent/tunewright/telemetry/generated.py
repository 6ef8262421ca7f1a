"""Generated files, held against what generates them: written, or compared in CI."""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

FIRST_LINES = 60
"""Lines of a difference that are printed per file: enough to see which line of the generator it is."""


def sync(files: Mapping[Path, str], *, check: bool, command: str) -> int:
    """Write the files that differ, or (`check`) only say how they do; the exit status.

    `command` is what writes them, for who reads that they differ.
    """
    drifted = False
    for path, text in files.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        drifted = True
        if check:
            lines = difflib.unified_diff(old.splitlines(), text.splitlines(), str(path), "generated", lineterm="")
            print("\n".join(list(lines)[:FIRST_LINES]), file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    if check and drifted:
        print(f"run: {command}", file=sys.stderr)
        return 1
    return 0


def main_of(
    module: str, description: str | None, files: Callable[[Path], Mapping[Path, str]], arguments: list[str] | None
) -> int:
    """The command line of a generator, run from the root of the repository (or with its path): the exit status."""
    command = f"python -m {module}"
    parser = argparse.ArgumentParser(prog=command, description=description)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if something differs")
    parser.add_argument("root", nargs="?", default=".", type=Path, help="root of the repository (default: here)")
    options = parser.parse_args(arguments)
    if not (options.root / "docs").is_dir():
        print(f"{options.root / 'docs'} is missing: run this from the root of the repository", file=sys.stderr)
        return 2
    return sync(files(options.root), check=options.check, command=command)
