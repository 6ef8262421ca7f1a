"""Read a tuning file, and say what is wrong with it in words that name the place and what would be right."""

import difflib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tunewright.domain.tuning import Tuning
from tunewright.ports import Refused

MAX_BYTES = 256 * 1024
"""A larger file is no tuning file; YAML is not read before its size is known."""

_LARGE = 10**60

API_VERSION = "tunewright.dev/v1alpha1"
KIND = "Tuning"

_WANTED = {
    "string_type": "text is wanted",
    "int_type": "a whole number is wanted",
    "int_parsing": "a whole number is wanted",
    "int_from_float": "a whole number is wanted",
    "float_type": "a number is wanted",
    "float_parsing": "a number is wanted",
    "finite_number": "a finite number is wanted",
    "bool_type": "true or false is wanted",
    "bool_parsing": "true or false is wanted",
    "tuple_type": "a list is wanted",
    "list_type": "a list is wanted",
    "dict_type": "a mapping is wanted",
    "mapping_type": "a mapping is wanted",
    "model_type": "a mapping of fields is wanted",
    "model_attributes_type": "a mapping of fields is wanted",
}


def read_tuning(text: str, where: str) -> Tuning:
    """The tuning in `text`; `where` names the file in messages.

    Raises `Refused` with one line for each thing that is wrong, each naming its path in the file (or line and column).
    """
    document = _read_yaml(text, where)
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(field) != wanted:
            given = f"not {_short(document[field])}" if field in document else "which is missing"
            raise Refused(f"{where}: {field}: `{wanted}` is wanted, {given}")
    try:
        return Tuning.model_validate(document)
    except ValidationError as error:
        raise Refused("\n".join(f"{where}: {line}" for line in explain_validation(error))) from error


def explain_validation(error: ValidationError, *, model: type[BaseModel] = Tuning) -> list[str]:
    """One line for each fault: its path in the file, what is wrong, and what would be right."""
    return [_explain(dict(detail), model) for detail in error.errors(include_url=False)]


def _explain(detail: dict[str, Any], model: type[BaseModel]) -> str:
    loc: tuple[str | int, ...] = detail["loc"]
    path, given = _path(loc), detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_field(loc, model)
        case "missing":
            field = _fields(_model_at(model, loc[:-1])).get(str(loc[-1]))
            meaning = (field and field[1]) or ""
            return f"{path}: is missing{f': {meaning}' if meaning else ''}"
        case "literal_error" | "enum":
            choices = [choice.strip("'") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
            near = _near(str(given), choices)
            return f"{path}: {_short(given)} is not one of {', '.join(choices)}{_did_you_mean(near)}"
        case "string_pattern_mismatch":
            field = _fields(_model_at(model, loc[:-1])).get(str(loc[-1]))
            meaning = (field and field[1]) or f"it must match {detail['ctx']['pattern']}"
            return f"{path}: {_short(given)} is not valid: {meaning}"
        case "string_type" if isinstance(given, bool | int | float):
            text = str(given).lower() if isinstance(given, bool) else str(given)
            return f'{path}: text is wanted, not {_short(given)}; write it in quotes: "{text}"'
        case kind if kind in _WANTED:
            return f"{path}: {_WANTED[kind]}, not {_short(given)}"
        case "value_error" | "assertion_error":
            return f"{path}: {detail['ctx']['error']}"
        case _:
            message = detail["msg"].removeprefix("Input should be ")
            return (
                f"{path}: must be {message}, not {_short(given)}" if message != detail["msg"] else f"{path}: {message}"
            )


def _unknown_field(loc: tuple[str | int, ...], model: type[BaseModel]) -> str:
    name, inside = str(loc[-1]), _path(loc[:-1])
    here = list(_fields(_model_at(model, loc[:-1])))
    near = _near(name, here)
    elsewhere = [".".join(path) for path in _all_paths(model) if path[-1] == name]
    if near:
        hint = _did_you_mean(near)
    elif elsewhere:
        hint = f"; did you mean {' or '.join(f'`{path}`' for path in elsewhere[:3])}?"
    else:
        hint = f"; known here: {', '.join(here)}"
    return f"{inside}: unknown field `{name}`{hint}"


def _near(name: str, choices: list[str]) -> str | None:
    lower = {choice.lower(): choice for choice in choices}
    flat = name.replace("_", "").replace("-", "").lower()
    found = difflib.get_close_matches(flat, list(lower), n=1, cutoff=0.7)
    return lower[found[0]] if found else None


def _did_you_mean(near: str | None) -> str:
    return f"; did you mean `{near}`?" if near else ""


def _short(value: object) -> str:
    """What was given, short enough for one line of a terminal."""
    match value:
        case None:
            return "nothing"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case bool():
            return str(value).lower()
        case str():
            text = value if len(value) <= 60 else f"{value[:57]}..."
            return f"`{text.encode('unicode_escape').decode()}`"
        case int() if abs(value) >= _LARGE:  # Python refuses to write those of more than 4300 digits
            return "a very large number"
        case _:
            return f"`{str(value)[:60]}`"


def _path(loc: tuple[str | int, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"


def _fields(model: type[BaseModel] | None) -> dict[str, tuple[type[BaseModel] | None, str]]:
    """By the name that a file uses: the model of a block (None for a plain field), and the description."""
    if model is None:
        return {}
    found = {}
    for name, info in model.model_fields.items():
        kinds = [info.annotation, *get_args(info.annotation)]
        block = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        described = info.description or (block.__doc__ if block else "") or ""
        found[info.alias or name] = (block, " ".join(described.split()))
    return found


def _model_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in (part for part in loc if isinstance(part, str)):  # one of a list is as the field says
        found = _fields(found).get(str(part), (None, ""))[0]
    return found


def _all_paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, (block, _) in _fields(model).items():
        yield (*above, name)
        if block is not None:
            yield from _all_paths(block, (*above, name))


class _Loader(yaml.SafeLoader):
    """YAML's plain types; refuses what would be lost (a key given twice) and what can explode (aliases)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*name) can't be used here: write it out", mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"a field's name must be text, not {_short(key)}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                problem = f"`{key}` is given twice in this block"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, where: str) -> dict[str, Any]:
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise Refused(f"{where}: is larger than {MAX_BYTES // 1024} KiB: that is no tuning file")
    try:
        documents = list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise Refused(f"{where}:{at} {error.problem or error.context or 'this is not YAML'}") from error
    except yaml.YAMLError as error:
        raise Refused(f"{where}: this is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise Refused(f"{where}: blocks are nested too deeply for a tuning file") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # A date or a number that looks right and is not, as 2024-13-45; PyYAML's tags raise what they meet.
        told = str(error) if isinstance(error, ValueError) else "it does not fit its tag (!!…): leave the tag out"
        raise Refused(f"{where}: a value can't be read: {told}") from error
    documents = [document for document in documents if document is not None]
    if len(documents) > 1:
        raise Refused(f"{where}: holds {len(documents)} documents; put each tuning in a file of its own")
    if not documents:
        raise Refused(f"{where}: is empty; a tuning file starts with `apiVersion: {API_VERSION}`")
    if not isinstance(documents[0], dict):
        raise Refused(f"{where}: a mapping is wanted, which starts with `apiVersion: {API_VERSION}`")
    return documents[0]
