"""`make demo`, as a newcomer runs it: with a `prometheus` on the PATH and without; nothing is left over."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from processes import nothing_left

from tunewright.platform.process import children, sockets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PHASES = [
    "Profiling: Learning the traffic of",
    "Baselining: The traffic (",
    "Searching: The baseline gives",
    "Confirming: The search is over",
    "AwaitingApproval: ",
    "Canary: Starting the canary of",
    "Rolling: The canary holds",
    "Watching: All 2 replicas run",
    "Promoted: ",
]
"""A sentence of each phase, in the order of the story."""


def path_without(program: str, folder: Path) -> str:
    """A PATH on which everything is but one program: the folders that hold it are mirrored by links to the rest."""
    found = []
    for number, entry in enumerate(os.environ["PATH"].split(os.pathsep)):
        if not (Path(entry) / program).exists():
            found.append(entry)
            continue
        mirror = folder / f"path-{number}"
        mirror.mkdir(parents=True)
        for tool in Path(entry).iterdir():
            if tool.name != program:
                (mirror / tool.name).symlink_to(tool)
        found.append(str(mirror))
    return os.pathsep.join(found)


class References(HTMLParser):
    """Everything that a page would have a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            fetched = name in ("src", "srcset", "data", "action", "poster") or (
                name == "href" and tag in ("link", "use")
            )
            if fetched and value and not value.startswith(("#", "data:")):
                self.found.append(f"{tag} {name}={value}")


def check_report(page: str) -> None:
    references = References()
    references.feed(page)
    assert references.found == []
    assert not re.search(r"@import|url\(\s*['\"]?(?!#|data:)", page), "the style must fetch nothing"
    assert "simulated" in page


def check_output(out: str, folder: Path) -> int:
    """The story is told whole and in order; the port of the proxy."""
    at = 0
    for sentence in PHASES:
        found = out.find(sentence, at)
        assert found >= 0, f"{sentence!r} is missing after {out[at - 80 : at]!r}: {out}"
        at = found
    gain = re.search(r"^gain: +\+([\d.,]+)% \(from \+", out, re.MULTILINE)
    assert gain is not None, out
    assert float(gain[1].replace(",", "")) >= 10, "the demo's own minimum"
    told = re.search(r"Background traffic: (\d+) of (\d+) requests answered, 0 failed\.", out)
    assert told is not None, out
    assert int(told[1]) == int(told[2]) > 100
    report = folder / "state" / "demo" / "report.html"
    assert f"Report: {report}" in out
    check_report(report.read_text(encoding="utf-8"))
    proxy = re.search(r"behind http://127\.0\.0\.1:(\d+)", out)
    assert proxy is not None, out
    return int(proxy[1])


def tree(folder: Path, but: Path) -> dict[Path, float]:
    """Every file below a folder with the time it was changed, but for caches and `but`."""
    found = {}
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        if but in (path, *path.parents) or any(part in SKIPPED for part in inside) or not path.is_file():
            continue
        found[path] = path.stat().st_mtime
    return found


SKIPPED = {"__pycache__", ".git", ".venv", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}


def check_nothing_left(folder: Path, proxy_port: int) -> None:
    assert children.find_marked(folder) == []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        assert str(folder).encode() not in words, f"process {process.name} was left: {words!r}"
    assert not sockets.listening_sockets(proxy_port)


def test_make_demo_goes_through_a_real_prometheus(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on the PATH")
    folder = ROOT / ".tunewright" / "demo"
    home = tmp_path / "home"
    home.mkdir()
    before = tree(ROOT, but=folder)
    with nothing_left(folder):
        done = subprocess.run(
            ["make", "demo"],
            cwd=ROOT,
            env={**os.environ, "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        out = done.stdout + done.stderr
        assert done.returncode == 0, out
        assert "Metrics go through a real Prometheus" in out
        check_nothing_left(folder, check_output(out, folder))
    assert list(home.rglob("*")) == [], "nothing is written to the home folder"
    assert tree(ROOT, but=folder) == before, "nothing is written beside the demo's own folder"


def test_the_demo_without_a_prometheus_scrapes_by_itself(tmp_path: Path) -> None:
    folder, home = tmp_path / "demo", tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "PATH": path_without("prometheus", tmp_path), "HOME": str(home)}
    with nothing_left(folder):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("tunewright")), "demo", "--plain", "--folder", str(folder)],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        out = done.stdout + done.stderr
        assert done.returncode == 0, out
        assert "There is no prometheus on the PATH" in out
        check_nothing_left(folder, check_output(out, folder))
    assert list(home.rglob("*")) == []


def test_ctrl_c_ends_the_demo_and_leaves_nothing(tmp_path: Path) -> None:
    import signal
    import time

    folder, log = tmp_path / "demo", tmp_path / "out.log"
    with nothing_left(folder):
        with log.open("wb") as out:
            demo = subprocess.Popen(
                [str(Path(sys.executable).with_name("tunewright")), "demo", "--plain", "--folder", str(folder)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path_without("prometheus", tmp_path), "PYTHONUNBUFFERED": "1"},
            )
        try:
            deadline = time.monotonic() + 120
            while "(trial 0): starting" not in log.read_text():
                assert demo.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(timeout=120) == 130, log.read_text()
        finally:
            demo.kill()
            demo.wait(timeout=30)
        assert children.find_marked(folder) == [], log.read_text()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("four years")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("tunewright")), "demo", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "not an earlier demo's" in done.stderr
    assert kept.read_text() == "four years"
