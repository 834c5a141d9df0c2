"""A pool of objects by name, in shards, that knows what belongs under each name."""

from kvcore.group_runs import plus
from kvcore.planner import Planner
from kvcore.runs import from_blocks
from tests.kvcore.attention_oracle import as_sets
from tests.kvcore.engine_world import right
from tests.kvcore.pool_objects import kinds_of, objects_of


class SharedPool:
    """`pool` has the shards of each key; a key is (generation of the weights, index in `GroupRuns`, text)."""

    def __init__(self, model, num_ranks):
        self.model = model
        self.planner = Planner(model)
        self.kinds = kinds_of(model)
        self.num_ranks = num_ranks
        self.pool = {}
        self.ever_put = set()

    def key(self, live, generation, index, position):
        return (generation, index, live.name(index, position)[1])

    def present(self, key):
        """All shards of it."""
        return len(self.pool.get(key, ())) == self.num_ranks

    def put(self, key, rank, content):
        generation, index, text = key
        assert content == right(self.kinds, index, text, generation), f"wrong content under {key}"
        self.pool.setdefault(key, {}).setdefault(rank, content)
        self.ever_put.add(key)

    def evict(self, keys):
        for key, rank in keys:
            del self.pool[key][rank]

    def put_by_others(self, lineage, length, generation=0):
        """An engine of the same settings has stored this prefix, with a state and its tails wherever a hit may end."""
        for index, positions in enumerate(as_sets(self.written_by(length))):
            for position in positions:
                text = lineage[: self.kinds[index].end(position)]
                content = right(self.kinds, index, text, generation)
                self.pool.setdefault((generation, index, text), dict.fromkeys(range(self.num_ranks), content))
                self.ever_put.add((generation, index, text))

    def written_by(self, length):
        """All that a writer of so many tokens can store; tails come with states, or from a writer unlike ours."""
        model = self.model
        kept = self.planner.store(0, length, length)
        for end in range(model.hit_step, length + 1, model.hit_step):
            for group in range(len(model.groups)):
                if not model.groups[group].positional:
                    kept = plus(kept, self.planner.store_state(group, end, length))
        if any(kind.is_state for kind in self.kinds):
            return kept
        tails = (from_blocks(positions) for positions in objects_of(model, length)[len(model.groups) :])
        return (*kept[: len(model.groups)], *tails)
