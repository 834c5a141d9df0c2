"""Step times read off two grids that somebody measured: of prefills, one prompt a step, and of decode steps.

    one chunk               prefill at (its tokens, its context)
    decodes                 decode at (requests of the busiest rank, mean context), in straight pieces
    a mixture               prefill of all its tokens as one prompt without context, or the decodes without context,
                            whichever is longer; plus what each chunk's context adds, and what the decodes' adds

So a mixture takes as long as any of its parts, reads the weights once, and its prompts' attention to each other, which
does not happen, is counted: at most n**2 / 2 pairs of n tokens in the step. A prompt is summed over its chunks.

Ranks of data parallelism take the requests in turn and wait for the busiest one; chunks are not divided.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from kvcore.units import div_ceil
from kvsim.cost.grid import Grid
from kvsim.cost.parallel import busiest
from kvsim.cost.step_time import DecodeLine, PrefillChunk


class TableSteps:
    """`StepTimeModel` of a table; exact on the table's points, see `kvsim.cost.grid` for what lies between and beyond.

    A decode step is less than 1 ps per token of context below the straight line between two points.
    """

    __slots__ = ("_data_parallel_size", "_decode", "_lines", "_prefill")

    def __init__(self, prefill: Grid, decode: Grid, data_parallel_size: int) -> None:
        """`prefill` is over (new tokens, context), `decode` over (requests of a rank, context of each), both in ps."""
        self._prefill = prefill
        self._decode = decode
        self._data_parallel_size = data_parallel_size
        self._lines: dict[int, tuple[list[int], list[DecodeLine]]] = {}

    def step_ps(self, chunks: Sequence[PrefillChunk], num_decodes: int, decode_context: int) -> int:
        """See `StepTimeModel.step_ps`."""
        if not chunks:
            return self._decode_ps(num_decodes, decode_context) if num_decodes else 0
        if len(chunks) == 1 and not num_decodes:
            context_len, num_new_tokens = chunks[0]
            return self._prefill.at(num_new_tokens, context_len)
        return self._mixture_ps(chunks, num_decodes, decode_context)

    def decode_affine_ps(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """See `StepTimeModel.decode_affine_ps`."""
        starts_and_lines = self._lines.get(num_decodes)
        if starts_and_lines is None:
            starts_and_lines = self._lines[num_decodes] = self._decode_lines(num_decodes)
        starts, lines = starts_and_lines
        return lines[bisect_right(starts, decode_context) - 1]

    def _decode_ps(self, num_decodes: int, decode_context: int) -> int:
        base_ps, slope_ps, _ = self.decode_affine_ps(num_decodes, decode_context)
        return base_ps + slope_ps * decode_context

    def _mixture_ps(self, chunks: Sequence[PrefillChunk], num_decodes: int, decode_context: int) -> int:
        at = self._prefill.at
        lengths, ranks = [new for _, new in chunks], self._data_parallel_size
        dense_ps = at(busiest(sum(lengths) + num_decodes, max(lengths), ranks), 0)
        rises_ps = [max(0, at(new, context_len) - at(new, 0)) for context_len, new in chunks]
        context_ps = busiest(sum(rises_ps), max(rises_ps), ranks)
        if num_decodes:
            bare_ps = self._decode_ps(num_decodes, 0)
            dense_ps = max(dense_ps, bare_ps)
            context_ps += max(0, self._decode_ps(num_decodes, decode_context) - bare_ps)
        return dense_ps + context_ps

    def _decode_lines(self, num_decodes: int) -> tuple[list[int], list[DecodeLine]]:
        """By the total context that each piece starts at."""
        batch = div_ceil(num_decodes, self._data_parallel_size)
        knots = [(num_decodes * each, self._decode.at(batch, each)) for each in self._decode.seconds]
        lines = [DecodeLine(knots[0][1], 0, knots[0][0] - 1)]
        slope_ps = 0
        for (start, start_ps), (end, end_ps) in pairwise(knots):
            slope_ps = _towards_zero(end_ps - start_ps, end - start)
            lines.append(DecodeLine(start_ps - slope_ps * start, slope_ps, end - 1))
        last, last_ps = knots[-1]
        lines.append(DecodeLine(last_ps - max(0, slope_ps) * last, max(0, slope_ps), None))
        return [0, *(context for context, _ in knots)], lines


def _towards_zero(rise: int, run: int) -> int:
    return rise // run if rise >= 0 else -(-rise // run)
