"""Mode `exact`: the hit length against every length tried in turn, one token at a time, on the models of this folder.

The answer is built from which tokens a token reads (`attention_oracle`), a draft head's next piece, and what each key
holds; draft heads, context parallelism, scratch groups and hits inside blocks included. No formula of kvcore is used.
"""

import random
from dataclasses import dataclass

import pytest

from kvcore.engine.model import Side
from kvcore.spec import Recurrent
from tests.differential.random_models import random_model, random_presence
from tests.differential.test_differences import exact_hit_len
from tests.kvcore.attention_oracle import attention_of

pytestmark = pytest.mark.slow

NUM_MODELS, PATTERNS = 4_000, 5  # 20,000 cases


@dataclass(frozen=True)
class Oracle:
    """A model and what each group has, as lengths in tokens up to which there is a key."""

    model: object
    num_tokens: int
    keys: tuple[frozenset[int], ...]

    def hit_len(self):
        step = self.model.hit_step
        lengths = (length for length in range(self.num_tokens - 1, 0, -1) if length % step == 0)
        return next((length for length in lengths if self.resumable(length)), 0)

    def resumable(self, length):
        groups = range(len(self.model.groups))
        return all(self.has(group, self.reads(group, length)) for group in groups if self.model.groups[group].cacheable)

    def reads(self, group, length):
        """Tokens of the group that token `length` reads, and those of the piece that proves a draft layer's last."""
        spec = self.model.groups[group]
        tokens = set(attention_of(spec).reads(length))
        if self.is_draft(spec):
            piece = self.model.hit_step if self.model.splits_blocks else spec.block_size
            tokens |= set(range(length, length // piece * piece + piece))
        return tokens

    def is_draft(self, spec):
        return not isinstance(spec, Recurrent) and any(self.model.groups[i] == spec for i in self.model.eagle_groups)

    def has(self, group, tokens):
        """A state is what it is after its last token; anything else in a block is there up to the length of its key."""
        spec = self.model.groups[group]
        if isinstance(spec, Recurrent):
            return all(token + 1 in self.keys[group] for token in tokens)
        return tokens <= self.held(group, spec.block_size)

    def held(self, group, size):
        return {token for key in self.keys[group] for token in range((key - 1) // size * size, key)}


class WithoutProof(Oracle):
    """Wrong: a draft head needs nothing more."""

    def is_draft(self, spec):
        return False


class PastTheEnd(Oracle):
    """Wrong: all tokens may be a hit."""

    def hit_len(self):
        return Oracle(self.model, self.num_tokens + 1, self.keys).hit_len()


class NoTails(Oracle):
    """Wrong: only whole blocks hold anything."""

    def held(self, group, size):
        return {token for key in self.keys[group] if key % size == 0 for token in range(key - size, key)}


def answers(oracle, num_models, seed=7):
    rng = random.Random(seed)
    for _ in range(num_models):
        model = random_model(rng, Side.GPU).model
        for _ in range(PATTERNS):
            presence = random_presence(rng, model)
            keys = tuple(frozenset((unit + 1) * model.hashed_step for unit in units) for units in presence.units)
            case = (model, presence)
            yield case, exact_hit_len(model, presence), oracle(model, presence.num_tokens, keys).hit_len()


def test_hit_equals_brute_force():
    hits = set()
    for case, ours, expected in answers(Oracle, NUM_MODELS):
        assert ours == expected, case
        hits.add(expected)
    assert len(hits) > 80, "few different answers: the patterns are dull"


@pytest.mark.parametrize("wrong", [WithoutProof, PastTheEnd, NoTails])
def test_control_a_wrong_oracle_is_rejected(wrong):
    assert any(ours != expected for _, ours, expected in answers(wrong, 500))
