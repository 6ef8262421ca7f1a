"""The command line."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Entry point of `tunewright`.

    `load` and `simulate` are forwarded before anything heavy is imported: both are started as child processes, often.
    """
    # Programs of our own virtual environment are found though it is not activated; those on the PATH come first.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    arguments = sys.argv[1:]
    if arguments[:1] == ["simulate"]:
        from tunewright.simulate.__main__ import main as simulate

        sys.exit(simulate(arguments[1:]))
    if arguments[:1] == ["load"]:
        from tunewright.loadtest.run import main as load

        sys.exit(load(arguments[1:]))
    from tunewright.cli.app import app

    app()
