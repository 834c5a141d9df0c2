"""A generated agentic workload: sessions whose context only grows, on top of a system prompt that all of them share.

Turn t's prompt is the session's whole past (prompt and answer of turn t - 1) plus `turn_len` new tokens. Answers are
sent back token for token, so a session's stream runs on through them. The defaults are the scaling run of vLLM's blog
"Serving Agentic Workloads at Scale with vLLM x Mooncake" (2026-05-06): 30 turns, last context 116,392 tokens.
"""

import math
import zlib
from dataclasses import dataclass

import numpy as np

from kvcore.errors import require
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, MAX_TOKENS, seconds_to_ps
from kvsim.workload.trace import Trace

FORMAT = "agentic"
GRANULE_LEN = 64
COMMON_STREAM = 0
MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Agentic:
    """Shape of the workload; lengths in tokens."""

    sessions: int
    turns: int = 30
    common_len: int = 20_000
    """Shared by all sessions."""
    first_len: int = 10_000
    """A session's own first input, after the common one."""
    turn_len: int = 2_048
    """New input of each later turn."""
    output_len: int = 900
    delay_s: float = 0.0
    """Pause between an answer and the session's next turn."""
    start_spread_s: float = 0.0
    """Sessions start uniformly at random in [0, start_spread_s)."""

    def __post_init__(self) -> None:
        for name in ("sessions", "turns"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("common_len", "first_len", "turn_len", "output_len", "delay_s", "start_spread_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        first_len, requests = self.common_len + self.first_len, self.sessions * self.turns
        require(first_len >= 1, "first_len", self.first_len, "a first prompt of at least 1 token")
        require(requests <= MAX_REQUESTS, "sessions x turns", requests, f"at most {MAX_REQUESTS} requests")
        last_len = self.input_len(self.turns - 1) + self.output_len
        require(last_len < MAX_TOKENS, "last turn", last_len, "less than 2**32 tokens, answer included")
        last_s = self.start_spread_s + (self.turns - 1) * self.delay_s
        require(last_s < MAX_SPAN_S, "last start", last_s, f"start_spread_s and delays of less than {MAX_SPAN_S} s")

    def input_len(self, turn: int) -> int:
        """Prompt of the turn, counted from 0."""
        return self.common_len + self.first_len + turn * (self.output_len + self.turn_len)


SCALING_SESSIONS, SCALING_GPUS = 75, 12


def scaling(gpus: int = SCALING_GPUS) -> Agentic:
    """The blog's scaling run on so many GPUs: 75 sessions on 12, as many a GPU on more, all at once, no delay.

    Prefix 20,000, first input 10,000, then 2,048 a turn, 30 turns, answers forced to 900 tokens: from the scripts of
    the run (fork ivanium/vllm, branch feat/mooncake-store-int, pull request 5), read 2026-11.
    """
    sessions, rest = divmod(gpus * SCALING_SESSIONS, SCALING_GPUS)
    whole = SCALING_GPUS // math.gcd(SCALING_SESSIONS, SCALING_GPUS)
    rule = f"a multiple of {whole}, as {SCALING_SESSIONS} sessions are on {SCALING_GPUS} GPUs"
    require(gpus >= 1 and not rest, "gpus", gpus, rule)
    return Agentic(sessions)


def generate(shape: Agentic, seed: int = 0) -> Trace:
    """The same trace for the same shape and seed; rows are in order of the starts an instant service would give."""
    builder = TraceBuilder()
    delay_ps = seconds_to_ps(shape.delay_s)
    starts_ps = _start_times_ps(shape, seed)
    for turn in range(shape.turns):
        for session, start_ps in enumerate(starts_ps):
            after = None if turn == 0 else len(builder) - shape.sessions
            builder.start(start_ps + turn * delay_ps, after, delay_ps if turn else 0, session)
            _hold(builder, shape, turn, own_stream=COMMON_STREAM + 1 + session)
    return builder.build(f"agentic-{shape.sessions}x{shape.turns}", FORMAT, GRANULE_LEN)


def _hold(builder: TraceBuilder, shape: Agentic, turn: int, own_stream: int) -> None:
    input_len = shape.input_len(turn)
    segments = [(COMMON_STREAM, shape.common_len), (own_stream, input_len)]
    shared = segments[0 if shape.common_len else 1 : 2 if input_len > shape.common_len else 1]
    builder.hold(input_len, shape.output_len, shared, own_stream, num_granules=input_len // GRANULE_LEN)


def _start_times_ps(shape: Agentic, seed: int) -> list[int]:
    spread = random_stream(seed, "session starts").random(shape.sessions) * shape.start_spread_s
    return [seconds_to_ps(float(start_s)) for start_s in spread]


def random_stream(seed: int, name: str) -> np.random.Generator:
    """The random numbers of one purpose; other purposes of the same seed do not shift them."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
