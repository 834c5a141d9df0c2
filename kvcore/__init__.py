"""kvcore: what a serving fleet does with its KV cache, decided without I/O, clock, thread or randomness."""
