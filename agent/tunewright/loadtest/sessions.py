"""Agent sessions: conversations whose context grows by what was answered, with a pause for a tool between turns."""

import asyncio
import re
import time

import numpy as np

from tunewright.domain.traffic import Sessions
from tunewright.loadtest.client import Client
from tunewright.loadtest.counters import Observer
from tunewright.loadtest.job import LoadFailure, LoadJob
from tunewright.loadtest.measure import usage
from tunewright.loadtest.prompts import WORDS, Planned, chat_request
from tunewright.loadtest.recording import NANO, Record, Recorder

_CONTENT = re.compile(rb'"content": *"((?:[^"\\]|\\.)*)"')
_BACK_OFF = 0.5  # seconds after a failure, so that a broken server is not hammered
_FEW, _MANY = 50, 550  # words of the two prompts that tell how many tokens a word has
_MARGIN = 0.02  # of a context: the server's count of an answer sent back is not the count of its making


def tokens_per_word(observer: Observer, model: str) -> float:
    """Tokens that the server's tokenizer makes of one of our words, by its own usage. Raises `LoadFailure`."""
    rng = np.random.default_rng(0)
    few, many = (
        observer.chat_prompt_tokens(model, " ".join(rng.choice(np.array(WORDS), count))) for count in (_FEW, _MANY)
    )
    if many <= few:
        raise LoadFailure(
            f"the server counts {few} and {many} prompt tokens for {_FEW} and {_MANY} words: its usage is not to be "
            "relied on"
        )
    return (many - few) / (_MANY - _FEW)


class Conversation:
    """One session: its messages so far, as JSON, and how far it is."""

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.messages: list[bytes] = []
        self.context = 0
        """Tokens: by the server's usage once it has answered, by our own count before."""


class SessionSource:
    """Makes conversations. Lengths follow the job's seed, contents are new in each run."""

    def __init__(
        self, job: LoadJob, model: str, content_seed: int, limit: int | None, token_share: float = 1.0
    ) -> None:
        """`limit` is the server's longest context in tokens; `token_share` the tokens of a word."""
        if job.workload.sessions is None:
            raise AssertionError("a workload of sessions is wanted")
        self.shape: Sessions = job.workload.sessions
        if limit is not None and self.shape.longest > limit:
            raise LoadFailure(
                f"a session may come to {self.shape.longest} tokens, which do not fit the server's max_model_len of "
                f"{limit}: fewer turns, shorter ones, or a greater --max-model-len"
            )
        self._model, self._limit, self._token_share = model, limit, token_share
        self._temperature = job.workload.temperature
        self._lengths = np.random.default_rng([job.seed, 6])
        self._contents = np.random.default_rng([content_seed, 3])
        self._words = np.array(WORDS, dtype=object)
        self._shared = self._text(self.shape.shared_prompt)
        self._number = 0
        self.cut_short = 0
        """Conversations that were ended because the next turn might not have fitted."""

    def begin(self, turn: int = 0) -> Conversation:
        """A new conversation; one that is already `turn` turns old has their messages, made up."""
        made = Conversation(turn)
        own = self._draw(self.shape.first_prompt) - self.shape.shared_prompt
        self._say(made, "user", f"{self._shared} {self._text(max(1, own))}".strip())
        made.context = self.shape.shared_prompt + max(1, own)
        for _ in range(turn):
            answered = self._draw(self.shape.output)
            self._say(made, "assistant", self._text(answered))
            made.context += answered
            self._add_turn(made)
        return made

    def request(self, conversation: Conversation) -> Planned:
        """The next turn's request."""
        output = self._draw(self.shape.output)
        body = chat_request(self._model, conversation.messages, output, self._temperature)
        self._number += 1
        return Planned(self._number - 1, conversation.context, output, body, whole=True)

    def go_on(self, conversation: Conversation, record: Record) -> bool:
        """Take the answer in and add the next turn; False when the conversation is over."""
        body, record.body = record.body, b""
        conversation.messages.append(b'{"role":"assistant","content":"%b"}' % answer_text(body))
        prompt, output = usage(record.ending)
        conversation.context = (prompt or record.prompt_tokens) + (output or record.output_tokens)
        conversation.turn += 1
        if conversation.turn >= self.shape.turns:
            return False
        self._add_turn(conversation)
        longest_answer = (1 + self.shape.spread) * self.shape.output
        if self._limit is not None and conversation.context * (1 + _MARGIN) + longest_answer > self._limit:
            self.cut_short += 1
            return False
        return True

    def pause(self) -> float:
        """Seconds until the tool of a turn has ended."""
        return float(self._lengths.uniform(1 - self.shape.spread, 1 + self.shape.spread)) * self.shape.pause

    def some_turn(self) -> int:
        """How far a conversation is at any moment."""
        return int(self._lengths.integers(self.shape.turns))

    def _add_turn(self, conversation: Conversation) -> None:
        added = self._draw(self.shape.per_turn)
        self._say(conversation, "user", self._text(added))
        conversation.context += added

    def _draw(self, mean: int) -> int:
        spread = self.shape.spread
        return max(1, round(mean * float(self._lengths.uniform(1 - spread, 1 + spread))))

    def _text(self, tokens: int) -> str:
        """Common words that come to about so many tokens of the server's."""
        count = round(tokens / self._token_share)
        return " ".join(self._words[self._contents.integers(0, len(self._words), count)])

    @staticmethod
    def _say(conversation: Conversation, role: str, text: str) -> None:
        conversation.messages.append(f'{{"role":"{role}","content":"{text}"}}'.encode())


def answer_text(body: bytes) -> bytes:
    """The text of a streamed answer, escaped as JSON, from the raw bytes of its chunks."""
    events, rest = bytearray(), body.removeprefix(b"\r\n")
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        try:
            length = int(size.partition(b";")[0], 16)
        except ValueError:  # not chunked: the events themselves
            events += size + b"\r\n" + rest
            break
        events += rest[:length]
        rest = rest[length + 2 :]
    return b"".join(_CONTENT.findall(bytes(events)))


class SessionLoop:
    """Keeps conversations running; each is somewhere in its turns when the load begins, as after a long time."""

    built_late = 0  # a turn is built in the pause before it

    def __init__(self, client: Client, recorder: Recorder, source: SessionSource) -> None:
        self._client, self._recorder, self._source = client, recorder, source
        self._running: dict[Record, Conversation] = {}
        self._stopped = False
        self._first: list[tuple[Conversation, Planned]] = []

    def prepare(self) -> None:
        begun = [self._source.begin(self._source.some_turn()) for _ in range(self._source.shape.concurrency)]
        self._first = [(conversation, self._source.request(conversation)) for conversation in begun]

    def start(self) -> None:
        for conversation, planned in self._first:
            self._send(conversation, planned, time.time_ns(), ramp=True)
        self._first.clear()

    def window(self) -> None:
        pass

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._stopped = True

    def ended(self, record: Record) -> None:
        conversation = self._running.pop(record)
        if not self._stopped:
            asyncio.get_running_loop().call_soon(self._next, conversation, record)

    def _next(self, conversation: Conversation, record: Record) -> None:
        pause = 0.0
        if record.error is not None:
            conversation, pause = self._source.begin(), _BACK_OFF
        elif self._source.go_on(conversation, record):
            pause = self._source.pause()
        else:
            conversation = self._source.begin()
        planned = self._source.request(conversation)
        due = record.finished_ns + round(pause * NANO)
        if record.error is None and pause:
            self._recorder.pauses.append((record.finished_ns, due))
        delay = max(0.0, (due - time.time_ns()) / NANO)
        asyncio.get_running_loop().call_later(delay, self._due, conversation, planned, due)

    def _due(self, conversation: Conversation, planned: Planned, due_ns: int) -> None:
        if not self._stopped:
            self._send(conversation, planned, due_ns)

    def _send(self, conversation: Conversation, planned: Planned, intended_ns: int, ramp: bool = False) -> None:
        record = self._client.submit(planned, intended_ns, ramp)
        self._running[record] = conversation
