"""The settings, as the decisions take them."""

from collections.abc import Sequence

from kvconnector.config import PATIENCE, ConnectorConfig
from kvconnector.policies import AdmissionKind, LoadingKind, Rates
from kvcore.admission import Admission, AdmitAll, AdmitCheaper, AdmitNone, AdmitSecondTouch
from kvcore.costs import Costs, PrefillCurve
from kvcore.loading import LoadAlways, LoadCheaper, Loading, LoadInTime
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy, storing_blocks
from kvcore.spec import ModelSpec
from kvcore.units import NS_PER_MS, NS_PER_S, NS_PER_US, div_ceil


def make_planner(config: ConnectorConfig, model: ModelSpec) -> Planner:
    """What is looked up, loaded and stored."""
    return Planner(model, config.policies.retention_interval)


def make_policy(
    config: ConnectorConfig, planner: Planner, num_gpu_blocks: int, block_bytes: Sequence[int]
) -> PoolPolicy:
    """The patience, and the policies by name; `block_bytes`: of one rank's part of a block, of each group."""
    costs = None if config.policies.rates is None else make_costs(config.policies.rates, planner.model, block_bytes)
    return PoolPolicy(
        lookup_deadline_ns=config.lookup_deadline_ms * NS_PER_MS,
        offer_ttl_ns=config.offer_ttl_ms * NS_PER_MS,
        max_load_attempts=PATIENCE.max_load_attempts if config.loads else 0,
        max_storing_blocks=storing_blocks(config.max_storing_share, num_gpu_blocks),
        admission=_admission(config, planner, costs),
        loading=_loading(config, costs),
    )


def make_costs(rates: Rates, model: ModelSpec, block_bytes: Sequence[int]) -> Costs:
    """A tail takes as long as the block that it is in: all of that is fetched."""
    sizes_bytes = [block_bytes[kind.group] for kind in model.kinds]
    return Costs(
        PrefillCurve(rates.prefill_ns_per_token, rates.prefill_ps_per_pair),
        tuple(div_ceil(size_bytes * NS_PER_S, rates.bandwidth_bytes_per_s) for size_bytes in sizes_bytes),
        rates.latency_us * NS_PER_US,
    )


def _admission(config: ConnectorConfig, planner: Planner, costs: Costs | None) -> Admission:
    if not config.stores:
        return AdmitNone()
    match config.policies.admission:
        case AdmissionKind.ALL:
            return AdmitAll()
        case AdmissionKind.SECOND_TOUCH:
            return AdmitSecondTouch()
        case AdmissionKind.CHEAPER:
            assert costs is not None
            return AdmitCheaper(planner, costs)


def _loading(config: ConnectorConfig, costs: Costs | None) -> Loading:
    match config.policies.loading:
        case LoadingKind.ALWAYS:
            return LoadAlways()
        case LoadingKind.CHEAPER:
            assert costs is not None
            return LoadCheaper(costs)
        case LoadingKind.IN_TIME:
            assert costs is not None and config.policies.load_budget_ms is not None
            return LoadInTime(costs, config.policies.load_budget_ms * NS_PER_MS)
