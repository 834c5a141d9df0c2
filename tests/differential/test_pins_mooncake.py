"""Pins in the simulated pool are those of a real master: who stays when room is needed, and for how long."""

import time

import pytest

from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.runs import num_blocks
from kvcore.types import GroupId, StreamId
from kvsim.pool.pins import SoftPins
from kvsim.pool.store import MooncakePool
from tests.differential.mooncake_master import client_of_master

BLOCK_BYTES = 64 << 10
CAPACITY = 2_048
PINNED = 400
OTHERS = 1_700  # together above the watermark of 90 %
WATERMARK, RATIO = 0.9, 0.05
G = GroupId(0)
SHORT_MS = 300

SOFT, BRIEF, HARD = Hints(pin=Pin.SOFT), Hints(pin=Pin.SOFT, ttl_ns=SHORT_MS * 10**6), Hints(pin=Pin.HARD)
MARKED = {"none": NO_HINTS, "soft": SOFT, "brief": BRIEF, "hard": HARD}


def twin_kept(hints):
    """How many of the oldest objects, put with the hints, are left when others have filled the pool; and of those."""
    pool = MooncakePool(CAPACITY * BLOCK_BYTES, (BLOCK_BYTES,), 1, WATERMARK, RATIO, SoftPins.GO_LAST)
    for name in range(PINNED + OTHERS):
        now_ns = name if name < PINNED else name + 2 * SHORT_MS * 10**6
        pool.put(G, ((StreamId(name), 0, 1),), ((0, 1),), now_ns, hints if name < PINNED else NO_HINTS)
    pool.audit()
    here = [num_blocks(pool.holds(G, ((StreamId(name), 0, 1),), ((0, 1),))) for name in range(PINNED + OTHERS)]
    return sum(here[:PINNED]), sum(here[PINNED:])


def master_kept(client, prefix, hints):
    from mooncake.store import ReplicateConfig, SoftPinAction

    config = ReplicateConfig()
    config.with_hard_pin = hints.pin is Pin.HARD
    if hints.pin is Pin.SOFT:
        config.soft_pin_action = SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = None if hints.ttl_ns is None else hints.ttl_ns // 10**6
    value, keys = bytes(BLOCK_BYTES), [f"{prefix}-{name}" for name in range(PINNED + OTHERS)]
    assert all(client.put(key, value, config) == 0 for key in keys[:PINNED])
    time.sleep(2 * SHORT_MS / 1_000)
    for key in keys[PINNED:]:
        client.put(key, value)
    time.sleep(0.3)  # its eviction thread looks every 10 ms
    found = [present == 1 for present in client.batch_is_exist(keys)]
    return sum(found[:PINNED]), sum(found[PINNED:])


def check(kept, hints):
    """Assert what the hints promise."""
    pinned, others = kept
    assert PINNED + OTHERS > 0.9 * CAPACITY >= pinned + others > 0.75 * CAPACITY
    if hints in (SOFT, HARD):
        assert pinned == PINNED, "others sufficed"
    else:
        assert pinned < PINNED - 50, "the oldest went"


@pytest.mark.store
@pytest.mark.parametrize("name", MARKED)
def test_pins_hold_like_a_real_masters(tmp_path, name):
    with client_of_master(tmp_path, CAPACITY * BLOCK_BYTES, 1, WATERMARK, RATIO) as client:
        kept = master_kept(client, name, MARKED[name])
    check(kept, MARKED[name])
    check(twin_kept(MARKED[name]), MARKED[name])


def test_the_check_rejects_what_the_hints_do_not_promise():
    for name, wrong in [("soft", "none"), ("hard", "none"), ("brief", "soft"), ("none", "hard")]:
        check(twin_kept(MARKED[name]), MARKED[name])
        with pytest.raises(AssertionError):
            check(twin_kept(MARKED[wrong]), MARKED[name])
