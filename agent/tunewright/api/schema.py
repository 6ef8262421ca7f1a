"""Writes the OpenAPI document for the repository, where a test and reviewers see every change of it.

python -m tunewright.api.schema [--check] [FILE]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunewright.api.app import create_app
from tunewright.api.auth import OwnerMayAll, TokenFile

SNAPSHOT = Path(__file__).parents[3] / "tests" / "fixtures" / "openapi.json"


def document() -> str:
    """The OpenAPI document as text, the same each time."""
    unused: Any = None  # the document depends on no record and no clock, and making it asks for none
    app = create_app(
        unused,
        unused,
        authenticator=TokenFile(Path("token")),
        authorizer=OwnerMayAll(),
        allowed_hosts=(),
        ready=lambda: None,
    )
    return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the file, or with `--check` tell whether it is up to date; the exit status."""
    check = "--check" in arguments
    named = [word for word in arguments if word != "--check"]
    path = Path(named[0]) if named else SNAPSHOT
    if not check:
        path.write_text(document(), encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == document():
        return 0
    print(f"{path} is not up to date: run python -m tunewright.api.schema", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
