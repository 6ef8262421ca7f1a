"""The blocks of the KV cache with prefix caching: counts and hashes, no contents."""

from __future__ import annotations

from collections import OrderedDict

from .memory import Memory


class KVCache:
    """Blocks in use, blocks that are cached but free (evicted oldest first), and free blocks."""

    def __init__(self, memory: Memory, prefix_caching: bool) -> None:
        self.memory = memory
        self.prefix_caching = prefix_caching
        self.total = memory.num_blocks
        self.used = 0.0
        self.references: dict[int, int] = {}  # hash of a cached prefix unit -> requests that hold it
        self.idle: OrderedDict[int, None] = OrderedDict()  # cached units that no request holds
        self._unit_blocks = memory.hash_block_size / memory.block_size

    @property
    def usage(self) -> float:
        return min(1.0, self.used / self.total)

    def find(self, hashes: list[int], prompt_tokens: int) -> int:
        """How many leading units of a prompt are cached; the last token is always computed anew."""
        if not self.prefix_caching:
            return 0
        most = (prompt_tokens - 1) // self.memory.hash_block_size
        count = 0
        for unit in hashes[:most]:
            if unit not in self.references:
                break
            count += 1
        return count

    def claim(self, hashes: list[int]) -> float:
        """Holds cached units for a request; returns the blocks they newly take out of the free ones."""
        woken = 0
        for unit in hashes:
            if self.references[unit] == 0:
                del self.idle[unit]
                woken += 1
            self.references[unit] += 1
        blocks = woken * self._unit_blocks
        self._use(blocks)
        return blocks

    def allocate(self, blocks: float) -> bool:
        """Takes blocks, evicting cached ones if need be; False (and nothing taken) where they do not exist."""
        if self.used + blocks > self.total + 1e-9:
            return False
        self._use(blocks)
        return True

    def _use(self, blocks: float) -> None:
        self.used += blocks
        while self.idle and self.used + len(self.idle) * self._unit_blocks > self.total:
            unit, _ = self.idle.popitem(last=False)
            del self.references[unit]

    def publish(self, hashes: list[int]) -> list[int]:
        """Makes a computed prompt's units findable; returns those now held in the cache by this request."""
        held: list[int] = []
        if not self.prefix_caching:
            return held
        for unit in hashes:
            if unit not in self.references:
                self.references[unit] = 1
                held.append(unit)
        return held

    def release(self, private_blocks: float, hashes: list[int]) -> None:
        """Gives a request's blocks back; its cached units stay findable until evicted."""
        self.used -= private_blocks
        for unit in reversed(hashes):
            self.references[unit] -= 1
            if self.references[unit] == 0:
                self.used -= self._unit_blocks
                self.idle[unit] = None
        self.used = max(0.0, self.used)
        self._use(0)
