"""Chat, generated: people who talk to an assistant, from published statistics of recorded conversations.

Sources
- Turns and lengths: WildChat (Zhao et al., arXiv 2405.01470, 2024-05-02), 1,039,785 conversations with ChatGPT,
  tokens of Llama 2's tokenizer. Turns a conversation 2.54 on average; 41 % have more than one, 3.7 % more than ten.
  Tokens a turn: user 295.58 with standard deviation 1,609.18, answer 441.34 with 410.91.
- Pauses: the gaps between a request and the next one of its conversation in Alibaba's Bailian trace A (2024-12),
  19,957 of them: P50 110.6 s, P80 372.4 s, P99 2,207 s, for which SAECache (arXiv 2605.18825, 2026-05) fits a
  lognormal with mean 4.82 and deviation 1.25 of the logarithm of seconds. Answers take seconds, so the gap is taken
  for the pause.
- System prompt: 500 tokens, the common prefix of vLLM's multi-turn benchmark
  (benchmarks/multi_turn/generate_multi_turn.json, commit 07b1349); WildChat has none.

Chosen: lengths are lognormal, which two moments and no more determine; turns after the second go on with one
probability, which gives the mean and 2.5 % above ten turns; nothing depends on anything else. An answer is sent
back token for token. All of them are stratified: the seed decides which meet in one conversation, and not which
there are.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from kvcore.errors import require
from kvsim.workload.agentic import COMMON_STREAM, GRANULE_LEN, random_stream
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_TOKENS, seconds_to_ps
from kvsim.workload.quantiles import Floats, LogNormal, ranks, stratified
from kvsim.workload.trace import Trace

FORMAT = "chat"
MAX_SESSIONS = 1_000_000

MEAN_TURNS = 2.54
MORE_THAN_ONE = 0.41
GOES_ON = 1 - MORE_THAN_ONE / (MEAN_TURNS - 1)
"""Chance of one more turn after the second and each later one: so that the mean of all is as published."""
PROMPT = LogNormal.of(295.58, 1_609.18)
ANSWER = LogNormal.of(441.34, 410.91)
PAUSE_S = LogNormal(4.82, 1.25)


@dataclass(frozen=True, slots=True)
class Chat:
    """Shape of the workload; the published statistics stay."""

    sessions: int = 1_000
    system_len: int = 500
    """First tokens of every prompt, the same for all."""
    prompt_scale: float = 1.0
    """Prompts are this many times as long as published, for users who paste more."""
    answer_scale: float = 1.0
    pause_scale: float = 1.0
    """0: the next turn follows its answer at once."""

    def __post_init__(self) -> None:
        require(1 <= self.sessions <= MAX_SESSIONS, "sessions", self.sessions, f"1 <= sessions <= {MAX_SESSIONS}")
        require(0 <= self.system_len < MAX_TOKENS, "system_len", self.system_len, "0 <= system_len < 2**32")
        for name in ("prompt_scale", "answer_scale", "pause_scale"):
            require(0 <= getattr(self, name) <= 100, name, getattr(self, name), f"0 <= {name} <= 100")


def generate(shape: Chat, seed: int = 0) -> Trace:
    """The same trace for the same shape and seed; all start at once, a turn follows an answer and a pause."""
    turns = turn_counts(ranks(shape.sessions, random_stream(seed, "turns")))
    starts = [0, *accumulate(turns)]
    prompts, answers = (
        np.maximum(np.rint(scale * law.at(stratified(starts[-1], random_stream(seed, name)))), 1).astype(int).tolist()
        for name, law, scale in (("prompts", PROMPT, shape.prompt_scale), ("answers", ANSWER, shape.answer_scale))
    )
    pauses_s = shape.pause_scale * PAUSE_S.at(stratified(starts[-1], random_stream(seed, "pauses")))
    pauses_ps = [seconds_to_ps(pause_s) for pause_s in pauses_s.tolist()]
    builder = TraceBuilder()
    for session, (start, end) in enumerate(pairwise(starts)):
        _converse(builder, shape, session, prompts[start:end], answers[start:end], pauses_ps[start:end])
    return builder.build(f"chat-{shape.sessions}", FORMAT, GRANULE_LEN)


def turn_counts(places: Floats) -> list[int]:
    """Turns of conversations at these ranks: one; else two and more, which go on with one probability."""
    above = np.maximum((1 - places) / MORE_THAN_ONE, np.finfo(float).tiny)
    later = 2 + np.floor(np.log(np.minimum(above, 1)) / np.log(GOES_ON))
    counts: list[int] = np.where(above >= 1, 1, later).astype(int).tolist()
    return counts


def _converse(
    builder: TraceBuilder, shape: Chat, session: int, prompts: list[int], answers: list[int], pauses_ps: list[int]
) -> None:
    """The requests of one conversation, each with all before it."""
    own_stream, start_ps, held_len = COMMON_STREAM + 1 + session, 0, shape.system_len
    for turn, (prompt_len, answer_len, pause_ps) in enumerate(zip(prompts, answers, pauses_ps, strict=True)):
        start_ps += pause_ps if turn else 0
        builder.start(start_ps, len(builder) - 1 if turn else None, pause_ps if turn else 0, session)
        input_len = held_len + prompt_len
        segments = [(COMMON_STREAM, shape.system_len), (own_stream, input_len)][0 if shape.system_len else 1 :]
        builder.hold(input_len, answer_len, segments, own_stream, num_granules=input_len // GRANULE_LEN)
        held_len = input_len + answer_len
