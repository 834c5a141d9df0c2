"""Laws of sizes with one mean: of transfers in bytes, of prompts and answers in tokens."""

MEAN_SIZE = 10_000


def exponential(rng):
    return max(1, round(rng.expovariate(1 / MEAN_SIZE)))


def fixed(rng):
    return MEAN_SIZE


def two_sizes(rng):
    """Squared coefficient of variation 1.44: one in ten is 4.6 times the mean."""
    return 46_000 if rng.random() < 0.1 else 6_000
