"""What is told to the world about stored blocks, and what the world can know from it: vLLM's KV events, as values.

The fields are those of vLLM 0.32's `BlockStored` and `BlockRemoved` (distributed/kv_events.py), under its names; the
driver publishes them. A block's parent is the block before it in its prompt, whoever stored that one and whenever: an
event that names the block written before it instead hangs a prompt whose blocks were in part there already on the
wrong branch of every listener's tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from kvcore.errors import require
from kvcore.hashing import ExtraKey
from kvcore.keys import BlockHash
from kvcore.types import GroupId, Run, Runs

BlockExtras: TypeAlias = tuple[ExtraKey, ...] | None
"""The tagged extra keys that a block's hash covers; None without any."""

KeysOf: TypeAlias = Callable[[Run], Sequence[BlockExtras]]
"""The extra keys of each block of a run of a prompt: `kvcore.hashing.extra_keys`, or the engine's own."""


def no_extra_keys(run: Run) -> Sequence[BlockExtras]:
    """Of a prompt that is its tokens and nothing else."""
    return [None] * (run[1] - run[0])


class Medium(Enum):
    """Where blocks are; the values are vLLM's."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class Place:
    """Which cache an event is about."""

    medium: Medium
    group: GroupId


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Successive blocks of a prompt are there now; `parent_block_hash` names the block before them, None at its start.

    `token_ids` are the tokens of all of them. `extra_keys` has one entry per block, tagged, as the hash covers them:
    without tags, an adapter X and a salt X look the same. `untagged` is vLLM's published form.
    """

    place: Place
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_keys: tuple[BlockExtras, ...]
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are gone."""

    place: Place
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block of every place is gone."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Prompt:
    """What events say of a prompt: its tokens, and one hash per full block of the group, in order.

    Nothing is copied but what events are about, so that one of a million tokens costs no more than its new blocks.
    """

    token_ids: Sequence[int]
    block_size: int
    block_hashes: Sequence[BlockHash]
    keys_of: KeysOf = no_extra_keys
    lora_name: str | None = None

    def __post_init__(self) -> None:
        full = len(self.token_ids) // self.block_size
        require(len(self.block_hashes) == full, "block_hashes", self.block_hashes, f"{full}, one for each full block")


def stored_events(prompt: Prompt, runs: Runs, place: Place) -> tuple[BlocksStored, ...]:
    """One event for each run of the prompt's blocks that was stored. Raises InvalidArgument for blocks it lacks."""
    return tuple(_stored_event(prompt, run, place) for run in runs)


def _stored_event(prompt: Prompt, run: Run, place: Place) -> BlocksStored:
    start, end = run
    require(0 <= start < end <= len(prompt.block_hashes), "run", run, f"full blocks, of {len(prompt.block_hashes)}")
    return BlocksStored(
        place=place,
        block_hashes=tuple(prompt.block_hashes[start:end]),
        parent_block_hash=prompt.block_hashes[start - 1] if start else None,
        token_ids=tuple(prompt.token_ids[start * prompt.block_size : end * prompt.block_size]),
        block_size=prompt.block_size,
        extra_keys=tuple(prompt.keys_of(run)),
        lora_name=prompt.lora_name,
    )


def removed_events(prompt: Prompt, runs: Runs, place: Place) -> tuple[BlocksRemoved, ...]:
    """One event for each run of the prompt's blocks that is gone."""
    return tuple(BlocksRemoved(place, tuple(prompt.block_hashes[start:end])) for start, end in runs)


def untagged(keys: Sequence[BlockExtras]) -> list[tuple[object, ...] | None] | None:
    """The `extra_keys` that vLLM publishes: bare adapter names, salts and digests, and pairs for multi-modal items."""
    bare = [None if block is None else tuple(map(_bare, block)) for block in keys]
    return bare or None


def _bare(key: ExtraKey) -> object:
    return key[1:] if key[0] == "mm" else key[1]


_Content: TypeAlias = tuple[tuple[int, ...], BlockExtras]
_Child: TypeAlias = tuple[BlockHash | None, _Content]
"""A block under its parent."""


@dataclass(slots=True)
class EventIndex:
    """What a listener knows of one publisher's blocks in one place, without knowing how it hashes.

    A tree over hashes, walked by content, as routers do that follow events (NVIDIA Dynamo's radix tree of KV events).
    Blocks may come before their parents; until a parent is there too, nothing behind it counts.
    """

    place: Place
    _children: dict[_Child, BlockHash] = field(default_factory=dict)
    _known: dict[BlockHash, _Child] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, event: KVEvent) -> None:
        """Learn from an event; those about another place say nothing here."""
        match event:
            case AllBlocksCleared():
                self._children.clear()
                self._known.clear()
            case BlocksStored() if event.place == self.place:
                self._add(event)
            case BlocksRemoved() if event.place == self.place:
                for block_hash in event.block_hashes:
                    self._remove(block_hash)
            case _:
                pass

    def prefix_blocks(self, token_ids: Sequence[int], block_size: int, keys_of: KeysOf = no_extra_keys) -> int:
        """How many leading full blocks of a prompt are there."""
        num_blocks = len(token_ids) // block_size
        parent: BlockHash | None = None
        for block, keys in enumerate(keys_of((0, num_blocks))):
            content = (tuple(token_ids[block * block_size : (block + 1) * block_size]), keys)
            parent = self._children.get((parent, content))
            if parent is None:
                return block
        return num_blocks

    def _add(self, event: BlocksStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for index, (block_hash, keys) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
            child = (parent, (event.token_ids[index * size : (index + 1) * size], keys))
            self._remove(block_hash)
            self._children[child] = block_hash
            self._known[block_hash] = child
            parent = block_hash

    def _remove(self, block_hash: BlockHash) -> None:
        child = self._known.pop(block_hash, None)
        if child is not None:
            del self._children[child]
