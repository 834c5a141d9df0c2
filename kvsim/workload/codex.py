"""Codex on SWE-bench Pro, generated: coding agents whose context only grows, from published percentiles alone.

Source: vLLM's blog "Serving Agentic Workloads at Scale with vLLM x Mooncake" (2026-05-06) and the data card of its
traces, 610 trials, which are not public. docs/WORKLOADS.md has the rows, what was chosen between them, and how near a
generated trace comes.

A session's calls, total input, computed and output tokens, first and last context are the quantiles of the published
rows, whatever the seed; which of them meet in one session, and how a session gets from its first context to its last,
is the seed's. How they go together, with the reason:

- last context with calls, rank correlation 0.7: what growth that is independent from call to call would give.
- output with calls, 0.85: likewise; an answer varies less than what a tool returns.
- total input: in the order of calls x mean context, of which it is the product.
- computed: in the order of what is new in a session plus misses, which are large in few sessions (lognormal).
- first context with nothing: it is the task's text. Delays with nothing: no row tells.

Inside a session, context grows by the answer and by what is added to it (what tools return). What is added leans
towards the beginning, as far as total input asks for: the sum of the contexts over the calls is the session's total.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from kvcore.errors import require
from kvsim.workload.agentic import random_stream
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, MAX_TOKENS, seconds_to_ps
from kvsim.workload.quantiles import Floats, Quantiles, coupled, falling_root, restratified, stratified
from kvsim.workload.trace import Trace

FORMAT = "codex"
GRANULE_LEN = 64
COMMON_STREAM = 0
MAX_SESSIONS = 100_000

# --- the published rows, per session --------------------------------------------------------------------------------

MEAN_CALLS = 132_368 / 3_991
"""33.17: the card rounds it to 33. Computed tokens of a session over those of a call; growth and output agree."""

CALLS = Quantiles(MEAN_CALLS, 30, 57, 90)
TOTAL_INPUT = Quantiles(2_266_055, 1_637_000, 4_750_691, 9_030_908)
COMPUTED = Quantiles(132_368, 116_991, 230_677, 512_315)
OUTPUT = Quantiles(17_239, 15_666, 29_968, 40_542)
FIRST_CONTEXT = Quantiles(12_367, 12_278, 12_813, 13_744)
LAST_CONTEXT = Quantiles(84_482, 80_488, 130_165, 180_943)
DELAY_S = Quantiles(10.5, 5.2, 23.0, 81.4)
"""From a call's start to the next one's."""

PROVIDER_SHARED_LEN = 11_520
"""System prompt and tools, which nearly all first calls found cached at the provider."""
PROVIDER_MISSED_LEN = (132_368 - (84_482 - PROVIDER_SHARED_LEN)) / MEAN_CALLS
"""1,791 tokens a call that the provider computed again: computed tokens less what was new in a session."""

# --- chosen ---------------------------------------------------------------------------------------------------------

LAST_WITH_CALLS = 0.7
OUTPUT_WITH_CALLS = 0.85
USUAL_MISSED_LEN = 18_000.0
"""Median of a session's misses, for the order of computed tokens; more would move more sessions below what is new."""
MAX_MISSED_SHARE = 1 / 6
"""The same, at most: of what can be missed, so that the order puts no session where it has not enough to miss."""
OUTPUT_SPREAD = 1.24
"""Standard deviation of the logarithm of an answer's length in its session: gives the published P50 of 246 a call."""
ADDED_SPREAD = 1.48
"""The same of what is added between two calls: gives the published P50 of a call's growth, 880."""
MAX_LEAN = 20.0
"""What is added falls at most by this factor's exponential from a session's beginning to its end."""
MAX_RETURNED_SHARE = 0.8
"""Of a session's growth: the rest is added."""
MIN_GROWTH = 8
"""Tokens a call: room for answers of one token. Less than one session in a thousand is longer for it."""
USUAL_LEAN = 0.65
"""Where the mean context lies between first and last, for the order of the totals."""

Lens: TypeAlias = list[int]
"""Tokens, one entry per call of a session."""
Answers: TypeAlias = Literal["recorded", "generated"]


@dataclass(frozen=True, slots=True)
class Codex:
    """What is served of it; the published rows are the provider's and stay."""

    sessions: int = 610
    shared_len: int = PROVIDER_SHARED_LEN
    """First tokens of every prompt, the same for all sessions: 11,520 as at the provider; 902 as the published texts
    replay, in which trials differ after that."""
    missed_len: float = PROVIDER_MISSED_LEN
    """Tokens a call, on average, at the end of the previous context that the provider reported as not cached."""
    answers: Answers = "recorded"
    """What the next prompt holds. "recorded", as in the published replay: not what was generated, so it is computed
    again. "generated": exactly that, so its KV is reused."""
    start_spread_s: float = 0.0
    """Sessions start uniformly at random in [0, start_spread_s)."""

    def __post_init__(self) -> None:
        require(1 <= self.sessions <= MAX_SESSIONS, "sessions", self.sessions, f"1 <= sessions <= {MAX_SESSIONS}")
        require(self.shared_len >= 0, "shared_len", self.shared_len, "at least 0")
        rule = f"at most {PROVIDER_SHARED_LEN}, which every first context holds"
        require(self.shared_len <= PROVIDER_SHARED_LEN, "shared_len", self.shared_len, rule)
        for name, below in (("missed_len", MAX_TOKENS), ("start_spread_s", MAX_SPAN_S // 2)):
            require(0 <= getattr(self, name) < below, name, getattr(self, name), f"0 <= {name} < {below}")
        require(self.answers in get_args(Answers), "answers", self.answers, " or ".join(get_args(Answers)))


def generate(shape: Codex, seed: int = 0) -> Trace:
    """The same trace for the same shape and seed; a call waits for the one before it, without a pause.

    Recorded starts are as far apart as the published delays, from start to start.
    """
    builder = TraceBuilder()
    misses = random_stream(seed, "misses")
    miss_ratio = shape.missed_len / PROVIDER_MISSED_LEN
    for index, (session, starts_s, answers, added) in enumerate(_drawn(shape, seed)):
        output_len = _output_lens(session, answers)
        context = _contexts(session, output_len, added)
        cached_len = _cached_lens(session, context, miss_ratio, misses)
        for call in range(session.calls):
            after = len(builder) - 1 if call else None
            builder.start(seconds_to_ps(starts_s[call]), after, delay_ps=0, session=index)
            builder.report(cached_len[call])
            _hold(builder, shape, index, context[call], output_len[call])
    return builder.build(f"codex-{shape.sessions}", FORMAT, GRANULE_LEN)


class _Session(NamedTuple):
    """Its marginals, in tokens."""

    calls: int
    first: int
    last: int
    total: int
    computed: int
    output: int


def _drawn(shape: Codex, seed: int) -> Iterator[tuple[_Session, list[float], Floats, Floats]]:
    """Each session with its recorded starts (s) and, per call, the scores of its answers and of what is added."""
    sessions = _sessions(shape.sessions, seed)
    num_calls = sum(session.calls for session in sessions)
    answers, added = (stratified(num_calls, random_stream(seed, name)) for name in ("answers", "added"))
    delays_s = DELAY_S.at(stratified(num_calls - shape.sessions, random_stream(seed, "delays")))
    spread_s = random_stream(seed, "session starts").random(shape.sessions) * shape.start_spread_s
    start = 0
    for index, session in enumerate(sessions):
        end = start + session.calls
        gaps_s = delays_s[start - index : end - index - 1]
        starts_s = spread_s[index] + np.concatenate((np.zeros(1), np.cumsum(gaps_s)))
        yield session, starts_s.tolist(), answers[start:end], added[start:end]
        start = end


def _sessions(num_sessions: int, seed: int) -> list[_Session]:
    """The marginals of all sessions, each stratified."""
    calls_score = stratified(num_sessions, random_stream(seed, "calls"))
    last_score = coupled(calls_score, LAST_WITH_CALLS, random_stream(seed, "last contexts"))
    output_score = coupled(calls_score, OUTPUT_WITH_CALLS, random_stream(seed, "outputs"))
    calls = np.maximum(np.rint(CALLS.at(calls_score)), 2)
    first = FIRST_CONTEXT.at(stratified(num_sessions, random_stream(seed, "first contexts")))
    first = np.maximum(first, PROVIDER_SHARED_LEN + 1)
    last = np.maximum(LAST_CONTEXT.at(last_score), first + MIN_GROWTH * calls)
    total = TOTAL_INPUT.at(restratified(calls * (first + USUAL_LEAN * (last - first))))
    missed = USUAL_MISSED_LEN * np.exp(stratified(num_sessions, random_stream(seed, "misses of sessions")))
    missed = np.minimum(missed, MAX_MISSED_SHARE * (total - last - calls * PROVIDER_SHARED_LEN))
    computed = COMPUTED.at(restratified(last - PROVIDER_SHARED_LEN + missed))
    columns = (calls, first, last, total, computed, OUTPUT.at(output_score))
    return [_Session(*_whole(row)) for row in np.array(columns).T]


def _output_lens(session: _Session, scores: Floats) -> Lens:
    """Answers, at least a token each; they fit in the session's growth."""
    most = MAX_RETURNED_SHARE * (session.last - session.first)
    weights = np.exp(OUTPUT_SPREAD * scores)
    lens = min(session.output, most) * weights / weights.sum()
    return _whole(np.maximum(lens, 1))


def _contexts(session: _Session, output_len: Lens, scores: Floats) -> Lens:
    """The calls' prompts: the first; then each has the answer before it and what is added; up to the last."""
    returned = session.first + np.cumsum([0, *output_len[:-1]])
    added_len = session.last - int(returned[-1])
    asked = (session.total - int(returned.sum())) / added_len
    weights = np.exp(ADDED_SPREAD * scores[1:])
    place = np.linspace(0, 1, len(weights))

    def shares(lean: float) -> Floats:
        """Of all that is added, the share that each call after the first holds."""
        held: Floats = np.cumsum(weights * np.exp(-lean * place))
        held /= held[-1]
        return held

    lean = falling_root(lambda lean: asked - float(shares(lean).sum()), -MAX_LEAN, MAX_LEAN)
    return [session.first, *_whole(returned[1:] + added_len * shares(lean))]


def _cached_lens(session: _Session, context: Lens, miss_ratio: float, random: np.random.Generator) -> Lens:
    """What the provider reported of each prompt: the one before it, less what it missed.

    It misses whole: calls in random order lose all but the system prompt, until the session has its computed tokens.
    """
    held = [PROVIDER_SHARED_LEN, *context[:-1]]
    left = max(0, round(miss_ratio * (session.computed - (session.last - PROVIDER_SHARED_LEN))))
    for call in 1 + np.argsort(random.random(session.calls - 1), kind="stable"):
        missed = min(left, held[call] - PROVIDER_SHARED_LEN)
        held[call] -= missed
        left -= missed
    return held


def _whole(values: Floats) -> list[int]:
    return [round(value) for value in values.tolist()]


def _hold(builder: TraceBuilder, shape: Codex, session: int, input_len: int, output_len: int) -> None:
    """The content of a prompt: what all share, then the session's own; a recorded answer is not what is generated."""
    own_stream = COMMON_STREAM + 1 + session
    output_stream = own_stream if shape.answers == "generated" else shape.sessions + len(builder)
    segments = [(COMMON_STREAM, shape.shared_len), (own_stream, input_len)]
    shown = segments if shape.shared_len else segments[1:]
    builder.hold(input_len, output_len, shown, output_stream, num_granules=input_len // GRANULE_LEN)
