"""A vLLM that needs no GPU: same command line, HTTP interface and metrics; a model of time and memory."""


def main(argv: list[str]) -> int:
    """`tunewright simulate ARGV`; returns the exit code. Imports as late and as little as possible."""
    from .__main__ import main as run

    return run(argv)
