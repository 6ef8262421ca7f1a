"""The command line."""

import sys


def main() -> None:
    """Entry point of `tunewright`.

    `load` and `simulate` are forwarded before anything heavy is imported: both are started as child processes, often.
    """
    arguments = sys.argv[1:]
    if arguments[:1] == ["simulate"]:
        from tunewright.simulate.__main__ import main as simulate

        sys.exit(simulate(arguments[1:]))
    if arguments[:1] == ["load"]:
        from tunewright.loadtest.run import main as load

        sys.exit(load(arguments[1:]))
    from tunewright.cli.app import app

    app()
