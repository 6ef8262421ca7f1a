"""The serving process: the engine's loop against the real clock, the routes, and how it ends.

The engine lives on an ideal clock: a step begins where the step before it ended, however late the process was
in delivering that one. So its speed is the model's, and lateness can be told: the share by which requests took
longer than the model says. A run that was late by over 2 % is void (`/sim/state`, and a line at the end).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import time
import zlib
from http import HTTPStatus
from typing import Any

from . import api, startup
from .config import EngineConfig
from .engine import ERROR, Batch, Noise, Request, Stepper
from .faults import Faults
from .flags import VLLM_VERSION, Arguments
from .http import Connection, HttpRequest, response, stream_head
from .memory import Memory, runs_out_under_load
from .metrics import EngineMetrics, HttpMetrics, render
from .profile import Profile
from .tokens import answer_length, prefix_hashes, seed_of, split_text, token_ids

VOID_LATENESS = 0.02
_STATS_INTERVAL_S = 10.0
# As recorded: a dead engine's server answers 503 for some seconds, refuses connections, and is gone.
_DEAD_ANSWERS_S, _DEAD_REFUSES_S = 4.0, 2.0


class Server:
    """One simulated vLLM. `run` returns the exit code."""

    def __init__(
        self,
        arguments: Arguments,
        profile: Profile,
        config: EngineConfig,
        memory: Memory,
        cache_labels: dict[str, str],
        faults: Faults,
        log: startup.Log,
    ) -> None:
        self.arguments, self.profile, self.config, self.faults, self.log = arguments, profile, config, faults, log
        noise = profile.noise
        seed = arguments.seed
        self.noise = Noise(
            noise.between if arguments.noise_between is None else arguments.noise_between,
            noise.within if arguments.noise_within is None else arguments.noise_within,
            noise.drift_s,
            noise.step if arguments.noise_within != 0 else 0.0,
            seed,
        )
        self.stepper = Stepper(profile, config, memory, self.noise)
        self.names = arguments.served_names
        self.metrics = EngineMetrics(self.names[0], self.stepper, cache_labels)
        self.http = HttpMetrics()
        self.connections: set[Connection] = set()
        self.jobs: dict[int, tuple[api.Job, api.Answer]] = {}
        self.alive = True
        self.ended = 0  # requests
        self._ideal = math.inf  # where the engine's clock stands; idle: nowhere
        self.late_sum = self.e2e_sum = 0.0
        self.fingerprint = f"vllm-{VLLM_VERSION}-{zlib.crc32(repr(config).encode()):08x}"
        self._random = random.Random(seed)
        self._keys = 0
        self._work = asyncio.Event()
        self._stop = asyncio.Event()
        self._flip = self._flips()
        self._oom = runs_out_under_load(profile, config)
        quiet = arguments.get("disable_access_log_for_endpoints") or ""
        self._quiet = {path.strip() for path in quiet.split(",") if path.strip()}
        self._access_log = not arguments.get("disable_uvicorn_access_log", False)

    @property
    def late_ratio(self) -> float:
        return self.late_sum / self.e2e_sum if self.e2e_sum else 0.0

    def _flips(self) -> int:
        knobs = [self.config.kv_cache_dtype.split("_")[0]]
        if self.profile.model.mamba_layers:
            knobs.append(self.config.ssm_dtype)
        return round(1024 * sum(self.profile.lossy_flip.get(knob, 0.0) for knob in knobs))

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self, sock: Any) -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self.handle, loop.time, self.connections), sock=sock)
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)
        engine = loop.create_task(self._engine(loop))
        stats = loop.create_task(self._stats())
        stop = loop.create_task(self._stop.wait())
        await asyncio.wait({engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if engine.done() and not stop.done():
            engine.result()
            await self._dying(server)
        self.log.plain("INFO:     Shutting down")
        for task in (engine, stats, stop):
            task.cancel()
        server.close()
        for job, sequence in list(self.jobs.values()):
            self._abort(job, sequence)
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)
        self.log.plain("INFO:     Waiting for application shutdown.")
        self.log.plain("INFO:     Application shutdown complete.")
        self.log.plain(f"INFO:     Finished server process [{os.getpid()}]")
        verdict = "void" if self.late_ratio > VOID_LATENESS else "valid"
        self.log.api("simulate", f"late by {self.late_ratio:.3%} of the requests' time: this run is {verdict}")
        return 0

    async def _dying(self, server: asyncio.Server) -> None:
        speed = self.arguments.speed
        await asyncio.sleep(_DEAD_ANSWERS_S / speed)
        self.log.api("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
        server.close()
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(_DEAD_REFUSES_S / speed)

    def _die(self, cause: str) -> None:
        self.alive = False
        startup.engine_died(self.log, cause)
        for request in self.stepper.abort_all():
            request.finish_reason = ERROR
            job, sequence = self.jobs.pop(request.key)
            self.metrics.finished(request, time.monotonic(), job.max_tokens)
            self._fail(job, sequence)

    def _fail(self, job: api.Job, sequence: api.Answer) -> None:
        """Ends a job whose engine died: an error object if nothing was sent, else the stream just breaks off."""
        if job.connection.current is None:
            return
        error = api.ApiError("EngineCore encountered an issue.", status=500, kind="InternalServerError")
        if job.stream:
            job.connection.write(b"%x\r\n%b\r\n" % (len(error.body) + 8, b"data: " + error.body + b"\n\n"))
            job.connection.on_lost = None
            job.connection.close()
        elif sequence.index == 0:
            job.connection.reply(response(500, error.body))

    # -- the engine ------------------------------------------------------------------------------------------

    async def _engine(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs until the engine dies. `ideal` is where the engine's clock stands."""
        ideal, slow = loop.time(), self.faults.value("slow", 1.0)
        while True:
            if not self.stepper.busy or self.faults.due("no-tokens", self.ended):
                self._work.clear()
                self._ideal = math.inf
                await self._work.wait()
                ideal = max(ideal, loop.time())
                if self.faults.due("no-tokens", self.ended):
                    continue
            self._ideal = ideal
            batch = self.stepper.schedule(ideal)
            if batch is None:
                # One request needs more blocks than there are; vLLM would wait for ever, too.
                await asyncio.sleep(0.01)
                ideal = loop.time()
                continue
            ideal += batch.seconds * slow
            self._ideal = ideal
            await asyncio.sleep(max(0.0, ideal - loop.time()))
            cause = self._struck()
            if cause:
                self._die(cause)
                return
            self._deliver(batch, ideal, max(0.0, loop.time() - ideal))

    def _struck(self) -> str:
        """The cause if the engine dies now; a process that hangs does so in here."""
        if self.faults.due("hang", self.ended):
            while True:
                time.sleep(60)
        if self.faults.due("die-under-load", self.ended):
            return "RuntimeError: Executor failed."
        crowd = len(self.stepper.running) >= min(8, self.config.max_num_seqs)
        if self.faults.due("oom-under-load", self.ended) or (self._oom and crowd):
            total = self.profile.hardware.memory_gib
            return (
                f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity "
                f"of {total:.2f} GiB of which 211.00 MiB is free."
            )
        return ""

    def _deliver(self, batch: Batch, ideal: float, late: float) -> None:
        outputs = self.stepper.finish(batch, ideal)
        self.metrics.step(batch, outputs, ideal)
        for output in outputs:
            request = output.request
            job, sequence = self.jobs[request.key]
            if request.finish_reason:
                del self.jobs[request.key]
                self.ended += 1
                self.metrics.finished(request, ideal, job.max_tokens)
                self.late_sum += late
                self.e2e_sum += ideal - request.arrival
            job.deliver(sequence, output.tokens, request.finish_reason)
            if request.finish_reason and job.open == 0:
                self._account(job.connection, job.received, 200, job.body_bytes)

    async def _stats(self) -> None:
        """vLLM's line every ten seconds."""
        metrics = self.metrics
        prompt, output = 0, 0
        while not self.arguments.get("disable_log_stats", False):
            await asyncio.sleep(_STATS_INTERVAL_S)
            queries = self.stepper.prefix_queries
            self.log.api(
                "loggers.py:259",
                "Engine 000: "
                f"Avg prompt throughput: {(metrics.prompt_tokens - prompt) / _STATS_INTERVAL_S:.1f} tokens/s, "
                f"Avg generation throughput: {(metrics.generation_tokens - output) / _STATS_INTERVAL_S:.1f} tokens/s, "
                f"Running: {len(self.stepper.running)} reqs, Waiting: {len(self.stepper.waiting)} reqs, "
                f"GPU KV cache usage: {self.stepper.cache.usage:.1%}, "
                f"Prefix cache hit rate: {self.stepper.prefix_hits / queries if queries else 0:.1%}",
            )
            prompt, output = metrics.prompt_tokens, metrics.generation_tokens

    # -- routes ----------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        try:
            status = self._route(connection, request)
        except api.ApiError as error:
            status = error.status
            connection.reply(response(status, error.body))
        if status:
            self._account(connection, request, status, connection.sent)

    def _account(self, connection: Connection, request: HttpRequest, status: int, sent: int) -> None:
        """The access log's line, and the HTTP metrics."""
        path, method = request.path, request.method
        if self._access_log and path not in self._quiet:
            phrase = HTTPStatus(status).phrase
            self.log.plain(f'INFO:     {connection.peer} - "{method} {request.target} HTTP/1.1" {status} {phrase}')
        elapsed = asyncio.get_running_loop().time() - request.started
        self.http.observe(path, method, status, len(request.body), sent, elapsed)

    def _route(self, connection: Connection, request: HttpRequest) -> int:
        """Answers at once and returns the status; 0 if the answer comes later."""
        path, method = request.path, request.method
        if path.startswith("/v1/"):
            self._authorise(request)
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            return self._complete(connection, request, path == "/v1/chat/completions")
        if path == "/tokenize" and method == "POST":
            return self._json(connection, self._tokenize(request.body))
        if method not in ("GET", "HEAD"):
            raise api.ApiError("Method Not Allowed", status=405, kind="MethodNotAllowedError")
        if path in ("/health", "/ping"):
            status = 200 if self.alive else 503
            connection.reply(response(status, b"", "text/plain"))
            return status
        if path == "/metrics":
            metrics = None if self.arguments.get("disable_log_stats", False) else self.metrics
            text = render(metrics, self.http, self.late_ratio)
            connection.reply(response(200, text, "text/plain; version=1.0.0; charset=utf-8"))
            return 200
        answers = {
            "/version": lambda: {"version": f"{VLLM_VERSION}+simulated.{self.profile.name}"},
            "/v1/models": self._models,
            "/load": lambda: {"server_load": len(self.jobs)},
            "/sim/state": self._state,
        }
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            answers["/server_info"] = lambda: {"vllm_config": {**vars(self.config)}}
        if path not in answers:
            raise api.ApiError("Not Found", status=404, kind="NotFoundError")
        return self._json(connection, answers[path]())

    def _json(self, connection: Connection, data: object) -> int:
        connection.reply(response(200, json.dumps(data, separators=(",", ":")).encode()))
        return 200

    def _authorise(self, request: HttpRequest) -> None:
        keys = self.arguments.get("api_key") or [k for k in [os.environ.get("VLLM_API_KEY")] if k]
        given = request.headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        if keys and given not in keys:
            raise api.ApiError("Unauthorized", status=401, kind="AuthenticationError")

    def _models(self) -> dict[str, Any]:
        common = {"object": "model", "created": int(self.metrics.created), "owned_by": "vllm"}
        root = {"root": self.arguments.model, "parent": None, "max_model_len": self.config.max_model_len}
        return {"object": "list", "data": [{"id": name, **common, **root} for name in self.names]}

    def _state(self) -> dict[str, Any]:
        """The simulator's own state: how late it is, and what it plays."""
        void = self.late_ratio > VOID_LATENESS
        factor = self.noise.start_factor
        state = {"profile": self.profile.name, "late_ratio": self.late_ratio, "void": void, "requests": self.ended}
        return {**state, "start_factor": factor, "faults": self.faults.arguments}

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        data = api.parse_body(body)
        ids = token_ids(api.prompts_of(data, "messages" in data)[0])
        strings = split_text(str(data.get("prompt", ""))) if data.get("return_token_strs") else None
        return {"count": len(ids), "max_model_len": self.config.max_model_len, "tokens": ids, "token_strs": strings}

    # -- completions -----------------------------------------------------------------------------------------

    def _complete(self, connection: Connection, request: HttpRequest, chat: bool) -> int:
        data = api.parse_body(request.body)
        model = data.get("model")
        if model is not None and model not in self.names:
            raise api.ApiError(f"The model `{model}` does not exist.", status=404, kind="NotFoundError", param="model")
        if not self.alive:
            raise api.ApiError("EngineCore encountered an issue.", status=500, kind="InternalServerError")
        if "errors" in self.faults and self._random.random() < self.faults.value("errors", 0.0):
            raise api.ApiError("Internal server error", status=500, kind="InternalServerError")
        job = self._job(connection, request, data, chat)
        connection.on_lost = lambda: self._lost(job)
        if job.stream:
            connection.write(stream_head())
        for sequence in job.sequences:
            self.jobs[sequence.request.key] = (job, sequence)
            self.stepper.add(sequence.request)
        self._work.set()
        return 0

    def _job(self, connection: Connection, request: HttpRequest, data: dict[str, Any], chat: bool) -> api.Job:
        stream = bool(data.get("stream", False))
        options = data.get("stream_options") or {}
        if options and not stream:
            raise api.ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
        limit = api.number(data, "max_completion_tokens", None, 1) if chat else None
        limit = limit or api.number(data, "max_tokens", None if chat else 16, 1)
        copies = api.number(data, "n", 1, 1) or 1
        least = api.number(data, "min_tokens", 0, 0) or 0
        forced = bool(self.arguments.get("enable_force_include_usage", False))
        job = api.Job(
            connection,
            request,
            chat,
            stream,
            include_usage=forced or bool(options.get("include_usage", False)),
            continuous_usage=bool(options.get("continuous_usage_stats", False)),
            identity=api.identity(request.headers.get(b"x-request-id"), chat),
            model=self.names[0],
            fingerprint=self.fingerprint,
            prompt_details=bool(self.arguments.get("enable_prompt_tokens_details", False)),
            stream_interval=self.config.stream_interval,
            max_tokens=limit or self.config.max_model_len,
            tokens_as_ids=bool(data.get("return_tokens_as_token_ids", False)),
        )
        top = None if chat or stream else api.logprobs_of(data, int(self.arguments.get("max_logprobs", 20)))
        for prompt in api.prompts_of(data, chat):
            ids = token_ids(prompt)
            for _ in range(copies):
                sequence = self._sequence(len(job.sequences), ids, limit, least, data, request.started)
                sequence.top = top
                job.sequences.append(sequence)
        job.open = len(job.sequences)
        return job

    def _sequence(
        self, index: int, ids: list[int], limit: int | None, least: int, data: dict[str, Any], arrival: float
    ) -> api.Answer:
        longest = self.config.max_model_len
        if len(ids) >= longest or len(ids) + (limit or 0) > longest:
            raise api.too_long(longest, len(ids), limit)
        sampled = float(data.get("temperature", 1.0) or 0.0) > 0
        salt = index
        if sampled:
            salt += int(data["seed"]) + 1 if isinstance(data.get("seed"), int) else self._random.getrandbits(40) + 1
        seed = seed_of(self.arguments.model, ids, salt if sampled else 0)
        tokens = limit if limit is not None else longest - len(ids)
        natural = 0 if data.get("ignore_eos") else answer_length(seed, self.profile.model.mean_answer_tokens)
        ends_itself = 0 < max(natural, least) < tokens
        tokens = max(natural, least) if ends_itself else tokens
        if "fewer-tokens" in self.faults:
            tokens = max(1, int(tokens * self.faults.value("fewer-tokens", 1.0)))
            ends_itself = True
        self._keys += 1
        caching = self.config.prefix_caching
        hashes = prefix_hashes(ids, self.stepper.memory.hash_block_size) if caching else []
        arrival = min(arrival, self._ideal)  # on the engine's clock, which lags where the machine is slow
        request = Request(self._keys, len(ids), tokens, arrival, hashes, seed, ends_itself)
        return api.Answer(index, request, seed, self._flip)

    def _lost(self, job: api.Job) -> None:
        """The client went away: its sequences are aborted and counted so."""
        for sequence in job.sequences:
            if sequence.request.key in self.jobs:
                self._abort(job, sequence)

    def _abort(self, job: api.Job, sequence: api.Answer) -> None:
        request = sequence.request
        self.stepper.abort(request)
        self.jobs.pop(request.key, None)
        self.metrics.finished(request, max(request.last_token_at, request.arrival), job.max_tokens)
