"""Random models of 1 to 6 groups, and what a cache may have of a sequence. `vllm_models` builds the same for vLLM."""

import math
import random
from dataclasses import dataclass, replace

from kvcore.engine.hit import Tails
from kvcore.engine.model import Side, flagged_or_all, hits_end_inside_blocks
from kvcore.runs import from_blocks
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, ModelSpec, Recurrent, Scratch, SlidingWindow
from kvcore.types import Runs

SIZES = ((4,), (1, 2, 4), (2, 4, 8), (2, 3, 6), (3, 9), (4, 6), (16, 64), (16, 32, 64), (5, 10))
"""Block sizes that one model mixes."""


@dataclass(frozen=True)
class VllmModel:
    """A model as kvcore sees it, and what vLLM needs to know besides."""

    model: ModelSpec
    unscaled: tuple[GroupSpec, ...]
    """The groups before context parallelism."""
    context_parallel_size: int
    flagged: frozenset[int]
    """Groups that vLLM is told hold draft layers."""
    use_eagle: bool
    uniform: frozenset[int]
    """Groups that are wrapped as several layers of one type."""


# -- random models ----------------------------------------------------------------------------------------------------


def random_model(rng, side):
    family = rng.choice(["mixed"] * 6 + ["single", "chunked", "partial", "partial", "sharded", "windows", "windows"])
    groups, cp = FAMILIES[family](rng, side)
    scaled = tuple(_scaled(group, cp) for group in groups)
    use_eagle = rng.random() < 0.5 or family == "windows"
    draftable = [index for index, group in enumerate(groups) if group.cacheable and not isinstance(group, ChunkedLocal)]
    flagged = frozenset(index for index in draftable if rng.random() < 0.4) if use_eagle else frozenset()
    if any(isinstance(group, ChunkedLocal) for group in groups):
        use_eagle = bool(flagged)  # vLLM fails when it flags them all
    marked = flagged_or_all(flagged, len(groups)) if use_eagle else frozenset()
    unit = _hash_unit(rng, scaled, family)
    inside = len(groups) > 1 and hits_end_inside_blocks(scaled, unit, cp)
    model = ModelSpec(scaled, marked, unit, unit if inside else None)
    uniform = frozenset(index for index in range(len(groups)) if side is Side.POOL and rng.random() < 0.2)
    return VllmModel(model, groups, cp, flagged, use_eagle, uniform)


def _mixed(rng, side):
    sizes = rng.choice(SIZES)
    kinds = ["full", "window", "window", "recurrent", "scratch"]
    return _groups(rng, side, kinds, sizes, rng.randint(1, 6)), 1


def _single(rng, side):
    group = _group(rng, side, rng.choice(["full", "window", "recurrent", "chunked"]), rng.choice((1, 2, 4, 16)))
    return (group,) * (1 if rng.random() < 0.6 else rng.randint(2, 3)), 1


def _windows(rng, side):
    """Several windows, mostly of draft layers: where proofs get out of date."""
    return _groups(rng, side, ["window", "window", "window", "full"], rng.choice(SIZES[:4]), rng.randint(2, 4)), 1


def _chunked(rng, side):
    size = rng.choice((2, 4, 16))
    groups = _groups(rng, side, ["full", "window", "chunked", "recurrent"], (size,), rng.randint(0, 4))
    return (*groups, _group(rng, side, "chunked", size)), 1


def _partial(rng, side):
    """Full and recurrent groups, and whatever has blocks of one hash unit."""
    unit, cp = rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
    sizes = tuple(unit * factor for factor in rng.choice(((1, 2), (2, 4), (1, 2, 4), (3, 6), (2,), (1,))))
    groups = _groups(rng, side, ["full", "full", "recurrent"], sizes, rng.randint(1, 4))
    groups += (_group(rng, side, "recurrent", rng.choice(sizes)),)
    if rng.random() < 0.3:
        groups += (_replicated(_group(rng, side, "window", unit)),)
    if rng.random() < 0.2:
        groups += (_group(rng, side, "scratch", unit),)
    return groups, cp


def _sharded(rng, side):
    """Decode context parallelism: full attention sharded, recurrent groups and drafts not."""
    sizes = rng.choice(SIZES)
    groups = _groups(rng, side, ["full", "full", "recurrent"], sizes, rng.randint(1, 4))
    if rng.random() < 0.5:
        groups += (_replicated(_group(rng, side, "window", rng.choice(sizes))),)
    if rng.random() < 0.3:
        groups += (_replicated(_group(rng, side, "full", rng.choice(sizes))),)
    return groups, rng.choice((2, 2, 3))


FAMILIES = {
    "mixed": _mixed,
    "single": _single,
    "windows": _windows,
    "chunked": _chunked,
    "partial": _partial,
    "sharded": _sharded,
}


def _groups(rng, side, kinds, sizes, count):
    groups = [_group(rng, side, rng.choice(kinds), rng.choice(sizes)) for _ in range(count)]
    if not any(group.cacheable for group in groups):
        groups.append(_group(rng, side, "full", rng.choice(sizes)))
    if len(groups) > 1 and rng.random() < 0.3:
        groups[-1] = rng.choice([group for group in groups if group.cacheable])
    return tuple(groups)


def _group(rng, side, kind, size):
    layout = rng.choice(["", "", "wide", "latent"])
    match kind:
        case "full":
            return FullAttention(size, layout=layout if side is Side.GPU or rng.random() < 0.8 else "sink")
        case "window":
            window = rng.choice(
                [1, 2, 2, rng.randint(2, 4 * size), rng.randint(2, 4 * size), rng.randint(2, 12 * size)]
            )
            return SlidingWindow(size, window, rng.choice((0,) * 7 + (1, 2, size)), layout=layout)
        case "recurrent":
            return Recurrent(size)
        case "chunked":
            return ChunkedLocal(size, rng.choice([size * rng.randint(1, 5), rng.randint(1, 5 * size)]))
    return Scratch(size)


def _replicated(group):
    return replace(group, layout=f"{group.layout} replicated")


def _scaled(group, cp):
    return replace(group, block_size=group.block_size * cp) if is_sharded(group) else group


def is_sharded(group):
    return isinstance(group, FullAttention) and not group.layout.endswith("replicated")


def _hash_unit(rng, groups, family):
    """Mostly the greatest common divisor; vLLM's single group hashes its own block, which the connector need not."""
    sizes = [group.block_size for group in groups if group.cacheable]
    unit = math.gcd(*sizes)
    if len(groups) == 1 or rng.random() < 0.7:
        return unit
    return rng.choice([divisor for divisor in range(1, unit + 1) if unit % divisor == 0])


def as_told(model):
    """A model whose draft groups vLLM is told of one by one."""
    drafts = model.eagle_groups
    return VllmModel(model, model.groups, 1, drafts, bool(drafts), frozenset())


# -- random presence --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Presence:
    """What the groups of a model have of a sequence of `num_tokens`: keys by hash unit, and the same in kvcore's form.

    Unit u is the key of the tokens [0, (u + 1) * unit).
    """

    num_tokens: int
    units: tuple[frozenset[int], ...]
    blocks: tuple[Runs, ...]
    tails: tuple[Tails, ...]


def random_presence(rng, model):
    """Mostly what some writer left: all of it, or what a few boundaries need, less a few keys."""
    num_tokens = rng.randint(0, rng.choice((3, 6, 12)) * model.alignment + 3)
    shared = rng.choice(["all", "all", "boundaries", "boundaries", "prefix", "holes", "any"])
    lengths = _boundaries(rng, model, num_tokens)
    units = [_units(rng, model, group, num_tokens, shared, lengths) for group in range(len(model.groups))]
    return presence_of(model, num_tokens, units)


def presence_of(model, num_tokens, units):
    unit = model.hashed_step
    blocks = [
        from_blocks((u + 1) * unit // spec.block_size - 1 for u in keys if (u + 1) * unit % spec.block_size == 0)
        for spec, keys in zip(model.groups, units, strict=True)
    ]
    tails = [
        tuple((u + 1) * unit for u in sorted(keys) if (u + 1) * unit % spec.block_size)
        for spec, keys in zip(model.groups, units, strict=True)
    ]
    return Presence(num_tokens, tuple(map(frozenset, units)), tuple(blocks), tuple(tails))


def _units(rng, model, group, num_tokens, shared, lengths):
    unit, size = model.hashed_step, model.groups[group].block_size
    count = num_tokens // unit
    kind = shared
    if shared == "any" or rng.random() < 0.1:
        kind = rng.choice(["all", "prefix", "tail", "boundaries", "holes", "few", "none"])
    if not model.groups[group].cacheable or kind == "none":
        return set()
    ends = {u for u in range(count) if (u + 1) * unit % size == 0}
    everything = ends | {u for u in range(count) if model.splits_blocks and rng.random() < 0.3}
    cut = rng.randint(0, count)
    present = {
        "all": lambda: everything,
        "prefix": lambda: {u for u in everything if u < cut},
        "tail": lambda: {u for u in everything if u >= cut},
        "boundaries": lambda: _at_boundaries(rng, model, group, lengths) & set(range(count)),
        "holes": lambda: {u for u in everything if rng.random() < 0.8},
        "few": lambda: {u for u in everything if rng.random() < 0.3},
    }[kind]()
    lost = rng.choice((0, 0, 0, 0, 1, 3))
    return present - {rng.randrange(max(1, count)) for _ in range(lost)}


def _boundaries(rng, model, num_tokens):
    highest = num_tokens // model.hit_step
    return [rng.randint(0, highest) * model.hit_step for _ in range(rng.randint(1, 3))]


def _at_boundaries(rng, model, group, lengths):
    """The units of what a writer keeps for hits at these lengths, now and then without the piece that proves one."""
    unit, size = model.hashed_step, model.groups[group].block_size
    present = set()
    for length in lengths:
        proven = rng.random() < 0.7
        first, last = model.proof_blocks(group, length) if proven else model.groups[group].needed_blocks(length)
        present |= {(block + 1) * size // unit - 1 for block in range(first, last)}
        end = length + (model.margins[group] if proven else 0)
        if end % size:
            present.add(end // unit - 1)
    return present


def cacheable(subject):
    """The groups that vLLM's connector is given."""
    return [index for index, group in enumerate(subject.model.groups) if group.cacheable]


def subjects(side, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng, random_model(rng, side)
