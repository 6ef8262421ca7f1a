"""The OpenAI interface: checks a request's body as vLLM does, and formats answers byte for byte alike."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .engine import LENGTH, Request
from .http import DONE, Connection, HttpRequest, event, response
from .tokens import WORDS, flips, next_state, token_of, top_logprobs

_WORDS_JSON = [json.dumps(word)[1:-1] for word in WORDS]


class ApiError(Exception):
    """A refused request: the status and vLLM's error object."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()


@dataclass
class Answer:
    """The answer to one prompt of a request."""

    index: int
    request: Request
    state: int
    flip: int = 0  # of 1,024 tokens, how many a lossy knob changes
    unsent: int = 0  # tokens held back by --stream-interval
    words: list[int] = field(default_factory=list)
    begun: bool = False
    top: int | None = None  # log-probabilities asked for per token
    states: list[int] = field(default_factory=list)  # of the tokens, where log-probabilities are asked for

    def draw(self, count: int) -> list[int]:
        """The next tokens of the answer."""
        out = []
        for _ in range(count):
            self.state = next_state(self.state)
            token = token_of(self.state)
            out.append(token ^ 1 if flips(self.state, self.flip) else token)
            if self.top is not None:
                self.states.append(self.state)
        return out

    def logprobs(self, *, as_ids: bool) -> dict[str, Any] | None:
        """vLLM's block of log-probabilities of a whole answer; None where none were asked for."""
        if self.top is None:
            return None

        def name(token: int) -> str:
            return f"token_id:{token}" if as_ids else WORDS[token]

        ranked = [top_logprobs(state, self.flip, max(1, self.top)) for state in self.states]
        lengths = [len(WORDS[token]) for token in self.words]
        return {
            "text_offset": [sum(lengths[:i]) for i in range(len(lengths))],
            "token_logprobs": [position[0][1] for position in ranked],
            "tokens": [name(token) for token in self.words],
            "top_logprobs": [{name(token): value for token, value in position} for position in ranked],
        }


@dataclass
class Job:
    """One HTTP request and its sequences."""

    connection: Connection
    received: HttpRequest
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    identity: str
    model: str
    fingerprint: str
    prompt_details: bool
    stream_interval: int
    max_tokens: int
    tokens_as_ids: bool = False
    sequences: list[Answer] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    open: int = 0  # answers that have not ended
    body_bytes: int = 0  # content length of the response; 0 for a stream

    def __post_init__(self) -> None:
        kind = "chat.completion" if self.chat else "text_completion"
        if self.stream and self.chat:
            kind += ".chunk"
        self._head = (
            f'{{"id":"{self.identity}","object":"{kind}","created":{self.created},"model":{json.dumps(self.model)}'
        )

    def usage(self) -> dict[str, Any]:
        prompt = sum(s.request.prompt_tokens for s in self.sequences)
        output = sum(s.request.generated for s in self.sequences)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
        }
        if self.prompt_details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(s.request.cached for s in self.sequences)}
        return usage

    def deliver(self, sequence: Answer, tokens: int, reason: str) -> None:
        """Passes new tokens on; the last ones carry the finish reason. Ends the answer after the last sequence."""
        words = sequence.draw(tokens)
        if reason:
            self.open -= 1
        if not self.stream:
            sequence.words += words
            if self.open == 0 and reason:
                body = self._whole()
                self.body_bytes = len(body)
                self.connection.reply(response(200, body))
            return
        sequence.words += words
        sequence.unsent += len(words)
        if not reason and sequence.begun and sequence.unsent < self.stream_interval:
            return
        text = "".join([_WORDS_JSON[w] for w in sequence.words])
        sequence.words, sequence.unsent = [], 0
        self.connection.write(self._chunks(sequence, text, reason))
        if self.open == 0 and reason:
            self._end()

    def _chunks(self, sequence: Answer, text: str, reason: str) -> bytes:
        ended = f'"{reason}"' if reason else "null"
        usage = f',"usage":{json.dumps(self.usage(), separators=(",", ":"))}' if self.continuous_usage else ""
        first, sequence.begun = not sequence.begun, True
        if not self.chat:
            return event(
                f'{self._head},"choices":[{{"index":{sequence.index},"text":"{text}","logprobs":null,'
                f'"finish_reason":{ended},"stop_reason":null,"prompt_token_ids":null,"token_ids":null}}]{usage}}}'
            )
        opening = b""
        if first:
            opening = event(
                f'{self._head},"choices":[{{"index":{sequence.index},"delta":{{"role":"assistant","content":""}},'
                f'"logprobs":null,"finish_reason":null}}],"prompt_token_ids":null,"prompt_text":null{usage}}}'
            )
        stop = '"stop_reason":null,' if reason else ""
        return opening + event(
            f'{self._head},"choices":[{{"index":{sequence.index},"delta":{{"content":"{text}"}},"logprobs":null,'
            f'"finish_reason":{ended},{stop}"token_ids":null}}]{usage}}}'
        )

    def _end(self) -> None:
        tail = b""
        if self.include_usage:
            usage = json.dumps(self.usage(), separators=(",", ":"))
            tail = event(f'{self._head},"choices":[],"usage":{usage},"system_fingerprint":"{self.fingerprint}"}}')
        self.connection.reply(tail + DONE)

    def _whole(self) -> bytes:
        choices = []
        for sequence in self.sequences:
            text = "".join([WORDS[w] for w in sequence.words])
            reason = sequence.request.finish_reason or LENGTH
            ending: dict[str, Any] = {"logprobs": None, "finish_reason": reason, "stop_reason": None}
            if self.chat:
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": text,
                    "refusal": None,
                    "tool_calls": [],
                    "reasoning": None,
                }
                choices.append({"index": sequence.index, "message": message, **ending, "token_ids": None})
            else:
                ids = {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None}
                ending["logprobs"] = sequence.logprobs(as_ids=self.tokens_as_ids)
                choices.append({"index": sequence.index, "text": text, **ending, **ids})
        body = {
            "id": self.identity,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": {"prompt_tokens_details": None, **self.usage()},
            "kv_transfer_params": None,
        }
        return json.dumps(body, separators=(",", ":")).encode()


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise ApiError(
            f"[{{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error: {error}'}}]"
        ) from error
    if not isinstance(data, dict):
        raise ApiError("[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be an object'}]")
    return data


def prompts_of(data: dict[str, Any], chat: bool) -> list[str | list[int]]:
    """The prompts of a request: text or token ids. Raises ApiError."""
    if chat:
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError("[{'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'}]")
        return [_render_chat(messages)]
    prompt = data.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) or _is_ids(item) for item in prompt):
            return prompt
    raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")


def _is_ids(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(token, int) for token in item)


def _render_chat(messages: Sequence[Any]) -> str:
    parts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        parts.append(f"<|im_start|>{role}\n{content or ''}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def number(data: dict[str, Any], name: str, default: int | None, least: int) -> int | None:
    """An integer parameter. Raises ApiError."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(f"[{{'type': 'int_type', 'loc': ('body', '{name}'), 'msg': 'Input should be a valid integer'}}]")
    if value < least:
        raise ApiError(f"{name} must be at least {least}, got {value}.", param=name)
    return value


def logprobs_of(data: dict[str, Any], most: int) -> int | None:
    """How many log-probabilities per token are asked for. Raises ApiError."""
    asked = number(data, "logprobs", None, 0)
    if asked is not None and 0 <= most < asked:
        message = f"Requested sample logprobs of {asked}, which is greater than max allowed: {most}"
        raise ApiError(message, param="logprobs")
    return asked


def too_long(longest: int, prompt: int, output: int | None) -> ApiError:
    """vLLM's refusal of what does not fit the model's context."""
    if output is None or prompt >= longest:
        message = (
            f"This model's maximum context length is {longest} tokens. However, your prompt contains at least {prompt} "
            "input tokens. Please reduce the length of the input prompt."
        )
        return ApiError(message, param="input_tokens")
    message = (
        f"This model's maximum context length is {longest} tokens. However, you requested {output} output tokens and "
        f"your prompt contains at least {prompt} input tokens, for a total of at least {prompt + output} tokens. "
        "Please reduce the length of the input prompt or the number of requested output tokens."
    )
    return ApiError(message, param="max_tokens")


def identity(header: bytes | None, chat: bool) -> str:
    """vLLM's request id: the client's x-request-id if it sent one."""
    base = header.decode("latin-1") if header else uuid.uuid4().hex
    clean = "".join(c for c in base if c.isalnum() or c in "-_.:")[:128]
    return f"{'chatcmpl' if chat else 'cmpl'}-{clean}"
