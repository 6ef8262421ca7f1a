"""Background traffic for the demo's production: many users with a shared system prompt, for as long as it is asked.

`python -m tunewright.demo.traffic URL STATS --rate R`: ends on SIGTERM, once the requests that run have been answered.
STATS is rewritten every second: what was sent, answered and failed.
"""

import argparse
import asyncio
import json
import math
import random
import signal
from collections import Counter
from pathlib import Path

import httpx

from tunewright.loadtest.files import write_atomic

TIMEOUT = httpx.Timeout(60.0, connect=30.0)
LONGEST = 1800.0
"""Seconds after which it ends by itself, should nobody tell it to."""

MOST_AT_ONCE = 64
"""Requests under way at a time: on a machine that is too slow it sends fewer, and piles nothing up."""

MOST_BEHIND = 1.0
"""Seconds: arrivals that it was too late for by more are left out, not caught up in a burst."""

SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 112, 96, 56
"""A system prompt that everybody shares, and medians of what each user adds and gets."""


class Traffic:
    """Sends requests at `rate` a second, in Poisson arrivals, and counts what came of each."""

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self._url, self._rate = f"{url}/v1/completions", rate
        self._random = random.Random(seed)
        self._system = [self._random.randint(100, 20_000) for _ in range(SHARED_TOKENS)]
        self.sent, self.answered = 0, 0
        self.failures: Counter[str] = Counter()
        self._stop = asyncio.Event()
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    def stop(self) -> None:
        """Send no more; what runs is waited for."""
        self._stop.set()

    async def run(self, stats: Path) -> None:
        """Until `stop`, and at most `LONGEST` seconds."""
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=50)
        loop = asyncio.get_running_loop()
        end, due, told = loop.time() + LONGEST, loop.time(), 0.0
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client, asyncio.TaskGroup() as tasks:
            while not self._stop.is_set() and loop.time() < end:
                due = max(due, loop.time() - MOST_BEHIND) + self._random.expovariate(self._rate)
                while (left := due - loop.time()) > 0 and not self._stop.is_set():
                    await asyncio.sleep(min(left, 0.2))
                await self._places.acquire()  # bounded by the time-out of those under way
                if not self._stop.is_set():
                    tasks.create_task(self._request(client))
                if loop.time() - told >= 1.0:
                    told = loop.time()
                    self._tell(stats)
        self._tell(stats)

    async def _request(self, client: httpx.AsyncClient) -> None:
        self.sent += 1
        own = [self._random.randint(100, 20_000) for _ in range(self._length(OWN_TOKENS))]
        body = {
            "prompt": self._system + own,
            "max_tokens": self._length(OUTPUT_TOKENS),
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        try:
            async with client.stream("POST", self._url, json=body) as response:
                end = b""
                async for chunk in response.aiter_raw():
                    end = (end + chunk)[-64:]
            if response.status_code != 200:
                self.failures[f"HTTP {response.status_code}"] += 1
            elif b"[DONE]" not in end:
                self.failures["answer broken off"] += 1
            else:
                self.answered += 1
        except httpx.HTTPError as error:
            self.failures[type(error).__name__] += 1
        finally:
            self._places.release()

    def _length(self, median: int) -> int:
        return max(4, min(4 * median, round(self._random.lognormvariate(math.log(median), 0.4))))

    def _tell(self, stats: Path) -> None:
        told = {"sent": self.sent, "answered": self.answered, "failures": dict(self.failures)}
        write_atomic(stats, json.dumps(told).encode())


async def _main(url: str, stats: Path, rate: float, seed: int) -> None:
    traffic = Traffic(url, rate, seed)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, traffic.stop)
    await traffic.run(stats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("stats", type=Path)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    asyncio.run(_main(given.url, given.stats, given.rate, given.seed))
