"""A load that left nothing holds other loads back, but not for ever: its request may not be considered for long."""

from types import SimpleNamespace

import pytest
from kvconnector.jobs import Ended

from kvcore.keys import Namespace
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.spec import FullAttention, ModelSpec
from tests.seam.mirror import Lookups, Pins

pytestmark = pytest.mark.engine

BLOCK = 16
POLICY = PoolPolicy(lookup_deadline_ns=100, offer_ttl_ns=1_000)


class Engine:
    """A scheduler half on a clock that is set by hand; the pool holds everything."""

    def __init__(self):
        from kvconnector.keys import KeySpace
        from kvconnector.scheduler import SchedulerHalf

        self.now_ns, self.lookups = 0, Lookups()
        clock = SimpleNamespace(now_ns=lambda: self.now_ns)
        planner = Planner(ModelSpec((FullAttention(BLOCK),)))
        self.half = SchedulerHalf(planner, POLICY, KeySpace(Namespace("n"), BLOCK, 1), self.lookups, clock)
        self.half.bind_gpu_block_pool(Pins())

    def request(self, name):
        hashes = [f"{name}{block}".encode() for block in range(4)]
        return SimpleNamespace(
            request_id=name, num_prompt_tokens=64, num_tokens=64, num_computed_tokens=0, block_hashes=hashes
        )

    def consider(self, request):
        answer = self.half.get_num_new_matched_tokens(request, 0)
        for asker, lookup, _ in self.lookups.asked:
            while lookup.dialogue.open:
                lookup.dialogue.answered(lookup.dialogue.question)
            self.lookups.answered.append((asker, lookup))
        self.lookups.asked.clear()
        return answer

    def fail_load(self, request):
        """Of all its blocks."""
        self.consider(request)
        assert self.consider(request) == (48, True)
        self.half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 48)
        output = SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=None)
        (job,) = self.half.build_connector_meta(output).loads
        self.half.update_connector_output(SimpleNamespace(finished=[Ended(job.job_id, 1, (0, 1, 2))]))


def test_others_compute_when_it_is_not_seen_for_as_long_as_an_offer_stands():
    engine = Engine()
    engine.fail_load(engine.request("a"))
    other = engine.request("b")
    engine.consider(other)
    assert engine.consider(other) == (None, False)
    engine.now_ns = 1_000
    assert engine.consider(other) == (None, False)
    engine.now_ns = 1_001
    engine.consider(other)
    assert engine.consider(other) == (0, False)
