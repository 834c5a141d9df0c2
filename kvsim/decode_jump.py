"""What many decode steps, taken as one, do to the blocks of those that run in them."""

from heapq import heapify, heapreplace

from kvcore.gpu_cache import NEVER, GpuCache
from kvsim.sequence import Sequence
from kvsim.step import Step


def take_blocks(cache: GpuCache, step: Step, num_steps: int) -> None:
    """Take, give back and enter what `num_steps` of the pure decode `step` need beyond the first."""
    if not cache.keeps_all:
        _replay(cache, step, num_steps)
        return
    for sequence, before, _ in step.scheduled:
        cache.advance(sequence.tables, sequence.names, before + num_steps)


def _replay(cache: GpuCache, step: Step, num_steps: int) -> None:
    """In the order of the steps: what one sequence gives back, another one takes."""
    due = [(_next_change(sequence) - before, at) for at, (sequence, before, _) in enumerate(step.scheduled)]
    heapify(due)
    while due[0][0] <= num_steps:
        number, at = due[0]
        sequence, before, _ = step.scheduled[at]
        cache.advance(sequence.tables, sequence.names, before + number)
        heapreplace(due, (_next_change(sequence) - before, at))


def _next_change(sequence: Sequence) -> int:
    """The shortest length, beyond the present one, at which a sequence in decode takes, gives back or enters blocks."""
    return min(sequence.tables.room_len + 1, sequence.tables.cache_len)


def blocks_for(cache: GpuCache, step: Step, num_steps: int) -> int:
    """Blocks taken until then; what is given back meanwhile is not counted on."""
    lacking = cache.lacking
    return sum([lacking(sequence.tables, before + num_steps) for sequence, before, _ in step.scheduled])


def steps_before_block(step: Step) -> int:
    """Steps until, not including, the next one after the first that fills a block."""
    return min([sequence.tables.cache_len - before - 1 for sequence, before, _ in step.scheduled])


def steps_before_drop(step: Step) -> int:
    """Steps until, not including, the next one after the first that gives a block back."""
    return min([sequence.tables.drop_len - before for sequence, before, _ in step.scheduled])


def steps_before_store(cache: GpuCache, step: Step) -> int:
    """Steps until, not including, the next one after the first that stores something."""
    steps = NEVER
    for sequence, before, _ in step.scheduled:
        if sequence.kv is not None:
            state_len = sequence.tables.cache_len if cache.has_states else NEVER
            store_len = NEVER if sequence.kv.next_store_len is None else sequence.kv.next_store_len
            steps = min(steps, min(store_len, state_len) - before - 1)
    return max(1, steps)
