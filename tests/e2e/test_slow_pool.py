"""A pool that answers late, or loses its connections: a request waits for the lookup's deadline, a step never."""

import threading
import time

import pytest

from tests.e2e.conftest import PROXIED_DEADLINE_S
from tests.e2e.test_faults import resumes_hitting
from tests.e2e.test_metrics import Watch

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

FAST_S, SLOW_S = 0.05, 1.5
"""A question and its answer are delayed once each."""

SLACK_S = 2.0
"""For two cores that have other work."""


def test_an_answer_in_time_is_a_hit(proxied, prompt):
    tokens = prompt(700)
    right = proxied.generate([tokens])["tokens"]
    with proxied.slowed(FAST_S):
        answer = proxied.generate([tokens])
    assert (answer["cached"], answer["tokens"]) == ([672], right)
    assert answer["ttft_s"][0] > 2 * FAST_S


def test_late_answers_cost_the_deadline_and_are_counted_and_hits_come_back(proxied, prompt):
    tokens = prompt(700)
    right = proxied.generate([tokens])["tokens"]
    watch = Watch(proxied.engine)
    with proxied.slowed(SLOW_S):
        assert proxied.engine.call("reset_local")
        late = proxied.engine.generate([tokens])
        time.sleep(2 * SLOW_S)  # in which the answer comes
        proxied.engine.call("settle")
    assert (late["cached"], late["tokens"]) == ([0], right)
    assert late["ttft_s"][0] < PROXIED_DEADLINE_S + SLACK_S
    assert resumes_hitting(lambda: proxied.generate([tokens]))["tokens"] == right
    changes = watch.changes()
    assert changes["late_lookups_total{}"] >= 1


def test_nobody_s_steps_wait_for_a_slow_master(proxied, prompt):
    """Requests that are decoding, beside one whose lookup is on its way."""
    prompts = [prompt(300, number) for number in range(4)]
    proxied.generate(prompts, max_tokens=64)
    usual = proxied.generate(prompts, max_tokens=64)
    assert proxied.engine.call("reset_local")
    with proxied.slowed(SLOW_S):
        slowed = proxied.engine.generate(prompts, max_tokens=64)
    proxied.engine.call("settle")
    assert slowed["tokens"] == usual["tokens"]
    assert decoding_s(slowed) < 3 * decoding_s(usual) + 0.5
    assert max(slowed["ttft_s"]) < PROXIED_DEADLINE_S + SLACK_S
    assert resumes_hitting(lambda: proxied.generate([prompt(700)]))


def decoding_s(answer):
    return answer["wall_s"] - max(answer["ttft_s"])


def test_connections_that_break_in_mid_flight_cost_a_miss(proxied, prompt):
    tokens = prompt(700)
    right = proxied.generate([tokens])["tokens"]
    assert proxied.engine.call("reset_local")
    with proxied.slowed(PROXIED_DEADLINE_S / 4):
        lost = []
        breaking = threading.Timer(PROXIED_DEADLINE_S / 4, lambda: lost.append(proxied.proxy.drop()))
        breaking.start()
        answer = proxied.engine.generate([tokens])
        breaking.join()
    assert lost[0] > 0
    assert answer["tokens"] == right
    proxied.engine.call("settle")
    assert resumes_hitting(lambda: proxied.generate([tokens]))["tokens"] == right


def test_a_transfer_that_outlives_its_lease_is_refused(proxied, prompt):
    """The bytes may be others' by then; here they are not, but nobody can know."""
    tokens = prompt(700)
    (right,) = proxied.generate([tokens])["tokens"]
    assert proxied.engine.call("reset_local")
    watch = Watch(proxied.engine)
    proxied.pool.owner.process.freeze()
    try:
        request = proxied.engine.call("begin_load", prompt=tokens)
        time.sleep(1.3)  # the lease is a second, Mooncake's patience with a holder that says nothing two
    finally:
        proxied.pool.owner.process.thaw()
    assert proxied.engine.call("finish", request_id=request) == right
    proxied.engine.call("settle")
    assert watch.changes()["keys_total{load,missing}"] > 0
    assert resumes_hitting(lambda: proxied.generate([tokens]))["tokens"] == [right]
