"""The real cluster with a step time of theory's choice, and the traffic of queueing theory."""

from dataclasses import dataclass
from itertools import count

from kvsim.clock import PS_PER_S, Clock
from kvsim.cost.step_time import DecodeLine
from kvsim.events import EventLog
from kvsim.instance import Instance
from kvsim.metrics import Events, Requests
from kvsim.run import limits, make_cluster
from kvsim.scenario import load
from kvsim.scheduler import Scheduler
from kvsim.workload.builder import TraceBuilder
from tests.theory.sizes import MEAN_SIZE

TOKEN_PS = 10**6
"""What a token takes: a microsecond."""

MEAN_LEN = MEAN_SIZE
MEAN_SERVICE_S = MEAN_LEN * TOKEN_PS / PS_PER_S


@dataclass(frozen=True)
class PerToken:
    """Every token takes as long as any other, in whatever batch: prefill is work, and decoding shares the processor."""

    token_ps: int = TOKEN_PS

    def step_ps(self, chunks, num_decodes, decode_context):
        return (sum(new for _, new in chunks) + num_decodes) * self.token_ps

    def decode_affine_ps(self, num_decodes, decode_context):
        return DecodeLine(num_decodes * self.token_ps, 0, None)


@dataclass(frozen=True)
class PerStep:
    """Every step takes as long as any other: decoding is bound by the weights, and nobody slows anybody down."""

    def step_ps(self, chunks, num_decodes, decode_context):
        return TOKEN_PS

    def decode_affine_ps(self, num_decodes, decode_context):
        return DecodeLine(TOKEN_PS, 0, None)


def poisson(rng, rate_per_s):
    """Arrival times in picoseconds, one after the other."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield round(at_s * PS_PER_S)


def prompts(arrivals_ps, lengths):
    """Requests that share nothing and are complete with their prompt: the service is its length."""
    return requests((arrival_ps, length, 1) for arrival_ps, length in zip(arrivals_ps, lengths, strict=False))


def answers(arrivals_ps, lengths):
    """Requests of one prompt token: the service is the length of the answer."""
    return requests((arrival_ps, 1, length) for arrival_ps, length in zip(arrivals_ps, lengths, strict=False))


def requests(rows):
    """A trace of (arrival_ps, input_len, output_len) whose requests share nothing."""
    builder, streams = TraceBuilder(), count()
    for arrival_ps, input_len, output_len in rows:
        stream = next(streams)
        builder.start(arrival_ps, None, 0, stream)
        builder.hold(input_len, output_len, [(stream, input_len)], stream, 0)
    return builder.build("theory", "theory", 1)


def served(trace, step_time, settings):
    """The trace served by the scenario's fleet with this step time."""
    defaults = {"cluster.instances": 1, "engine.num_gpu_blocks": 10**6, "engine.max_num_batched_tokens": 10**9}
    scenario = load("nopool-16", [f"{name}={value}" for name, value in (defaults | settings).items()])
    clock = Clock()

    def make_engine(index, log: EventLog, on_finished):
        return Instance(index, clock, Scheduler(limits(scenario)), step_time, log, on_finished)

    cluster = make_cluster(scenario, trace, clock, make_engine, lambda _engine, _sequence: None)
    cluster.run()
    return Requests(Events(cluster.log))
