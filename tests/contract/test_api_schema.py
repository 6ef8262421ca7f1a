"""The OpenAPI document: unchanged unless somebody means it, documented, and true for whatever is sent."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from restapi import API, Rest
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

from tunewright.api.problems import KINDS
from tunewright.api.schema import SNAPSHOT, document, main

DOCS = Path(__file__).parents[2] / "docs" / "rest.md"


def test_the_document_is_the_one_in_the_repository() -> None:
    assert document() == SNAPSHOT.read_text(encoding="utf-8"), "run: python -m tunewright.api.schema"


def test_the_writer_notices_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "openapi.json"
    assert main(["--check", str(path)]) == 1
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("approve", "improve"), encoding="utf-8")
    assert main(["--check", str(path)]) == 1
    assert "python -m tunewright.api.schema" in capsys.readouterr().err


def test_the_page_documents_exactly_the_routes(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (GET|POST) \| `(\S+?)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    routes = {
        (method.upper(), path)
        for path, operations in Rest(tmp_path).app.openapi()["paths"].items()
        for method in operations
    }
    assert len(rows) == len(set(rows))
    told = set(rows) - {("GET", "/docs"), ("GET", "/openapi.json")}
    plain, named = f"{API}/tunings", f"{API}/namespaces/{{namespace}}/tunings"
    assert f"`{named}`" in DOCS.read_text(encoding="utf-8")
    assert told | {(method, path.replace(plain, named)) for method, path in told} == routes


def test_the_page_documents_exactly_the_problems() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `([a-z-]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(int(status), kind) for status, kind in rows] == [(status, kind) for kind, (status, _) in KINDS.items()]


def test_every_operation_names_its_problems(tmp_path: Path) -> None:
    paths = Rest(tmp_path).app.openapi()["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            answers = set(operation["responses"])
            assert "200" in answers or "202" in answers, (method, path)
            if path.startswith("/api/"):
                assert {"401", "403", "421", "503"} <= answers, (method, path)
                assert operation["security"] == [{"token": []}], (method, path)
            if method == "post":
                assert {"409", "413", "415", "422"} <= answers, (method, path)


PATHS = json.loads(SNAPSHOT.read_text(encoding="utf-8"))["paths"]
OPERATIONS = [(method, path) for path, operations in PATHS.items() for method in operations]
WITH_INPUT = [(method, path) for method, path in OPERATIONS if PATHS[path][method].get("parameters")]


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Rest:
    return Rest(tmp_path_factory.mktemp("fuzz"), allowed_hosts=("127.0.0.1", "testserver"))


@pytest.fixture(scope="module")
def schema(rest: Rest) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", rest.app)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_right_requests_are_answered_as_documented(rest: Rest, schema: Any, method: str, path: str) -> None:
    answers = fuzz(rest, schema[path][method], GenerationMode.POSITIVE)
    assert answers <= {200, 202, 404, 409}


@pytest.mark.parametrize(("method", "path"), WITH_INPUT)
def test_wrong_requests_are_turned_away_as_documented(rest: Rest, schema: Any, method: str, path: str) -> None:
    answers = fuzz(rest, schema[path][method], GenerationMode.NEGATIVE)
    assert answers & {404, 405, 413, 415, 422}


def fuzz(rest: Rest, operation: Any, mode: GenerationMode) -> set[int]:
    """Send what the document says (or exactly not), and hold each answer to it with all of schemathesis' checks:
    no 5xx, no undocumented status, type or shape, wrong input refused, nothing without the token. The statuses seen."""
    seen: set[int] = set()

    @settings(
        max_examples=5 if "{namespace}" in operation.path else 20,  # the same handlers
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(headers={"Authorization": f"Bearer {rest.token}"})
        seen.add(answer.status_code)
        # A query parameter of a wrong type may vanish on the wire ({} is sent as nothing): then the request is right.
        vanishing = [negative_data_rejection] if operation.method.upper() == "GET" else []
        case.validate_response(answer, excluded_checks=vanishing)

    send()
    return seen
