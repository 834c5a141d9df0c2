"""Time to plan one turn (lookup, hit, load, store), without hashing and key formatting.

    python benchmarks/bench_planner.py

The layouts: a plain model; one full and four window groups over blocks of 16 tokens; one group with blocks of 256 and
four window groups with blocks of 64 and windows of 128, as in a latent-attention model with compressed layers. The full
group costs the same at any length; a window group costs a step per boundary it is asked at.
"""

from time import perf_counter_ns

from kvcore.group_runs import GroupRuns, count_blocks
from kvcore.planner import Planner
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow

LAYOUTS = {
    "1 full, block 16": ModelSpec((FullAttention(16),)),
    "1 full + 4 window-1024, block 16": ModelSpec((FullAttention(16), *[SlidingWindow(16, 1024)] * 4)),
    "1 full, block 256 + 4 window-128, block 64": ModelSpec((FullAttention(256), *[SlidingWindow(64, 128)] * 4)),
}
TURN_TOKENS = 2_048
REPEATS = 5


def plan_turn(planner: Planner, num_tokens: int) -> tuple[GroupRuns, GroupRuns, GroupRuns]:
    """A turn of TURN_TOKENS new tokens: the pool holds the rest, the engine nothing."""
    asked = planner.lookup(0, num_tokens)
    hit = planner.hit(0, num_tokens - TURN_TOKENS, asked)
    return asked, planner.load(0, hit), planner.store(hit, num_tokens, num_tokens)


def best_us(planner: Planner, num_tokens: int) -> float:
    """Microseconds of the fastest of a few repetitions."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter_ns()
        plan_turn(planner, num_tokens)
        times.append(perf_counter_ns() - start)
    return min(times) / 1_000


def main() -> None:
    """One line per layout and length."""
    print(f"{'layout':<44}{'tokens':>10}{'asked':>9}{'loaded':>9}{'stored':>9}{'us':>10}")
    for name, model in LAYOUTS.items():
        planner = Planner(model)
        for num_tokens in (32_768, 131_072, 1_048_576):
            counts = "".join(f"{count_blocks(plan):>9,}" for plan in plan_turn(planner, num_tokens))
            print(f"{name:<44}{num_tokens:>10,}{counts}{best_us(planner, num_tokens):>10,.1f}")


if __name__ == "__main__":
    main()
