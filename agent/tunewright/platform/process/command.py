"""The command of a server: its knobs taken out, any candidate put in, and its place filled in."""

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunewright.bounded import read_key
from tunewright.domain.candidate import Candidate, KnobValue, content_hash
from tunewright.domain.recipe import Recipe
from tunewright.domain.redact import HIDDEN, redact
from tunewright.knobs import commandline
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.ports import PortError, Refused

PORT, REPLICA = "{port}", "{replica}"
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
_NOT_SERVED = {
    "--uds": "a Unix socket can't be reached by the proxy and the load test",
    "--ssl-keyfile": "servers behind the proxy speak plain HTTP; put TLS before the proxy",
    "--ssl-certfile": "servers behind the proxy speak plain HTTP; put TLS before the proxy",
}


class Command:
    """A command with `{port}` in it, and optionally `{replica}` (0, 1, …; the canary and the spare: one past the last).

    Raises `Refused` for a command that can't be run or tuned.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], api_key_file: str | None = None) -> None:
        if not any(PORT in word for word in words):
            raise Refused(f"the command {shlex.join(words)} must contain {PORT}, as in: --port {PORT}")
        for flag, reason in _NOT_SERVED.items():
            if _option(words, flag) is not None:
                raise Refused(f"{flag} in the command: {reason}")
        self._words = tuple(words)
        self._environment = dict(environment)
        self._api_key_file = api_key_file
        self._split = commandline.split(words, environment)

    @property
    def baseline(self) -> Candidate:
        """The knobs that the command itself sets."""
        return self._split.candidate

    @property
    def base(self) -> str:
        """Names all that is not a knob: equal hash, same server but for its knobs."""
        split = self._split
        return content_hash(
            [list(split.rest), dict(split.rest_environment), {k: dict(v) for k, v in split.templates.items()}]
        )

    @property
    def host(self) -> str:
        """Address that the server is reached at."""
        host = _option(self._words, "--host") or "127.0.0.1"
        return "127.0.0.1" if host in ("0.0.0.0", "::", "localhost", "") else host

    def with_candidate(self, candidate: Candidate) -> tuple[list[str], dict[str, str]]:
        """Command line and environment, with the places left open. Raises `Refused`."""
        return commandline.join(self._split, candidate)

    def filled(self, candidate: Candidate, port: int, replica: int) -> tuple[list[str], dict[str, str]]:
        """Command line and environment, as they are run. Raises `Refused`."""
        argv, environment = self.with_candidate(candidate)
        return (
            [_fill(word, port, replica) for word in argv],
            {name: _fill(text, port, replica) for name, text in environment.items()},
        )

    def headers(self) -> dict[str, str]:
        """What a request to the server needs: its API key, from the file, the command or the environment."""
        key = self._api_key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def problems(self, candidate: Candidate) -> list[str]:
        """Why this candidate can't be run by this command on this machine; empty when nothing is known against it."""
        try:
            argv, environment = self.filled(candidate, port=0, replica=0)
        except Refused as refused:
            return [str(refused)]
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            return [f"{argv[0]} is not found or not executable; correct the command, or the PATH of the agent"]
        return []

    def show(self, candidate: Candidate) -> str:
        """The command for a person to run, with what is secret left out."""
        argv, environment = self.with_candidate(candidate)
        pairs = [
            f"{name}={HIDDEN if _SECRET.search(name) else shlex.quote(text)}" for name, text in environment.items()
        ]
        return self.redact(" ".join([*pairs, *map(shlex.quote, argv)]))

    def recipe(self, candidate: Candidate) -> Recipe:
        """The words that run `candidate`, without credentials, and the knobs in the environment."""
        argv, environment = self.with_candidate(candidate)
        knobs = {knob.environment for knob in CATALOGUE.values() if knob.environment}
        return Recipe(
            args=tuple(self.redact(word) for word in argv),
            environment={name: text for name, text in environment.items() if name in knobs},
        )

    def change(self, baseline: Candidate, candidate: Candidate) -> str:
        """What a person would change by hand: the knobs that differ, and the whole command."""
        differences = baseline.differences(candidate).items()
        changes = [f"  {knob}: {_value(old)} → {_value(new)}" for knob, (old, new) in differences]
        return "\n".join(["Change:", *(changes or ["  nothing"]), "Command:", f"  {self.show(candidate)}"])

    def redact(self, text: str) -> str:
        """`text` without credentials: vLLM writes its API key into its log."""
        try:
            key = self._api_key()
        except PortError:
            key = None
        return redact(text.replace(key, HIDDEN) if key else text)

    def _api_key(self) -> str | None:
        if self._api_key_file:
            try:
                return read_key(Path(self._api_key_file))
            except OSError as error:
                raise PortError(f"can't read apiKeyFile {self._api_key_file}: {error.strerror or error}") from error
        return _option(self._words, "--api-key") or self._environment.get("VLLM_API_KEY")


def _option(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag that stands in the words; the last one counts."""
    found = None
    for index, word in enumerate(words):
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") == flag:
            found = attached if equals else (words[index + 1] if index + 1 < len(words) else "")
    return found


def _fill(text: str, port: int, replica: int) -> str:
    return text.replace(PORT, str(port)).replace(REPLICA, str(replica))


def _value(value: KnobValue | None) -> str:
    if value is None:
        return "default"
    return str(value).lower() if isinstance(value, bool) else str(value)
