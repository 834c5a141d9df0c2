"""The passes of attention over what was kept: of prefill chunks, and of decodes, straight in their context."""

from bisect import bisect_left
from collections.abc import Sequence

from kvcore.units import div_ceil
from kvsim.cost.rates import Rates
from kvsim.cost.step_time import DecodeLine
from kvsim.llm.cache import LayerWork, Scan
from kvsim.llm.dtypes import WeightDtype

ATTENTION_DTYPE: WeightDtype = "bf16"
"""QK^T and PV are computed in bf16, whatever the cache keeps."""


class Attention:
    """Times of one rank; `data_parallel_size` ranks share the requests."""

    __slots__ = ("_data_parallel_size", "_decode_scans", "_lines", "_rates", "_scans")

    def __init__(self, work: Sequence[LayerWork], rates: Rates, data_parallel_size: int) -> None:
        self._rates = rates
        self._data_parallel_size = data_parallel_size
        self._scans = [(layers.num_layers, scan) for layers in work for scan in layers.scans]
        self._decode_scans = [(reach(scan), self._token_ps(num_layers, scan)) for num_layers, scan in self._scans]
        self._lines: dict[int, tuple[list[int], list[DecodeLine]]] = {}

    def chunk_ps(self, context_len: int, num_new_tokens: int) -> int:
        """A chunk's kernels, one for each kind of pass: multiply-adds of all pairs, or one read of what is kept."""
        total_ps = 0
        for num_layers, scan in self._scans:
            macs = num_layers * scan.prefill_macs * num_pairs(scan, context_len, num_new_tokens)
            size_bytes = num_layers * scan.entry_bytes * num_entries(scan, context_len, num_new_tokens)
            total_ps += max(self._rates.macs_ps(ATTENTION_DTYPE, macs, 0), self._rates.read_ps(size_bytes))
        return total_ps

    def decode_line(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """The decodes' kernels: of equal contexts with that sum, which is the most that it can take."""
        found = self._lines.get(num_decodes)
        if found is None:
            found = self._lines[num_decodes] = self._decode_lines(num_decodes)
        ends, lines = found
        return lines[bisect_left(ends, decode_context)]

    def _token_ps(self, num_layers: int, scan: Scan) -> int:
        """A token of context of one decode."""
        macs_ps = self._rates.macs_ps(ATTENTION_DTYPE, 0, num_layers * scan.decode_macs)
        return div_ceil(max(macs_ps, self._rates.read_ps(num_layers * scan.entry_bytes)), scan.tokens_per_entry)

    def _decode_lines(self, num_decodes: int) -> tuple[list[int], list[DecodeLine]]:
        """By the context at which each ends: where another window is full."""
        busiest = div_ceil(num_decodes, self._data_parallel_size)
        slopes = [(limit, div_ceil(token_ps * busiest, num_decodes)) for limit, token_ps in self._decode_scans]
        ends = sorted({(limit - 1) * num_decodes for limit, _ in slopes if limit is not None})
        return ends, [
            _line(slopes, num_decodes, start, end) for start, end in zip([-1, *ends], [*ends, None], strict=True)
        ]


def reach(scan: Scan) -> int | None:
    """Tokens up to its own that a query meets entries of; None for all."""
    return None if scan.max_entries is None else scan.max_entries * scan.tokens_per_entry


def num_pairs(scan: Scan, context_len: int, num_new_tokens: int) -> int:
    """Entries met by all queries of a chunk, summed."""
    if scan.max_entries is None and scan.tokens_per_entry == 1:  # the sum below, for what most layers do
        return num_new_tokens * context_len + num_new_tokens * (num_new_tokens + 1) // 2
    return _met(scan, context_len + num_new_tokens) - _met(scan, context_len)


def num_entries(scan: Scan, context_len: int, num_new_tokens: int) -> int:
    """Entries that a chunk reads. Of those that an index chooses as many as of a window: it is never what binds."""
    entries = div_ceil(context_len + num_new_tokens, scan.tokens_per_entry)
    if scan.max_entries is None:
        return entries
    return min(entries, scan.max_entries + div_ceil(num_new_tokens, scan.tokens_per_entry))


def _met(scan: Scan, num_tokens: int) -> int:
    """Entries met by the queries of the first `num_tokens` tokens: the sum of min(i // r, max_entries) from i = 1."""
    limit = reach(scan)
    growing = num_tokens if limit is None else min(num_tokens, limit)
    quotient, rest = divmod(growing, scan.tokens_per_entry)
    met = scan.tokens_per_entry * quotient * (quotient - 1) // 2 + quotient * (rest + 1)
    return met + (num_tokens - growing) * (scan.max_entries or 0)


def _line(slopes: Sequence[tuple[int | None, int]], num_decodes: int, start: int, end: int | None) -> DecodeLine:
    """Each decode meets its context and itself; windows that are full at `start` stay so."""
    base_ps = slope_ps = 0
    for limit, token_ps in slopes:
        if limit is not None and (limit - 1) * num_decodes <= start:
            base_ps += token_ps * limit * num_decodes
        else:
            base_ps += token_ps * num_decodes
            slope_ps += token_ps
    return DecodeLine(base_ps, slope_ps, end)
