"""`python -m tunewright.platform.kubernetes.deliver FILE`: one load test in a pod of its own.

Its result goes into the pod's log, as one marked block with length and digest: a log outlives the process, has no
limit of 4 KiB as a termination message has, and needs no rights of the pod.
"""

import base64
import gzip
import hashlib
import io
import re
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from tunewright.loadtest.job import LoadJob, LoadResult, Progress
from tunewright.loadtest.run import FAILED, OK, USAGE, execute

_BEGIN, _END, _PROGRESS = "tunewright-result begin", "tunewright-result end", "tunewright-progress "
_LINE = 4000
"""Characters a line: container runtimes split lines of 16 KiB."""
_PROGRESS_SECONDS = 2.0
_BLOCK = re.compile(rf"^{_BEGIN} (\d+) ([0-9a-f]{{64}})\n(.*?)^{_END}$", re.MULTILINE | re.DOTALL)
_MOST = 64 * 2**20


def pack(result: LoadResult) -> str:
    """The block that carries a result."""
    raw = gzip.compress(result.model_dump_json().encode(), mtime=0)
    text = base64.b64encode(raw).decode()
    lines = [text[at : at + _LINE] for at in range(0, len(text), _LINE)]
    return "\n".join([f"{_BEGIN} {len(raw)} {hashlib.sha256(raw).hexdigest()}", *lines, _END])


def unpack(log: str) -> LoadResult:
    """The result in a log. Raises `ValueError` saying why there is none that can be trusted."""
    found = _BLOCK.search(log)
    if found is None:
        raise ValueError("its log is cut off in the result" if _BEGIN in log else "its log holds no result")
    try:
        raw = base64.b64decode("".join(found[3].split()), validate=True)
    except ValueError as error:
        raise ValueError(f"the result in its log is damaged: {error}") from error
    if len(raw) != int(found[1]) or hashlib.sha256(raw).hexdigest() != found[2]:
        raise ValueError(f"the result in its log is damaged: {len(raw)} of {found[1]} bytes, or another digest")
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        document = file.read(_MOST)
    try:
        return LoadResult.model_validate_json(document)
    except ValidationError as error:
        raise ValueError(f"the result can't be read: {error.errors()[0]['msg']}: {document[:500]!r}") from error


def last_progress(log: str) -> Progress | None:
    """The last progress told in a log."""
    for line in reversed(log.splitlines()):
        if line.startswith(_PROGRESS):
            try:
                return Progress.model_validate_json(line.removeprefix(_PROGRESS))
            except ValidationError:
                continue
    return None


def main(arguments: list[str]) -> int:
    """Exit status: 0 measured, 1 no result, 2 no load test in FILE."""
    if len(arguments) != 1:
        print("give one FILE with a load test as JSON", file=sys.stderr)
        return USAGE
    try:
        job = LoadJob.model_validate_json(Path(arguments[0]).read_bytes())
    except (OSError, ValidationError) as error:
        print(f"{arguments[0]} is no load test: {error}", file=sys.stderr)
        return USAGE
    told = 0.0

    def tell(news: Progress) -> None:
        nonlocal told
        if time.monotonic() - told >= _PROGRESS_SECONDS:
            told = time.monotonic()
            print(_PROGRESS + news.model_dump_json(), flush=True)

    result = execute(job, tell)
    print(pack(result), flush=True)
    return OK if result.failure is None else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
