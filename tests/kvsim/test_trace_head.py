"""The first requests of a trace are a trace."""

from hypothesis import given
from hypothesis import strategies as st

from tests.kvsim.small_runs import ASKS, trace_of


@given(ASKS, st.data())
def test_a_head_holds_the_same_requests(asks, data):
    trace = trace_of(asks)
    num_requests = data.draw(st.integers(0, trace.num_requests + 2))
    head = trace.head(num_requests)
    assert head.num_requests == min(num_requests, trace.num_requests)
    for name in ("arrival_ps", "after", "delay_ps", "input_len", "output_len", "output_stream"):
        assert getattr(head, name).tolist() == getattr(trace, name)[:num_requests].tolist()
    for request in range(head.num_requests):
        assert head.segments(request, 4) == trace.segments(request, 4)
