"""Time to plan one turn (lookup, hit, load, store), without hashing and key formatting.

    python benchmarks/bench_planner.py

The layouts: a plain model; one full and four window groups over blocks of 16 tokens; one group with blocks of 256 and
four window groups with blocks of 64 and windows of 128, as in a latent-attention model with compressed layers. `warm`:
the pool holds all but the turn's new tokens, and those are stored. `cold`: it holds nothing, and all is stored.

Then the time to grant a turn whose context the engine itself holds, when it remembers blocks that the pool has not:
none; one refused store of another session; as many as it can, of other sessions and of the turn's own.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from time import perf_counter_ns

from kvcore.group_runs import GroupRuns, common, count_blocks, singles
from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.runs import normalize
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from kvcore.types import Run

LAYOUTS = {
    "1 full, block 16": ModelSpec((FullAttention(16),)),
    "1 full + 4 window-1024, block 16": ModelSpec((FullAttention(16), *[SlidingWindow(16, 1024)] * 4)),
    "1 full, block 256 + 4 window-128, block 64": ModelSpec((FullAttention(256), *[SlidingWindow(64, 128)] * 4)),
}
TURN_TOKENS = 2_048
REPEATS = 20


def plan_turn(planner: Planner, num_tokens: int, pool_len: int) -> tuple[GroupRuns, GroupRuns, GroupRuns]:
    """What is asked, loaded and stored by a request of `num_tokens`: the pool holds `pool_len`, the engine nothing."""
    held = tuple(normalize(((0, pool_len // group.block_size),)) for group in planner.model.groups)
    dialogue = planner.frontier(0, num_tokens)
    while dialogue.open:
        dialogue.answered(common(held, dialogue.question))
    load = planner.load(0, dialogue.hit_len, dialogue.present)
    return dialogue.asked, load, planner.store(dialogue.hit_len, num_tokens, num_tokens)


def hash_of(session: int, block: int) -> bytes:
    """In place of a block hash: as long, and no object is shared by two requests of a session."""
    return b"%16d%16d" % (session, block)


def names_of(session: int, _index: int, run: Run) -> list[bytes]:
    """As an engine gives them: one for each block."""
    return [hash_of(session, block) for block in range(*run)]


def remembering(planner: Planner, num_tokens: int, sessions: range, num_stores: int) -> Experience:
    """Refused stores of one turn each, at random places in the contexts of random sessions."""
    experience, random = Experience(), Random(0)
    for now_ns in range(num_stores):
        start = random.randrange(0, num_tokens - TURN_TOKENS)
        blocks = [(start // g.block_size, (start + TURN_TOKENS) // g.block_size) for g in planner.model.groups]
        experience.unsaved.note(singles(blocks), partial(names_of, random.choice(sessions)), now_ns)
    return experience


def granting(planner: Planner, num_tokens: int, hashes: list[bytes], experience: Experience) -> Callable[[], object]:
    """The grant of a turn, all but the last tokens of which the engine holds."""
    policy = PoolPolicy(max_load_attempts=0)
    request = KVRequest(planner, policy, num_tokens, experience, lambda _, run: hashes[slice(*run)])
    request.consider(num_tokens - TURN_TOKENS, num_tokens, 0)
    return partial(request.granted, 0, 0)


def best_us(make: Callable[[], Callable[[], object]]) -> float:
    """Microseconds of the fastest of a few calls, each made anew."""
    times = []
    for _ in range(REPEATS):
        call = make()
        start = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - start)
    return min(times) / 1_000


def main() -> None:
    """One line per layout, length and content of the pool, then one per layout, length and memory."""
    plans()
    print()
    grants()


def plans() -> None:
    """What a turn plans, and in what time."""
    print(f"{'layout':<44}{'tokens':>10}{'pool':>6}{'asked':>9}{'loaded':>9}{'stored':>9}{'us':>10}")
    for name, model in LAYOUTS.items():
        planner = Planner(model)
        for num_tokens in (32_768, 131_072, 1_048_576):
            for kind, pool_len in (("warm", num_tokens - TURN_TOKENS), ("cold", 0)):
                counts = "".join(f"{count_blocks(plan):>9,}" for plan in plan_turn(planner, num_tokens, pool_len))
                microseconds = best_us(lambda: partial(plan_turn, planner, num_tokens, pool_len))  # noqa: B023
                print(f"{name:<44}{num_tokens:>10,}{kind:>6}{counts}{microseconds:>10,.1f}")


def grants() -> None:
    """What a grant costs with something to remember."""
    print(f"{'layout':<44}{'tokens':>10}{'nothing':>10}{'one store':>10}{'full':>10}{'full, own':>10}  us")
    others, own = range(1, 100), range(1)
    for name, model in LAYOUTS.items():
        planner = Planner(model)
        for num_tokens in (32_768, 131_072, 1_048_576):
            memories = [(others, 0), (others, 1), (others, 600), (own, 600)]
            experiences = [remembering(planner, num_tokens, *memory) for memory in memories]
            hashes = names_of(0, 0, (0, num_tokens // min(group.block_size for group in model.groups)))
            times = [best_us(partial(granting, planner, num_tokens, hashes, experience)) for experience in experiences]
            print(f"{name:<44}{num_tokens:>10,}" + "".join(f"{microseconds:>10,.1f}" for microseconds in times))


if __name__ == "__main__":
    main()
