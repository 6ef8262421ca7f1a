"""A tiny stand-in for `vllm serve`, started as a process: its routes, its log lines, and its ways to fail.

`--max-num-seqs` chooses what goes wrong: 661 runs out of memory at start, 662 never listens, 663 runs something else
than it was asked to, 664 is healthy but completes nothing, 665 dies on its first long completion.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def option(name: str, default: str | None = None) -> str | None:
    words = sys.argv
    return words[words.index(name) + 1] if name in words else default


PORT = int(option("--port") or 0)
SEQS = option("--max-num-seqs")
TOKEN_SECONDS = float(option("--fake-token-seconds", "0") or 0)
STATE = {"health": 200, "running": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: object, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(STATE["health"], "")
        elif self.path == "/version":
            self.reply(200, {"version": "0.32.0"})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "fake"}]})
        elif self.path == "/metrics":
            labels = 'block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0"'
            self.reply(200, f'vllm:cache_config_info{{{labels},gpu_memory_utilization="0.92"}} 1.0\n', "text/plain")
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/fake/engine-dies":
            STATE["health"] = 503
            self.reply(200, {})
            return
        if SEQS == "664":
            self.reply(500, {"error": {"message": "no token"}})
            return
        tokens = int(asked.get("max_tokens", 1))
        if SEQS == "665" and tokens > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked.get("stream"):
            self.stream(tokens)
            return
        time.sleep(TOKEN_SECONDS * tokens)
        usage = {"completion_tokens": tokens}
        self.reply(200, {"choices": [{"text": "x"}], "usage": usage, "port": PORT, "seqs": SEQS})

    def stream(self, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(tokens):
            time.sleep(TOKEN_SECONDS)
            event = f"data: {json.dumps({'n': number, 'port': PORT})}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        event = b"data: [DONE]\n\n"
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    shown: dict[str, object] = {"model_tag": "fake", "port": PORT}
    if SEQS is not None:
        shown["max_num_seqs"] = 7 if SEQS == "663" else int(SEQS)
    prefix = f"(APIServer pid={os.getpid()}) INFO 11-30 02:03:05"
    print(f"{prefix} [api_utils.py:273] non-default args: {shown}", flush=True)
    if "--fake-engine" in sys.argv:
        # As vLLM's engine: in the server's session, and still there when the server is gone.
        subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    if SEQS == "661":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", file=sys.stderr, flush=True)
        sys.exit(1)
    if SEQS == "662":
        threading.Event().wait()
    time.sleep(float(option("--fake-start-seconds", "0") or 0))
    server = Server(("127.0.0.1", PORT), Handler)
    print(f"{prefix} [launcher.py:1] Starting vLLM server on 127.0.0.1:{PORT}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
