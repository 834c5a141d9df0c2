"""The router of a scenario, by the name that `[cluster] routing` gives."""

from collections.abc import Callable, Mapping

from kvcore.routing.least_loaded import LeastLoaded
from kvcore.routing.pool_aware import PoolAware
from kvcore.routing.prefix_aware import PrefixAware
from kvcore.routing.round_robin import RoundRobin
from kvcore.routing.router import Router
from kvcore.routing.session_affinity import SessionAffinity
from kvcore.units import NS_PER_S, div_ceil
from kvsim.clock import PS_PER_NS
from kvsim.links.wiring import alone_bytes_per_s
from kvsim.scenario import Scenario


def make_router(scenario: Scenario) -> Router:
    """The policy with the scenario's parameters."""
    return ROUTERS[scenario.cluster.routing](scenario)


def _prefix_aware(scenario: Scenario) -> Router:
    return PrefixAware(scenario.routing.overlap_score_credit, scenario.routing.prefill_load_scale)


def _pool_aware(scenario: Scenario) -> Router:
    prefill, transfer = scenario.routing.prefill_ns_per_token, scenario.routing.transfer_ns_per_token
    return PoolAware(
        _prefill_ns_per_token(scenario) if prefill is None else prefill,
        _transfer_ns_per_token(scenario) if transfer is None else transfer,
    )


def _prefill_ns_per_token(scenario: Scenario) -> int:
    """A full step of one prompt's first tokens, per token: what the simulated engine takes, without any context."""
    num_tokens = min(scenario.engine.max_num_batched_tokens, scenario.kv_model.alignment * scenario.num_gpu_blocks)
    step_ps = scenario.step_time.step_ps([(0, num_tokens)], 0, 0)
    return div_ceil(step_ps, num_tokens * PS_PER_NS)


def _transfer_ns_per_token(scenario: Scenario) -> int:
    """A token's KV on the way from the pool, where nobody else is; 0 without a pool, where nothing comes from."""
    if scenario.pool is None:
        return 0
    return div_ceil(scenario.kv_bytes_per_token * NS_PER_S, alone_bytes_per_s(scenario))


ROUTERS: Mapping[str, Callable[[Scenario], Router]] = {
    "round_robin": lambda _: RoundRobin(),
    "least_loaded": lambda _: LeastLoaded(),
    "session_affinity": lambda _: SessionAffinity(),
    "prefix_aware": _prefix_aware,
    "pool_aware": _pool_aware,
}
"""Its keys are `kvsim.config.cluster.ROUTINGS`."""
