"""All commands in one place."""

import typer

from tunewright.cli import decide, explain, read, recommend, serve, show, tune

EPILOG = (
    "Exit codes: 0 done, promoted or recommended; 2 the command line or a file is wrong; 3 ended without a change; "
    "4 failed or rolled back; 5 the decision can't be taken now; 6 something did not answer; 130 stopped by Ctrl-C."
)

app = typer.Typer(
    name="tunewright",
    help="Finds the vLLM configuration that serves your traffic best, proves it on a spare, and rolls it out safely.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command()(tune.tune)
app.command()(tune.demo)
app.command()(serve.serve)
app.command()(tune.check)
app.command()(tune.stop)
app.command()(read.profile)
app.command()(show.show)
app.command()(show.trials)
app.command()(read.report)
app.command()(recommend.recommend)
app.command()(read.export)
app.command("explain-failure")(explain.explain_failure)
app.command()(decide.approve)
app.command()(decide.reject)
app.command()(decide.suspend)
app.command()(decide.resume)
app.command()(decide.abort)
app.command()(decide.rollback)
app.command()(decide.propose)


@app.command(context_settings=_FORWARDED)
def load(context: typer.Context) -> None:
    """Run one load test against any OpenAI-compatible URL (see `tunewright load --help`)."""
    raise AssertionError(f"`load` is forwarded before the commands are read: {context.args}")


@app.command(context_settings=_FORWARDED)
def simulate(context: typer.Context) -> None:
    """Run a simulated vLLM that needs no GPU (see `tunewright simulate serve --help`)."""
    raise AssertionError(f"`simulate` is forwarded before the commands are read: {context.args}")


@app.command()
def version() -> None:
    """Print the version."""
    from tunewright import __version__

    print(f"tunewright {__version__}")
