"""What is worth storing and worth loading, as the user says it; names and meanings are those of a scenario of kvsim."""

from dataclasses import dataclass
from enum import Enum

from kvconnector.settings import Settings
from kvcore.errors import InvalidArgument, require
from kvcore.masks import Retention


class AdmissionKind(Enum):
    """Which blocks are stored; see `kvcore.admission`."""

    ALL = "all"
    SECOND_TOUCH = "second_touch"
    CHEAPER = "cheaper"


class LoadingKind(Enum):
    """Which hits are loaded; see `kvcore.loading`."""

    ALWAYS = "always"
    CHEAPER = "cheaper"
    IN_TIME = "in_time"


@dataclass(frozen=True, slots=True)
class Rates:
    """What computing and fetching take, on an engine and a way that do nothing else; integers.

    Tokens [a, b) of a prompt take `prefill_ns_per_token` each, and `prefill_ps_per_pair` for each token before each. A
    load takes `latency_us`, and what one rank's blocks take at `bandwidth_bytes_per_s`.

    They are stated, not measured while the engine runs: so that a decision stays a function of what the simulator knows
    too; because a way that was once measured slow would never be taken, nor measured, again; and because nobody can
    tell what one prompt takes in a step that serves many requests.
    """

    prefill_ns_per_token: int
    bandwidth_bytes_per_s: int
    prefill_ps_per_pair: int = 0
    latency_us: int = 0


@dataclass(frozen=True, slots=True)
class Policies:
    """`load_budget_ms` belongs to IN_TIME, `rates` to whatever weighs a load. `retention_interval` as `Retention`."""

    admission: AdmissionKind = AdmissionKind.ALL
    loading: LoadingKind = LoadingKind.ALWAYS
    load_budget_ms: int | None = None
    retention_interval: Retention = None
    rates: Rates | None = None


def read_policies(settings: Settings) -> Policies:
    """Raises InvalidArgument naming the key, its value and what was expected."""
    admission = settings.choice("admission", AdmissionKind.ALL)
    loading = settings.choice("loading", LoadingKind.ALWAYS)
    budget_ms = settings.count_if_set("load_budget_ms", at_least=0)
    fits = (budget_ms is not None) == (loading is LoadingKind.IN_TIME)
    require(fits, "load_budget_ms", budget_ms, 'milliseconds with loading "in_time", and nothing without it')
    rates = _rates(settings)
    weighed = [f'admission "{admission.value}"'] if admission is AdmissionKind.CHEAPER else []
    weighed += [f'loading "{loading.value}"'] if loading is not LoadingKind.ALWAYS else []
    expected = f"set, like bandwidth_bytes_per_s, for {' and '.join(weighed)}"
    require(not weighed or rates, "prefill_ns_per_token", None, expected)
    unused = [name for name in _RATES if settings.value(name) is not None and not weighed]
    require(
        not unused, "".join(unused[:1]), "set", 'nothing but with "cheaper" or "in_time": nothing else weighs a load'
    )
    return Policies(admission, loading, budget_ms, _retention(settings.value("retention_interval")), rates)


_RATES = ("prefill_ns_per_token", "prefill_ps_per_pair", "bandwidth_bytes_per_s", "latency_us")


def _rates(settings: Settings) -> Rates | None:
    prefill_ns_per_token = settings.count_if_set("prefill_ns_per_token", at_least=1)
    bandwidth_bytes_per_s = settings.count_if_set("bandwidth_bytes_per_s", at_least=1)
    prefill_ps_per_pair = settings.count("prefill_ps_per_pair", 0, at_least=0)
    latency_us = settings.count("latency_us", 0, at_least=0)
    if prefill_ns_per_token is None or bandwidth_bytes_per_s is None:
        return None
    return Rates(prefill_ns_per_token, bandwidth_bytes_per_s, prefill_ps_per_pair, latency_us)


def _retention(value: object) -> Retention:
    return tuple(map(_interval, value)) if isinstance(value, list | tuple) else _interval(value)


def _interval(value: object) -> int | None:
    if value is None or value == "all":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        expected = '"all", 0 or a number of tokens, or a list with one of these for each KV cache group'
        raise InvalidArgument("retention_interval", value, expected)
    return value
