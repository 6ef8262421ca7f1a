"""The REST API beside a local tuning."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunewright.api.app import LOCAL_HOSTS, create_app
from tunewright.api.auth import OwnerMayAll, TokenFile, ensure_token
from tunewright.api.server import ApiServer
from tunewright.local import LocalTuning
from tunewright.ports import Refused
from tunewright.store.one import OneStore

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Served:
    """Where the API answers, and which file holds its token."""

    url: str
    token_file: Path


@contextmanager
def serve_api(local: LocalTuning, listen: str) -> Iterator[Served]:
    """Serve the API while the block runs. Only the loopback is allowed: the token travels in the clear."""
    host, _, port = listen.rpartition(":")
    if host not in _LOOPBACK or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise Refused(f"--listen {listen}: a loopback address with a port is wanted, as 127.0.0.1:8765")
    token_file = local.state / "token"
    ensure_token(token_file)
    app = create_app(
        OneStore(local.store),
        local.clock,
        authenticator=TokenFile(token_file),
        authorizer=OwnerMayAll(),
        allowed_hosts=LOCAL_HOSTS,
        metrics=local.metrics.exposition,
        public_metrics=True,
        report=lambda _store, record: local.render_report(record),
        ready=lambda: None,
    )
    try:
        server = ApiServer(app, host=host, port=int(port))
    except OSError as error:
        raise Refused(f"--listen {listen}: {error.strerror or error}; choose another port, or 0 for any") from error
    with server:
        yield Served(server.url, token_file)
