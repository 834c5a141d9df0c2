"""The block pool in its plainest form, one object per block, and programs that compare pools step by step."""

import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise


@cache
def identities(segments):
    """The (stream, block index) of every block of a sequence."""
    return [(stream, index) for stream, start, end in segments for index in range(start, end)]


@dataclass(eq=False)
class Block:
    identity: tuple | None = None
    ref_cnt: int = 0


@dataclass
class BlockMatch:
    blocks: list

    @property
    def num_blocks(self):
        return len(self.blocks)

    @property
    def num_free(self):
        return sum(block.ref_cnt == 0 for block in self.blocks)


@dataclass
class BlockHolding:
    blocks: list
    start: int
    cached_end: int


class BlockReference:
    """The operations of kvcore.pool.BlockPool, each rule a line about single blocks."""

    def __init__(self, num_blocks):
        self.blocks = [Block() for _ in range(num_blocks)]
        self.queue = list(self.blocks)
        self.copies = {}  # identity -> its blocks, first inserted first

    @property
    def num_free(self):
        return len(self.queue)

    @property
    def num_cached(self):
        return sum(block.identity is not None for block in self.blocks)

    def free_queue(self):
        return [block.identity for block in self.queue]

    def match(self, segments, limit_blocks):
        blocks = []
        for identity in identities(segments)[:limit_blocks]:
            if identity not in self.copies:
                break
            blocks.append(self.pick(self.copies[identity]))
        return BlockMatch(blocks)

    def pick(self, copies):
        return copies[0]

    def hold(self, match):
        return self._touch(match.blocks, 0)

    def pin(self, holding, run):
        start, end = run
        return self._touch(holding.blocks[start - holding.start : end - holding.start], start)

    def _touch(self, blocks, start):
        for block in blocks:
            if block.ref_cnt == 0:
                self.queue.remove(block)
            block.ref_cnt += 1
        return BlockHolding(list(blocks), start, start + len(blocks))

    def allocate(self, holding, n):
        for _ in range(n):
            block = self.queue.pop(0)
            assert block.ref_cnt == 0
            self._forget(block)
            block.ref_cnt = 1
            holding.blocks.append(block)

    def _forget(self, block):
        if block.identity is not None:
            self.copies[block.identity].remove(block)
            if not self.copies[block.identity]:
                del self.copies[block.identity]
            block.identity = None

    def cache(self, holding, segments, upto):
        for index in range(holding.cached_end, upto):
            block = holding.blocks[index - holding.start]
            assert block.identity is None
            block.identity = identities(segments)[index]
            self.copies.setdefault(block.identity, []).append(block)
        holding.cached_end = max(holding.cached_end, upto)

    def free(self, holding):
        anonymous, cached = [], []
        for block in self.release_order(holding.blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (anonymous if block.identity is None else cached).append(block)
        self.queue = self.requeue(anonymous, cached)
        holding.blocks, holding.start, holding.cached_end = [], 0, 0

    def release_order(self, blocks):
        return reversed(blocks)

    def requeue(self, anonymous, cached):
        return anonymous + self.queue + cached

    def reset(self):
        if len(self.queue) < len(self.blocks):
            return False
        for block in self.queue:
            self._forget(block)
        return True


# --- programs ---------------------------------------------------------------------------------------------------------

KINDS = ("arrive", "arrive", "compute", "compute", "compute", "allocate", "cache", "free", "free", "pin", "reset")


@dataclass
class Live:
    """A holding in each pool, and what it is made of."""

    handles: list
    segments: tuple
    start: int
    cached_end: int
    end: int
    is_pin: bool = False


class Program:
    """Runs one step at a time in all pools and asserts after each that nobody can tell them apart.

    A step is (kind, x, y, z): the numbers choose, modulo what there is, so that every step means something. Pools have
    the operations of BlockReference, free_queue() with the identities in eviction order (None for a block without one)
    and, if they can, audit(holdings).
    """

    def __init__(self, pools, sequences):
        self.pools = pools
        self.sequences = sequences
        self.live = []
        self.num_steps = 0
        self.num_hits = 0

    def run(self, steps):
        for kind, x, y, z in steps:
            getattr(self, kind)(x, y, z)
            self.num_steps += 1
            self.compare()
        return self

    def compare(self):
        self._same("free queue", [pool.free_queue() for pool in self.pools])
        self._same("num_free", [pool.num_free for pool in self.pools])
        self._same("num_cached", [pool.num_cached for pool in self.pools])
        for segments in self.sequences:
            self._match(segments, len(identities(segments)))
        for index, pool in enumerate(self.pools):
            if hasattr(pool, "audit"):
                pool.audit([live.handles[index] for live in self.live])

    def _match(self, segments, limit_blocks):
        matches = [pool.match(segments, limit_blocks) for pool in self.pools]
        self._same("match", [(match.num_blocks, match.num_free) for match in matches])
        return matches

    def _same(self, what, values):
        for value in values:
            assert value == values[0], f"step {self.num_steps}: {what}: {value} != {values[0]}"

    def _requests(self):
        return [live for live in self.live if not live.is_pin]

    def arrive(self, x, y, z):
        """A request: the cached prefix but for the last block or not, and room for its first chunk, if it fits."""
        whole = self.sequences[x % len(self.sequences)]
        length = 1 + y % len(identities(whole))
        segments = tuple((stream, start, min(end, length)) for stream, start, end in whole if start < length)
        matches = self._match(segments, length - z % 2)
        hit = matches[0].num_blocks
        chunk = min(z // 2 % 8, length - hit)
        if matches[0].num_free + chunk > self.pools[0].num_free:
            return
        self.num_hits += hit
        handles = [pool.hold(match) for pool, match in zip(self.pools, matches, strict=True)]
        self.live.append(Live(handles, segments, 0, hit, hit))
        self._allocate(self.live[-1], chunk)

    def compute(self, x, y, z):
        """A chunk: room for it, then its full blocks cached; the last block may stay partial."""
        self.allocate(x, y, z)
        self.cache(x, max(0, y - z % 2), z)

    def allocate(self, x, y, _z):
        if requests := self._requests():
            live = requests[x % len(requests)]
            self._allocate(live, min(y % 8, len(identities(live.segments)) - live.end, self.pools[0].num_free))

    def _allocate(self, live, n):
        for pool, handle in zip(self.pools, live.handles, strict=True):
            pool.allocate(handle, n)
        live.end += n

    def cache(self, x, y, _z):
        if requests := self._requests():
            live = requests[x % len(requests)]
            upto = live.cached_end + y % (live.end - live.cached_end + 1)
            for pool, handle in zip(self.pools, live.handles, strict=True):
                pool.cache(handle, live.segments, upto)
            live.cached_end = upto

    def pin(self, x, y, z):
        """A reader of some cached blocks of a request or of another reader."""
        if readable := [live for live in self.live if live.start < live.cached_end]:
            live = readable[x % len(readable)]
            start = live.start + y % (live.cached_end - live.start)
            end = start + 1 + z % (live.cached_end - start)
            handles = [pool.pin(h, (start, end)) for pool, h in zip(self.pools, live.handles, strict=True)]
            self.live.append(Live(handles, live.segments, start, end, end, is_pin=True))

    def free(self, x, _y, _z):
        if self.live:
            live = self.live.pop(x % len(self.live))
            for pool, handle in zip(self.pools, live.handles, strict=True):
                pool.free(handle)

    def reset(self, x, _y, _z):
        """Rarely with everything given back first, else it can only be refused."""
        if x % 8 == 0:
            while self.live:
                self.free(0, 0, 0)
        self._same("reset", [pool.reset() for pool in self.pools])


def random_sequences(rng):
    """Sequences over few streams, so that they share prefixes, diverge, and meet again further on."""
    return [random_sequence(rng) for _ in range(rng.randint(2, 5))]


def random_sequence(rng):
    bounds = [0, *sorted(rng.sample(range(1, 30), rng.randint(1, 4)))]
    return tuple((rng.randint(0, 2), start, end) for start, end in pairwise(bounds))


def random_steps(rng, n):
    return [(rng.choice(KINDS), rng.randrange(64), rng.randrange(64), rng.randrange(64)) for _ in range(n)]


def random_program(seed, make_pools, num_steps):
    """A program of its own pool size, sequences and steps; make_pools(num_blocks) gives the pools to compare."""
    rng = random.Random(seed)
    num_blocks = rng.choice([1, 2, 5, 10, 20, 40, 80])
    return Program(make_pools(num_blocks), random_sequences(rng)).run(random_steps(rng, num_steps))
