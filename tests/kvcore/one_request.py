"""One request, brought to any state by a few moves: what the tests of single moves begin with."""

from kvcore.group_runs import common
from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import Lookup, Offer, PoolPolicy
from kvcore.request import KVRequest, State
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow

B = 16
FULL = ModelSpec((FullAttention(B),))
HYBRID = ModelSpec((FullAttention(B), SlidingWindow(B, window=2 * B + 1)))
WINDOW = ModelSpec((SlidingWindow(B, window=2 * B + 1),))
POLICY = PoolPolicy(lookup_deadline_ns=100, offer_ttl_ns=1_000, max_load_attempts=2)
PROMPT = 10 * B + 1


def machine(model=FULL, policy=POLICY, num_prompt=PROMPT, experience=None):
    return KVRequest(Planner(model), policy, num_prompt, experience or Experience())


def blocks(*runs):
    """One group's blocks."""
    return (runs,)


ALL = blocks((0, 10))


def answer(request, lookup, present, now_ns=0):
    """Carry the dialogue through with a pool that holds `present`."""
    while lookup.dialogue.open:
        lookup.dialogue.answered(common(present, lookup.dialogue.question))
    request.lookup_answered(lookup.ticket, now_ns)


def offered(request, present, local=0, now_ns=0):
    """Ask, answer, offer."""
    lookup = request.consider(local, PROMPT, now_ns)
    assert isinstance(lookup, Lookup)
    answer(request, lookup, present, now_ns)
    offer = request.consider(local, PROMPT, now_ns)
    assert isinstance(offer, Offer)
    return offer


def loading(request=None, grant=None, present=ALL, now_ns=0):
    request = request or machine()
    offer = offered(request, present, now_ns=now_ns)
    return request, request.granted(offer.num_tokens if grant is None else grant, now_ns)


def computing(num_tokens=None, model=FULL):
    request = machine(model)
    offered(request, request.planner.nothing)
    request.granted(0, 0)
    return request if num_tokens is None else (request, request.computed(num_tokens, 0))


def in_state(state):
    request = machine()
    if state is State.ASKING:
        request.consider(0, PROMPT, 0)
    elif state is State.OFFERED:
        offered(request, ALL)
    elif state is State.LOADING:
        loading(request)
    elif state is State.COMPUTING:
        return computing()
    elif state is State.FINISHED:
        request.finished(0, 0)
    assert request.state is state
    return request
