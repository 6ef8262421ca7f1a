"""A server in a thread that streams as vLLM does, counts as it does, and goes wrong as it is told."""

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Behaviour:
    """What the server does; changed while it runs."""

    token_seconds: float = 0.005
    version: str = "0.32.0+cpu"
    max_model_len: int = 4096
    block_size: int = 16
    split: int = 0  # bytes a write, 0: a whole event
    merge: int = 1  # token events a write
    per_event: int = 1  # tokens an event
    usage: bool = True
    status: int = 200
    die_after: int = 0  # tokens into a stream, then every connection is cut and the port closed
    miscount: float = 1.0  # what its counter says for each token
    logprobs: bool = True
    refuses_logprobs: bool = False
    text: str = " one two three"
    word_tokens: float = 1.0  # what its tokenizer makes of a word of a conversation
    hang: bool = False
    error_event: bool = False
    close_each: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    tokens: float = 0.0
    prompt_tokens: int = 0
    finished: int = 0
    running: int = 0


class StreamServer:
    """One server on a free port."""

    def __init__(self, behaviour: Behaviour, certificate: Path | None) -> None:
        self.behaviour = behaviour
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.rstrip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                _, path, _ = first.split(" ")
                if first.startswith("POST"):
                    self.behaviour.headers.append(headers)
                    await self._post(path, json.loads(body), writer)
                else:
                    self._get(path, writer)
                if self.behaviour.close_each:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        b = self.behaviour
        answers = {
            "/version": json.dumps({"version": b.version}),
            "/v1/models": json.dumps({"data": [{"id": "fake", "max_model_len": b.max_model_len}]}),
            "/metrics": f"""vllm:cache_config_info{{block_size="{b.block_size}",engine="0"}} 1.0
vllm:num_requests_running{{engine="0"}} {b.running}
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:prompt_tokens_total{{engine="0"}} {b.prompt_tokens}
vllm:generation_tokens_total{{engine="0"}} {b.tokens * b.miscount}
vllm:num_preemptions_total{{engine="0"}} 0.0
vllm:prefix_cache_queries_total{{engine="0"}} {b.prompt_tokens}
vllm:prefix_cache_hits_total{{engine="0"}} {b.prompt_tokens / 2}
vllm:request_success_total{{engine="0",finished_reason="length"}} {b.finished}
""",
        }
        self._whole(writer, 200 if path in answers else 404, answers.get(path, "{}"))

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, body: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())

    async def _post(self, path: str, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        b = self.behaviour
        b.bodies.append(asked)
        if b.status != 200:
            self._whole(writer, b.status, '{"error": {"message": "no such thing"}}')
            return
        if b.refuses_logprobs and "logprobs" in asked:
            self._whole(writer, 400, '{"error": {"message": "logprobs are not allowed"}}')
            return
        if not asked.get("stream"):
            logprobs = {"tokens": [" one", " two"]} if b.logprobs and "logprobs" in asked else None
            usage = {"prompt_tokens": self._prompt_tokens(asked), "completion_tokens": 1}
            choices = [{"text": b.text, "logprobs": logprobs}]
            self._whole(writer, 200, json.dumps({"choices": choices, "usage": usage}))
            return
        chat = path.endswith("chat/completions")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            + (b"connection: close\r\n" if b.close_each else b"")
            + b"transfer-encoding: chunked\r\n\r\n"
        )
        if b.hang:
            await asyncio.sleep(3600)
        b.running += 1
        try:
            await self._stream(chat, asked, writer)
        finally:
            b.running -= 1

    def _prompt_tokens(self, asked: dict[str, Any]) -> int:
        if "messages" not in asked:
            return len(asked["prompt"])
        words = sum(len(message["content"].split()) for message in asked["messages"])
        return round(words * self.behaviour.word_tokens) + 3 * len(asked["messages"])

    async def _stream(self, chat: bool, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        b = self.behaviour
        total = asked.get("max_tokens") or asked["max_completion_tokens"]
        prompt = self._prompt_tokens(asked)
        b.prompt_tokens += prompt
        if chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        sent, waiting = 0, b""
        while sent < total:
            if b.die_after and sent >= b.die_after:
                self._cut()
                return
            await asyncio.sleep(b.token_seconds)
            tokens = min(b.per_event, total - sent)
            sent += tokens
            b.tokens += tokens
            piece = f' data: "é{sent}"\n\n'
            said = {"delta": {"content": piece}} if chat else {"text": piece}
            waiting += self._chunk({"choices": [said | {"finish_reason": None}]})
            if waiting.count(b"\r\ndata: ") >= b.merge or sent == total:
                await self._write(writer, waiting)
                waiting = b""
            if b.error_event:
                await self._event(writer, {"error": {"message": "engine died"}})
                await self._write(writer, b"0\r\n\r\n")
                return
        if b.usage:
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + total, "completion_tokens": total}
            await self._event(writer, {"choices": [], "usage": usage})
        b.finished += 1
        await self._write(writer, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        await self._write(writer, self._chunk(event))

    @staticmethod
    def _chunk(event: dict[str, Any]) -> bytes:
        text = f"data: {json.dumps(event)}\n\n".encode()
        return f"{len(text):x}\r\n".encode() + text + b"\r\n"

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        step = self.behaviour.split or len(data)
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            if self.behaviour.split:
                await asyncio.sleep(0)
        await writer.drain()


@contextmanager
def stream_server(behaviour: Behaviour | None = None, certificate: Path | None = None) -> Iterator[StreamServer]:
    """A running server, stopped at the end."""
    server = StreamServer(behaviour or Behaviour(), certificate)
    server.start()
    try:
        yield server
    finally:
        server.stop()
