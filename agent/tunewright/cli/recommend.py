"""`recommend`: the winner as files for the tool that owns production."""

from pathlib import Path
from typing import Annotated

import typer

from tunewright.cli.common import JsonOption, NameArgument, StateOption, fail, opened_at, told
from tunewright.exits import Exit
from tunewright.rollout.recommend import Form, recommendation


def recommend(
    name: NameArgument,
    state: StateOption,
    form: Annotated[Form, typer.Option("--as", help="What the files are for.")] = Form.ARGS,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write the files into; printed when left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what to change so that production runs the winner: for kustomize, as Helm values, or as plain arguments.

    Examples:

        tunewright recommend chat --as kustomize

        tunewright recommend chat --as helm --output patches/
    """
    with told(), opened_at(state, name) as (_, record):
        found = recommendation(record, form)
    if as_json:
        print(found.model_dump_json(indent=2, by_alias=True))
        return
    print(f"# {name}: {found.candidate} instead of {found.baseline}")
    for change in found.changes:
        print(f"#   {change}")
    for file in found.files:
        if output is None:
            print(f"\n# {file.name}: {file.where}\n{file.text}", end="")
            continue
        path = output / file.name
        try:
            output.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as written:
                written.write(file.text)
        except OSError as error:
            fail(f"{path}: {error.strerror}", Exit.USAGE)
        print(f"Written: {path} ({file.where})")
