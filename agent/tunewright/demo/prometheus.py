"""A real Prometheus for the demo and the tests, where its binary is on the PATH."""

import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tunewright.platform.process import children
from tunewright.ports import PortError

READY_WITHIN = 30.0


def binary() -> str | None:
    """Where `prometheus` is; None where it is not on the PATH."""
    return shutil.which("prometheus")


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def prometheus(
    folder: Path, targets: Path, interval: float, more: Mapping[str, Path] | None = None, rules: Path | None = None
) -> Iterator[str]:
    """Run it meanwhile, scraping every `interval` seconds what the `file_sd` file `targets` names; its URL.

    `more` are further jobs with a file each; `rules` is a file of rules that it evaluates.
    """
    program = binary()
    if program is None:
        raise PortError("there is no prometheus on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    port, config = free_port(), folder / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {interval:g}s, scrape_timeout: {interval:g}s}}\n"
        + (f"rule_files: ['{rules}']\n" if rules is not None else "")
        + "scrape_configs:\n"
        + "".join(
            f"  - job_name: {job}\n    file_sd_configs: [{{files: ['{file}'], refresh_interval: {interval:g}s}}]\n"
            for job, file in {"vllm": targets, **(more or {})}.items()
        )
    )
    argv = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    record = folder / "child.json"
    child = children.spawn(argv, {}, folder, folder / "stdout", folder / "stderr", record)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(url, child, folder)
        yield url
    finally:
        children.end(child, grace=10.0)


def _await_ready(url: str, child: children.Child, folder: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if not children.alive(child):
            log = (folder / "stderr").read_text(errors="replace").strip().splitlines()
            raise PortError(f"prometheus ended at once: {log[-1] if log else 'without a word'}")
        try:
            if httpx.get(f"{url}/-/ready", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise PortError(f"prometheus was not ready within {READY_WITHIN:.0f} s")
