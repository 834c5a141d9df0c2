"""An engine small enough to be surely right: blocks whose slots are tagged, a prefix cache, and requests in it.

A token's KV is the tag (group, tokens up to it, weights it was computed with): it names the whole prefix, so that a
wrong past is a wrong tag. A recurrent group's block has one slot, the state after the last token written. A block just
allocated holds junk. Where the model splits blocks the engine keeps copies of begun ones, which a hit may start from.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from kvcore.memory import BlockMemory, Experience
from kvcore.request import KVRequest
from tests.kvcore.attention_oracle import oracle_of
from tests.kvcore.pool_objects import kinds_of

JUNK = "junk"
MIXED = "mixed"
"""What was computed with some weights from what was computed with others."""


@dataclass(eq=False)
class Block:
    """A physical block; `key` is what the prefix cache finds it under. A lent one is a copy outside the cache."""

    slots: list = field(default_factory=list)
    refs: int = 0
    key: tuple | None = None
    lent: bool = False


@dataclass(eq=False)
class Live:
    """A request of the text `lineage[:final]`, of which `num_prompt` tokens are the prompt."""

    engine: "Engine"
    lineage: str
    num_prompt: int
    final: int
    table: list
    machine: KVRequest | None = None
    num_tokens: int = 0
    num_computed: int = 0
    weights: int = 0
    """The engine's generation at the last admission."""
    tickets: set = field(default_factory=set)
    last_lookup: int = 0
    answers: dict = field(default_factory=dict)
    outcome: dict = field(default_factory=dict)
    filled: set = field(default_factory=set)
    """(generation at its admission, index, position) of blocks that it has computed."""
    settled: set = field(default_factory=set)
    """The same, that a plan has loaded or given to the pool, or that somebody else has computed."""
    others: set = field(default_factory=set)
    """(index, position) of local hits at the last admission that somebody else computed, and sees to."""
    keeps_back: bool = False
    """Preempted with these weights: whose the generated blocks are that it finds it cannot tell."""
    planned: Counter = field(default_factory=Counter)
    """Times that an object was planned to be stored since the last admission."""
    due: set = field(default_factory=set)
    """Objects known to be missing in the pool, to be stored with the first step."""

    @property
    def num_late(self):
        """Lookups that took too long."""
        return self.machine.decisions.late_lookups

    def name(self, index, position):
        """Of an object's content, in the engine's memory."""
        end = self.engine.kinds[index].end(position)
        assert end <= self.num_tokens, "nothing has a name before its tokens are known"
        return index, self.lineage[:end]

    def names(self, index, run):
        return [self.name(index, position) for position in range(*run)]


def right(kinds, index, text, generation):
    """What an object named by `text` holds."""
    kind = kinds[index]
    return [(kind.group, text[: token + 1], generation) for token in kind.tokens(len(text) // kind.step - 1)]


class Engine:
    """Physical blocks and the prefix cache. `generation` counts the weights."""

    def __init__(self, model, num_blocks, memory_ttl_ns):
        self.model = model
        self.oracle = oracle_of(model)
        self.kinds = kinds_of(model)
        self.groups = range(len(model.groups))
        self.sizes = [group.block_size for group in model.groups]
        self.states = [kind.is_state for kind in self.kinds[: len(self.sizes)]]
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = deque(self.blocks)
        self.cached = {}
        self.begun = {}
        self.generation = 0
        self.experience = Experience(BlockMemory(1_000, memory_ttl_ns), BlockMemory(1_000, memory_ttl_ns))
        self.denied, self.unsaved = {}, {}

    # -- contents -----------------------------------------------------------------------------------------------------

    def read(self, index, position, block):
        """The part of the physical block that is the object."""
        return block.slots[: len(self.kinds[index].tokens(position))]

    def slot(self, group, token):
        return 0 if self.states[group] else token % self.sizes[group]

    def found(self, live, group, token):
        """The tag at a token's place, None without a block."""
        block = live.table[group].get(token // self.sizes[group])
        return block and block.slots[self.slot(group, token)]

    def check_reads(self, live, token):
        """All that the token reads is there and is right; the generations that it is of."""
        generations = set()
        for group in self.groups:
            for earlier in self.oracle.groups[group].attention.reads(token):
                found = self.found(live, group, earlier)
                right = found and found[:2] == (group, live.lineage[: earlier + 1])
                assert right, f"token {token} reads {found} as {earlier}"
                generations.add(found[2])
        return generations

    def compute(self, live, token):
        own = self.generation if self.check_reads(live, token) <= {self.generation} else MIXED
        for group, size in enumerate(self.sizes):
            block = live.table[group][token // size]
            tag = (group, live.lineage[: token + 1], own)
            before = block.slots[self.slot(group, token)]
            assert block.key is None or before[:2] == tag[:2], "a block that others can find is not changed"
            if block.key is None:
                block.slots[self.slot(group, token)] = tag

    # -- physical blocks ----------------------------------------------------------------------------------------------

    def take(self, group):
        block = self.free.popleft()
        self.lose(block)
        block.refs, block.slots = 1, [JUNK] * (1 if self.states[group] else self.sizes[group])
        return block

    def lose(self, block):
        if block.key is not None:
            del self.cached[block.key]
        block.key = None

    def hold(self, block):
        if block.refs == 0 and not block.lent:
            self.free.remove(block)
        block.refs += 1
        return block

    def release(self, block):
        assert block.refs > 0, "a block is freed once for each holder"
        block.refs -= 1
        if block.refs == 0 and not block.lent:
            self.free.append(block)

    def release_table(self, live):
        for positions in live.table:
            for block in positions.values():
                self.release(block)
            positions.clear()

    def overwrite(self, num_blocks):
        """Somebody else takes free blocks, writes them and gives them back; copies are lost."""
        taken = [self.take(0) for _ in range(min(num_blocks, len(self.free)))]
        for block in taken:
            self.release(block)
        for key in sorted(self.begun)[:num_blocks]:
            del self.begun[key]

    def new_weights(self):
        for block in self.blocks:
            self.lose(block)
        self.begun.clear()
        self.denied.clear()
        self.unsaved.clear()
        self.experience.clear()
        self.generation += 1

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def cache(self, live):
        """The prefix cache learns the full blocks of what is computed, and copies of begun ones where a hit may end."""
        for group, positions in enumerate(live.table):
            for position, block in positions.items():
                end = (position + 1) * self.sizes[group]
                key = (group, live.lineage[:end])
                is_new = end <= live.num_computed and block.key is None and key not in self.cached
                if is_new and self.is_right(*key, block):
                    block.key = key
                    self.cached[key] = block
        if self.model.splits_blocks and live.num_computed % self.model.hit_step == 0:
            self.keep_begun(live)

    def is_right(self, group, text, block):
        """A state is right when it is the one after the block's last token."""
        tags = block.slots
        return tags == [(group, text[: len(text) - back], self.generation) for back in reversed(range(len(tags)))]

    def keep_begun(self, live):
        text = live.lineage[: live.num_computed]
        for group, size in enumerate(self.sizes):
            block = live.table[group].get((len(text) - 1) // size)
            if block is None or len(text) % size == 0:
                continue
            slots = block.slots[: 1 if self.states[group] else len(text) % size]
            if slots[-1] == (group, text, self.generation) and all(tag[2] == self.generation for tag in slots):
                self.begun[group, text] = slots

    def local_hit(self, live, limit):
        lengths = range(limit, 0, -1)
        return next((n for n in lengths if n % self.model.hit_step == 0 and self.resumable(live, n)), 0)

    def resumable(self, live, length):
        return all(
            self.has(live, group, position, length)
            for group, spec in enumerate(self.oracle.groups)
            for position in spec.needed(length)
        ) and all(self.has_proof(live, group, length) for group in self.groups)

    def has(self, live, group, position, length):
        end = min(length, (position + 1) * self.sizes[group])
        return (group, live.lineage[:end]) in (self.begun if end % self.sizes[group] else self.cached)

    def has_proof(self, live, group, length):
        """The piece after the hit is there too, for a draft head."""
        margin = self.model.margins[group]
        return not margin or self.has(live, group, length // self.sizes[group], length + margin)

    # -- block tables -------------------------------------------------------------------------------------------------

    def needed(self, length):
        return tuple(group.needed(length) for group in self.oracle.groups)

    def admit(self, live, local, resume):
        """Allocate what token `resume` reads, out of the cache up to `local`. What of it nobody has written yet."""
        unwritten = set()
        live.weights = self.generation
        live.others.clear()
        for group, positions in enumerate(self.needed(resume)):
            shared = {p for p in positions if p in self.needed(local)[group] and (p + 1) * self.sizes[group] <= local}
            others = {(self.generation, group, position) for position in shared} - live.filled
            live.settled |= others
            live.others |= {part[1:] for part in others}
            for position in sorted(shared):
                text = live.lineage[: (position + 1) * self.sizes[group]]
                live.table[group][position] = self.hold(self.cached[group, text])
        for group, positions in enumerate(self.needed(resume)):
            for position in sorted(positions - set(live.table[group])):
                live.table[group][position] = block = self.take(group)
                unwritten |= self.start_from_copy(live, group, position, block, local, resume)
        live.num_computed = resume
        return unwritten

    def start_from_copy(self, live, group, position, block, local, resume):
        size = self.sizes[group]
        if local and (local - 1) // size == position and local % size:
            slots = self.begun[group, live.lineage[:local]]
            block.slots[: len(slots)] = slots
            if local == resume:
                return set()
        return {(group, position)}

    def grow(self, live, end):
        """Blocks for the tokens up to `end`; None when there is no room."""
        new = [
            (group, position)
            for group, size in enumerate(self.sizes)
            for position in range(live.num_computed // size, -(-end // size))
            if position not in live.table[group]
        ]
        if len(new) > len(self.free):
            return None
        for group, position in new:
            live.table[group][position] = self.take(group)
        return new

    def fill(self, live, end):
        for token in range(live.num_computed, end):
            self.compute(live, token)
        for group, size in enumerate(self.sizes):
            blocks = range(live.num_computed // size, end // size)
            live.filled |= {(live.weights, group, position) for position in blocks}
        live.num_computed = end
        self.cache(live)

    def slide(self, live):
        """The engine gives back what no later token reads."""
        for group, positions in enumerate(live.table):
            own = {live.num_computed // self.sizes[group]}
            first = min(self.oracle.groups[group].needed(live.num_computed) | own)
            for position in [position for position in positions if position < first]:
                self.release(positions.pop(position))

    def lend(self, live, group):
        """A copy of the state after the last computed token."""
        position = (live.num_computed - 1) // self.sizes[group]
        return Block(list(live.table[group][position].slots), lent=True)
