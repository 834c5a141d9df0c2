"""What enters the GPU's prefix cache, against vLLM's KVCacheManager over its real BlockPool, and what is hit there.

Each case is one sequence that computes, is preempted, ends or goes on beside others of the same content; after each of
its steps the keys of the real pool are compared, and before its first one the hit.
"""

from dataclasses import dataclass, replace

import pytest

from kvcore.engine import cached, hit, masks, states
from kvcore.engine.cached import CachedSequence
from kvcore.engine.hit import Found, find
from kvcore.engine.masks import cached_len
from kvcore.engine.model import EngineModel, Side
from kvcore.engine.writer import Beginning, Step, Writer
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from kvcore.units import align_down
from tests.differential.random_models import as_told, presence_of, subjects
from tests.differential.vllm_cache import Prompt, VllmCache, chunk_end
from tests.differential.vllm_models import engine_of

pytestmark = pytest.mark.engine

NUM_MODELS, CHAINS, SEQUENCES = 2_500, 3, 3  # 22,500 sequences


def random_writer(rng, subject):
    model = subject.model
    sparse = any(isinstance(spec, SlidingWindow | Recurrent) for spec in model.groups)
    intervals = (None, 0, 0, model.alignment, rng.randint(1, 4) * model.alignment) if sparse else (None, 0)
    states_draft = any(isinstance(model.groups[g], Recurrent) for g in model.eagle_groups)
    most = model.alignment - 1 if subject.use_eagle and not states_draft else 0
    return Writer(
        engine_of(subject, Side.GPU),
        retention=rng.choice(intervals),
        num_reprefilled=min(most, rng.choice((0, 0, 1, rng.randint(0, most)))),
        num_draft_states=rng.choice((0, 0, 1, 3)),
        checkpoint_step=rng.choice((None, 1, model.hashed_step, 2 * model.hashed_step)),
        stops_at_junctions=rng.random() < 0.5,
    )


@dataclass
class Running:
    """One sequence in both worlds."""

    prompt: Prompt
    request: object
    ours: CachedSequence

    def keys(self, model):
        return {
            (group, self.prompt.stream_at(length), length // model.hashed_step - 1)
            for group, entries in enumerate(self.ours.entries)
            for length in lengths_of(entries, model.groups[group].block_size)
        }


def lengths_of(entries, size):
    return [*((block + 1) * size for start, end in entries.blocks for block in range(start, end)), *entries.tails]


class Chain:
    """Sequences of related prompts, one after the other, in one cache."""

    def __init__(self, rng, cache):
        self.rng, self.cache, self.model = rng, cache, cache.subject.model
        self.all, self.running, self.finished_keys = [], [], set()

    def keys(self):
        return self.finished_keys.union(*(running.keys(self.model) for running in self.running))

    def present(self, prompt):
        """What of our keys a prompt can find, in kvcore's form."""
        unit = self.model.hashed_step
        units = [set() for _ in self.model.groups]
        for group, stream, index in self.keys():
            if prompt.stream_at((index + 1) * unit) == stream:
                units[group].add(index)
        return presence_of(self.model, prompt.num_tokens, units)

    def find(self, prompt, num_tokens):
        found = self.present(prompt)
        hashed_len = align_down(num_tokens, self.model.hashed_step)
        return find(self.cache.writer.engine, found.blocks, num_tokens - 1, hashed_len, found.tails)

    def next_prompt(self):
        """The same again, a longer one, one that leaves another one's prefix, or another one."""
        rng, num_tokens = self.rng, self.rng.randint(1, self.rng.choice((2, 4, 6)) * self.model.alignment + 2)
        stream = len(self.all)
        if not self.all or rng.random() < 0.1:
            return Prompt(stream, num_tokens)
        other, known = rng.choice(self.all)
        if rng.random() < 0.3:
            return other
        base = other.stream if other.parent is None else other.parent
        limit = known if other.parent is None else other.shared_len
        shared_len = rng.choice((limit, other.num_tokens, rng.randint(0, limit)))
        return Prompt(stream, shared_len + rng.randint(1, 2 * self.model.alignment), base, min(shared_len, limit))

    def admit(self):
        """A new sequence or a preempted one: it, (ours, vLLM's) lookup, the hit of its first step, what it loads."""
        preempted = [running for running in self.running if self.rng.random() < 0.2]
        if preempted:
            running = preempted[0]
            self.free(running)
            prompt, request = running.prompt, running.request
        else:
            prompt = self.next_prompt()
            request = self.cache.request(prompt, f"{len(self.all)}")
        blocks, *theirs = self.cache.find(request)
        ours = self.find(prompt, request.num_tokens)
        loaded_len = self.loaded_len(request.num_tokens - ours.hit_len)
        beginning = Beginning(prompt.num_tokens, ours.hit_len, loaded_len, ours.junction)
        running = Running(prompt, request, CachedSequence(self.cache.writer, beginning))
        self.running.append(running)
        self.all.append((prompt, prompt.num_tokens))
        return running, (ours, Found(*theirs)), (blocks, ours.hit_len), loaded_len

    def loaded_len(self, rest):
        return self.rng.randint(0, (rest - 1) // self.model.hit_step) * self.model.hit_step * (self.rng.random() < 0.15)

    def free(self, running):
        self.running.remove(running)
        self.finished_keys |= running.keys(self.model)
        self.cache.free(running.request)

    def steps(self, running, start):
        """A random chunked prefill, then decode steps with and without drafts; ends anywhere."""
        rng, request, model = self.rng, running.request, self.model
        budget = rng.choice((1, 3, model.hashed_step, model.alignment, 3 * model.alignment, 10_000))
        aligned = rng.random() < 0.7 and any(isinstance(spec, Recurrent) for spec in model.groups)
        stop, in_flight = rng.choice((0.02, 0.2)), 0
        while start < request.num_tokens:
            num_new = min(request.num_tokens - start, rng.randint(1, budget) if rng.random() < 0.5 else budget)
            end = chunk_end(self.cache, request, start, num_new, budget) if aligned else start + num_new
            if end <= start or rng.random() < 0.05:
                end = self.end_near_the_prompt_s(running, start, start + num_new)
            yield Step(start, end, request.num_tokens, in_flight)
            in_flight = rng.choice((0, 0, end - start, rng.randint(0, end)))
            start = end
            if rng.random() < stop:
                return
        yield from self.decode_steps(start)

    def end_near_the_prompt_s(self, running, start, otherwise):
        """Of a sequence that is computed again with what it had generated."""
        end = running.prompt.num_tokens + self.rng.randint(0, 2 * self.model.hashed_step)
        return end if start < end <= running.request.num_tokens else otherwise

    def decode_steps(self, start):
        """Fewer drafts than a state's block has tokens, as vLLM takes for granted."""
        rng = self.rng
        most = min((spec.block_size for spec in self.model.groups if isinstance(spec, Recurrent)), default=4) - 1
        num_drafts, lag = min(most, rng.choice((0, 0, 1, 3))), rng.choice((0, 0, 0, 1))
        for _ in range(rng.choice((0, 3, 12))):
            yield Step(start, start + 1 + num_drafts, start + 1 - lag, lag)
            start += 1 + rng.randint(0, num_drafts) * (not lag)


def answers(num_models, seed=41):
    """(case, ours, vLLM's): hits, and keys after each step."""
    for rng, subject in subjects(Side.GPU, num_models, seed):
        writer = random_writer(rng, subject)
        cache = VllmCache(subject, writer, num_blocks(subject))
        for _ in range(CHAINS):
            yield from chain_answers(rng, cache)


def num_blocks(subject):
    per_sequence = sum(10 * subject.model.alignment // spec.block_size + 40 for spec in subject.model.groups)
    return (SEQUENCES + 1) * per_sequence


def chain_answers(rng, cache):
    chain = Chain(rng, cache)
    for _ in range(SEQUENCES):
        running, (ours, theirs), first_hit, loaded_len = chain.admit()
        case = (cache.subject.model, cache.writer, [running.prompt for running in chain.running])
        yield ("hit", case), ours, theirs
        first = True
        for step in chain.steps(running, ours.hit_len + loaded_len):
            running.ours.compute(step)
            cache.compute(running.request, step, rng.choice((0, 1)), *((first_hit, loaded_len) if first else ()))
            first = False
            yield ("keys", step, case), chain.keys(), cache.entries()
        if rng.random() < 0.5:
            chain.free(running)
    for running in list(chain.running):
        chain.free(running)
    yield ("end", case), chain.keys(), cache.entries()
    cache.reset()


def test_keys_and_hits_equal_vllm_s():
    num_sequences, seen, hits = 0, set(), set()
    for case, ours, theirs in answers(NUM_MODELS):
        assert ours == theirs, case
        if case[0] == "hit":
            num_sequences += 1
            hits.add(min(ours.hit_len, 200))
        else:
            seen.add(frozenset(ours))
    assert num_sequences >= 20_000
    assert len(hits) > 60 and len(seen) > 20_000, "few different answers: the sequences are dull"


CHUNKED = ModelSpec((FullAttention(8), Recurrent(4), SlidingWindow(4, 2)), frozenset({2}), hash_unit=1)
SPLIT = ModelSpec((FullAttention(8), Recurrent(8)), hash_unit=2, hit_unit=2)
SELDOM = {
    "a prompt's state takes the block of a checkpoint": (
        (CHUNKED, {"checkpoint_step": 2}, Prompt(0, 17), [Step(0, 17, 17), Step(17, 19, 17, 1)]),
        {16},
    ),
    "a checkpoint waits for the end of what is computed again": (
        (SPLIT, {"checkpoint_step": 2, "retention": 0}, Prompt(0, 13), [Step(0, 13, 30)]),
        set(),
    ),
}
"""A sequence, and the lengths of the states that it enters."""


@pytest.mark.parametrize("name", SELDOM)
def test_keys_equal_vllm_s_where_random_sequences_seldom_come(name):
    (model, settings, prompt, steps), states_entered = SELDOM[name]
    writer = Writer(engine_of(as_told(model), Side.GPU), **settings)
    cache = VllmCache(as_told(model), writer, num_blocks=100)
    running = Running(prompt, cache.request(prompt, "r"), CachedSequence(writer, Beginning(prompt.num_tokens)))
    for step in steps:
        running.ours.compute(step)
        cache.compute(running.request, step)
        assert running.keys(model) == cache.entries()
    assert set(lengths_of(running.ours.entries[1], model.groups[1].block_size)) == states_entered


def differs(num_models=600):
    """Whether a wrong model is found out, be it that it does not get to its end."""
    try:
        return any(ours != theirs for _, ours, theirs in answers(num_models, seed=42))
    except (AssertionError, KeyError):
        return True


def nothing(*_):
    return None


def left_without_key(table):
    """The copy of a state inside a block is forgotten."""
    if table._tail_block is not None:
        table._blocks[table._tail_block] = set()
    table._tail_block = None


def unread_given_up(table, step):
    """Retained tokens are not."""
    spec = table._writer.engine.specs[table._group]
    if isinstance(spec, SlidingWindow):
        spec = replace(spec, extra_retained_tokens=0)
    table._first_held = max(table._first_held, spec.needed_blocks(step.settled_len)[0])


BOUNDARIES = masks.kept_boundaries
WRONG = {
    "every block is kept": (cached, "reachable_runs", nothing),
    "every state is kept": (states, "reachable_runs", nothing),
    "no waiting for a whole unit": (cached, "cached_len", lambda engine, group, length, num_reprefilled: length),
    "drafts compute nothing again": (cached, "cached_len", lambda *args: cached_len(*args[:3])),
    "windows give up nothing": (cached.BlockTable, "place", nothing),
    "windows give up what they retain": (cached.BlockTable, "place", unread_given_up),
    "what is in flight is given up": (Step, "settled_len", property(lambda step: step.start)),
    "no tail of the prompt": (cached, "prompt_tail", nothing),
    "no state inside a block": (states.StateTable, "_is_prompt_state", lambda table, length: False),
    "a state inside a block is overwritten": (states.StateTable, "_split_tail", left_without_key),
    "no checkpoints": (states.StateTable, "_checkpoint_of", nothing),
    "every checkpoint is kept": (states.StateTable, "_is_retained", lambda table, length: True),
    "states are never given up": (states.StateTable, "_retire", nothing),
    "blocks for drafts stay": (states.StateTable, "_relocate_drafts", nothing),
    "no state of a hit": (states.StateTable, "_admit", nothing),
    "no states at junctions": (Writer, "enters_junctions", False),
    "no junctions": (
        cached,
        "kept_boundaries",
        lambda engine, group, num_prompt, _: BOUNDARIES(engine, group, num_prompt, None),
    ),
    "no junction is noticed": (hit, "Found", lambda hit_len, junction: Found(hit_len, None)),
    "a prompt without a draft head": (EngineModel, "has_drafts", False),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_model_differs_from_vllm(wrong, monkeypatch):
    owner, name, value = WRONG[wrong]
    monkeypatch.setattr(owner, name, value)
    assert differs()


def test_control_the_same_without_a_mistake_does_not():
    assert not differs(100)
