"""Time to plan one turn (lookup, hit, load, store), without hashing and key formatting.

    python benchmarks/bench_planner.py

The layouts: a plain model; one full and four window groups over blocks of 16 tokens; one group with blocks of 256 and
four window groups with blocks of 64 and windows of 128, as in a latent-attention model with compressed layers. `warm`:
the pool holds all but the turn's new tokens, and those are stored. `cold`: it holds nothing, and all is stored.
"""

from time import perf_counter_ns

from kvcore.group_runs import GroupRuns, common, count_blocks
from kvcore.planner import Planner
from kvcore.runs import normalize
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow

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


def best_us(planner: Planner, num_tokens: int, pool_len: int) -> float:
    """Microseconds of the fastest of a few repetitions."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter_ns()
        plan_turn(planner, num_tokens, pool_len)
        times.append(perf_counter_ns() - start)
    return min(times) / 1_000


def main() -> None:
    """One line per layout, length and content of the pool."""
    print(f"{'layout':<44}{'tokens':>10}{'pool':>6}{'asked':>9}{'loaded':>9}{'stored':>9}{'us':>10}")
    for name, model in LAYOUTS.items():
        planner = Planner(model)
        for num_tokens in (32_768, 131_072, 1_048_576):
            for kind, pool_len in (("warm", num_tokens - TURN_TOKENS), ("cold", 0)):
                counts = "".join(f"{count_blocks(plan):>9,}" for plan in plan_turn(planner, num_tokens, pool_len))
                microseconds = best_us(planner, num_tokens, pool_len)
                print(f"{name:<44}{num_tokens:>10,}{kind:>6}{counts}{microseconds:>10,.1f}")


if __name__ == "__main__":
    main()
