"""Machines, planners and drivers with one mistake each: controls of the rules in test_request_stateful.py."""

from dataclasses import replace

from kvcore.group_runs import plus
from kvcore.memory import BlockMemory
from kvcore.planner import Planner
from kvcore.plans import Lookup, Offer, Wait
from kvcore.request import KVRequest, State
from kvcore.spec import ModelSpec
from tests.kvcore.driver_world import never
from tests.kvcore.pool_world import World


def with_mistake(control):
    if issubclass(control, World):
        return control
    return world_of(planner=control) if issubclass(control, Planner) else world_of(control)


def world_of(machine=KVRequest, planner=Planner):
    def init(self, model, *args, **kwargs):
        World.__init__(self, model, *args, **kwargs)
        self.planner = planner(model)

    return type("Broken", (World,), {"machine": machine, "__init__": init})


# -- machines ---------------------------------------------------------------------------------------------------------


class IgnoresFailedLoads(KVRequest):
    def load_finished(self, ticket, failed, now_ns):
        return super().load_finished(ticket, self.planner.nothing, now_ns)


class BelievesWhatItAsked(KVRequest):
    def lookup_answered(self, ticket, now_ns):
        super().lookup_answered(ticket, now_ns)
        if self._answer:
            self._answer.present = self._answer.dialogue.asked


class OffersTheWholePrompt(KVRequest):
    def consider(self, local_hit_len, num_tokens, now_ns):
        answer = super().consider(local_hit_len, num_tokens, now_ns)
        return Offer(num_tokens - local_hit_len) if isinstance(answer, Offer) and answer.num_tokens else answer


class WaitsForEver(KVRequest):
    def consider(self, local_hit_len, num_tokens, now_ns):
        answer = super().consider(local_hit_len, num_tokens, now_ns)
        is_heard = self._answer is None or self._answer.told or isinstance(answer, Lookup)
        return answer if is_heard else Wait(now_ns + 1)


class ForgetsOldAnswers(KVRequest):
    """An answer that has aged is not offered but asked for again."""

    def _is_stale(self, answer, local_hit_len, now_ns):
        self.state = State.OFFERED
        return super()._is_stale(answer, local_hit_len, now_ns)


class SaysNothingOfUnproven(KVRequest):
    """What a load cannot fill is left as it is."""

    def _plan_load(self, resume_len):
        self._load = replace(super()._plan_load(resume_len), unproven=self.planner.nothing)
        return self._load


class AsksForDenied(KVRequest):
    def _denied(self, local_hit_len, num_tokens, now_ns):
        return self.planner.nothing


class HidesRejections(KVRequest):
    def store_finished(self, ticket, rejected, now_ns):
        super().store_finished(ticket, self.planner.nothing, now_ns)


class CountsReportsTwice(KVRequest):
    def store_finished(self, ticket, rejected, now_ns):
        self._stores.setdefault(ticket, self.decisions.stored)
        super().store_finished(ticket, rejected, now_ns)


class CompletesTwice(KVRequest):
    """A load that has ended still counts as under way."""

    def load_finished(self, ticket, failed, now_ns):
        load = self._load
        valid_len = super().load_finished(ticket, failed, now_ns)
        self._load = load
        return valid_len


class RetriesNever(KVRequest):
    def _unsaved_hits(self, resume_len, now_ns):
        return self.planner.nothing


class RetriesAlways(KVRequest):
    """With each step, whatever the pool has said."""

    def computed(self, num_tokens, now_ns):
        self._owed = plus(self._owed, self.decisions.rejected)
        return super().computed(num_tokens, now_ns)


class StoresAllAtTheEnd(KVRequest):
    """Generated blocks wait for the end, also where a window gives them back before."""

    def computed(self, num_tokens, now_ns):
        return super().computed(min(num_tokens, self.num_prompt_tokens), now_ns)

    def finished(self, num_tokens, now_ns):
        store = self._plan_store(num_tokens, now_ns) if self.state is State.COMPUTING else None
        super().finished(0, now_ns)
        return store


class ForgetsWhatItKeptBack(KVRequest):
    """Takes a local hit for saved, also of blocks that it would have stored at its end."""

    def preempted(self):
        super().preempted()
        self._kept_back = False


class SharesWhatIsForeign(KVRequest):
    """What began before a reset is stored after it."""

    def reset(self):
        super().reset()
        self._is_foreign = False


class StaysForeign(KVRequest):
    """Nothing is shared any more, although it was computed again."""

    def _wait_again(self):
        foreign = self._is_foreign
        super()._wait_again()
        self._is_foreign = foreign


class RemembersOldStores(KVRequest):
    """What was given to the pool before a reset counts as given."""

    def reset(self):
        given = self._given
        super().reset()
        self._given = given


class KeepsBackAfterAReset(KVRequest):
    """What waited for the end waits for it still, in a pool that knows nothing of it."""

    def reset(self):
        kept_back = self._kept_back
        super().reset()
        self._kept_back = kept_back


class StoresThePromptOfOthers(KVRequest):
    """Once preempted it takes no local hit for saved, whoever has computed it."""

    def granted(self, num_tokens, now_ns):
        saved_len = self._saved_len
        load = super().granted(num_tokens, now_ns)
        if self._kept_back:
            self._saved_len = saved_len
        return load


class LosesLateFailures(KVRequest):
    """A load that ends after its request is not looked at."""

    def load_finished(self, ticket, failed, now_ns):
        ended = self.state is State.FINISHED
        return super().load_finished(ticket, self.planner.nothing if ended else failed, now_ns)


class DeniesWhatIsStored(KVRequest):
    """A load that failed counts for as long as it is remembered, though the block was stored since."""

    def store_finished(self, ticket, rejected, now_ns):
        denied, self.experience.denied = self.experience.denied, BlockMemory(1, 1)
        super().store_finished(ticket, rejected, now_ns)
        self.experience.denied = denied


# -- planners ---------------------------------------------------------------------------------------------------------


class KeepsPrefixOfWindow(Planner):
    """Takes all before the first failed block as valid, whatever a window reads."""

    def valid_len(self, resume_len, failed):
        if len(failed) > 1 or not any(failed):
            return super().valid_len(resume_len, failed)
        return min(resume_len, failed[0][0][0] * 2)


class HasNoDrafts(Planner):
    """Proves a hit as if no draft head had layers in the model."""

    def __init__(self, model, retention=None):
        super().__init__(ModelSpec(model.groups, hash_unit=model.hash_unit, hit_unit=model.hit_unit), retention)


class TakesAnyState(Planner):
    """A state of the block is good for any token in it."""

    def usable(self, present, resume_len):
        return present


class StoresStatesByPosition(Planner):
    """As if a recurrent group's block table were append-only."""

    def store(self, stored_len, computed_len, num_prompt_tokens):
        kept = list(super().store(stored_len, computed_len, num_prompt_tokens))
        for index, group in enumerate(self.model.groups):
            if not group.positional and stored_len // group.block_size < computed_len // group.block_size:
                kept[index] = ((stored_len // group.block_size, computed_len // group.block_size),)
        return tuple(kept)


# -- drivers ----------------------------------------------------------------------------------------------------------


class StoresUnpinned(World):
    """A store reads its blocks whatever became of them."""

    def start_store(self, live, store, lent=None):
        super().start_store(live, store, lent)
        if store is not None:
            self.unpin(self.stores[-1])

    def pinning(self):
        return self.loads

    def close_store(self, job):
        self.pin(job)
        super().close_store(job)


class LoadsUnpinned(World):
    """A load writes its blocks although the request that held them is gone."""

    def start_load(self, live, load):
        super().start_load(live, load)
        self.unpin(self.loads[-1])

    def pinning(self):
        return self.stores

    def close_load(self, job):
        self.pin(job)
        super().close_load(job)


class _TimedOut(World):
    """Reported as if no rank could touch the blocks any more; one does, some steps later."""

    late = ()

    def step(self, live, amount):
        super().step(live, amount)
        for job in self.late:
            for number in job.failed:
                self.touch(job, *job.entries[number])


class WritesAfterItsTimeout(_TimedOut):
    """A load."""

    def close_load(self, job):
        super().close_load(job)
        self.late = (*self.late, job)

    def touch(self, job, index, position, block):
        self.write(job, index, position, block)


class ReadsAfterItsTimeout(_TimedOut):
    """A store."""

    def close_store(self, job):
        super().close_store(job)
        self.late = (*self.late, job)

    def touch(self, job, index, position, block):
        content = job.live.engine.read(index, position, block)
        self.put(self.key(job.live, job.generation, index, position), 0, content)


class ReleasesAtTheFirstReport(World):
    """The other ranks still read the blocks."""

    def pinning(self):
        return [job for job in super().pinning() if job.ranks_left == self.num_ranks]

    def end_store(self, job, fails=never):
        if job.ranks_left == self.num_ranks > 1:
            self.unpin(job)
        super().end_store(job, fails)

    def close_store(self, job):
        if self.num_ranks > 1:
            self.pin(job)
        super().close_store(job)


class ReleasesTwice(World):
    def close_store(self, job):
        super().close_store(job)
        self.unpin(job)


class ReleasesNothing(World):
    """Of a store that failed."""

    def close_store(self, job):
        if job.failed:
            self.pin(job)
        super().close_store(job)
