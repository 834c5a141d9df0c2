"""Bytes that the pool gives to other objects while somebody reads them are never taken for what was asked.

The reader is stopped in the middle of a transfer, for longer than it takes to replace all that is in the pool.
"""

import json
import sys
import time
from pathlib import Path

import pytest

from connector.testbed.pool import Pool
from connector.testbed.processes import PROJECT, Process

pytestmark = [pytest.mark.store, pytest.mark.slow]

NUM_OBJECTS, OBJECT_BYTES, FILLER_BYTES = 4, 16 << 20, 8 << 20
SEGMENT_BYTES = 96 << 20


def let_the_lease_end(pool, client):
    time.sleep(1.1)


def remove_by_force(pool, client):
    assert client.batch_remove(names(), True) == [0] * NUM_OBJECTS


def start_the_master_anew(pool, client):
    pool.master.kill()
    pool.master.start()


def names():
    return [f"object {index}" for index in range(NUM_OBJECTS)]


def read_while(how, lease_ms, reader, folder):
    """What the reader got that was stopped while `how` happened and everything was replaced."""
    flags = (f"--default_kv_lease_ttl={lease_ms}", "--eviction_ratio=0.9", "--eviction_high_watermark_ratio=1")
    pool = Pool(folder, SEGMENT_BYTES, flags)
    script = str(Path(__file__).with_name("store_reader.py"))
    arguments = [sys.executable, script, pool.master.address, str(NUM_OBJECTS), str(OBJECT_BYTES), reader]
    process = Process(arguments, folder / "reader.log", {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'connector'}"})
    try:
        with pool.client() as client:
            for index, name in enumerate(names()):
                assert client.put(name, bytes([index + 1]) * OBJECT_BYTES) == 0
            skip_to(process, "READY")
            process.write_line("")
            skip_to(process, "READING")
            time.sleep(0.03)
            process.freeze()
            how(pool, client)
            replace_everything(client)
            process.thaw()
            answer = process.read_line(30)
            while not answer.startswith("{"):
                answer = process.read_line(30)
            return json.loads(answer)
    finally:
        process.kill()
        pool.kill()


def skip_to(process, line):
    while process.read_line(30) != line:  # the client library prints, too
        pass


def replace_everything(client):
    deadline, num_bytes = time.monotonic() + 20, 0
    while num_bytes < 2 * SEGMENT_BYTES:
        assert time.monotonic() < deadline, "the pool takes nothing"
        if client.put(f"filler {time.monotonic_ns()}", bytes([200]) * FILLER_BYTES) == 0:
            num_bytes += FILLER_BYTES
        else:
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("how", "lease_ms"),
    [(let_the_lease_end, 1_000), (remove_by_force, 60_000), (start_the_master_anew, 60_000)],
)
def test_what_was_replaced_while_it_was_read_is_not_believed(how, lease_ms, tmp_path):
    got = read_while(how, lease_ms, "connector", tmp_path)
    assert "ok" not in got["outcomes"]


@pytest.mark.parametrize("how", [remove_by_force, start_the_master_anew])
def test_control_mooncake_believes_it(how, tmp_path):
    got = read_while(how, 60_000, "mooncake", tmp_path)
    assert ("ok", False) in list(zip(got["outcomes"], got["right"], strict=True))
