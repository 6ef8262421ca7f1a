"""The base of every model that is read from a file, sent over HTTP or stored."""

from pydantic import BaseModel, ConfigDict


def to_camel(name: str) -> str:
    """`max_num_seqs` as `maxNumSeqs`, and `e2e_p95` as `e2eP95`, which pydantic's own would write `e2EP95`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


class Model(BaseModel):
    """Immutable, camelCase outside, and strict about names: a misspelt field is refused, never ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )
