"""Engines that must not share do not, say so at the start, and never answer one another."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.store,
    pytest.mark.slow,
    pytest.mark.parametrize("engines", ["qwen3"], indirect=True),
]

HALF_PRECISION = {"options": {"dtype": "bfloat16"}}
OTHER_HASHES = {"options": {"prefix_caching_hash_algo": "xxhash"}, "environment": {"PYTHONHASHSEED": None}}
PORTS_OF_A_CLIENT = 2
"""On all interfaces: the handshake, and the TCP transport (Mooncake 0.3.13; MC_TCP_BIND_ADDRESS changes neither)."""

LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as the kernel writes them in /proc/net."""


@dataclass
class Strangers:
    """Two engines with the model and the pool of the fixture `engines`, whose blocks mean nothing to those."""

    half_precision: Engine
    other_hashes: Engine


@pytest.fixture(scope="module")
def strangers(engines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    started = []

    def start(name, options, environment):
        config = {"model": engines.model, "connector": CONNECTOR, "options": options}
        environment = {**engines.pool.environment(), "VLLM_LOGGING_LEVEL": "INFO", **environment}
        started.append(Engine(config, folder / f"{name}.log", environment))
        return started[-1]

    try:
        half_precision = start("half", HALF_PRECISION["options"], {})
        other_hashes = start("hashes", **OTHER_HASHES)
        yield Strangers(half_precision.ready(), other_hashes.ready())
    finally:
        for engine in started:
            engine.kill()


def generate(engine, tokens):
    """Without its own cache; when this returns, all is stored."""
    assert engine.call("reset_local")
    answer = engine.generate([tokens])
    engine.call("settle")
    return answer


def announced(engine):
    """The line that says what is shared with whom."""
    (line,) = [line for line in engine.process.log.read_text().splitlines() if "shared with every engine" in line]
    return line


@pytest.mark.parametrize("stranger", ["half_precision", "other_hashes"])
def test_engines_whose_bytes_or_hashes_differ_share_nothing_and_say_so(engines, strangers, prompt, stranger):
    """Cases S18 and S19; each finds what it stored itself."""
    stranger = getattr(strangers, stranger)
    tokens, other = prompt(700), prompt(700, 1)
    engines.store([tokens])
    assert [generate(stranger, tokens)["cached"] for _ in range(2)] == [[0], [672]]
    generate(stranger, other)
    assert engines.read([other])["cached"] == [0]
    assert engines.read([tokens])["cached"] == [672], "control: of its own kind it hits"
    namespaces = [engine.call("namespace") for engine in (stranger, engines.reader)]
    assert len(set(namespaces)) == 2
    assert f"in namespace {namespaces[0]} of" in announced(stranger)


def test_hashes_that_no_other_engine_can_have_are_warned_of(strangers):
    """Case S19: without PYTHONHASHSEED this algorithm has a seed of the process."""
    (line,) = [
        line for line in strangers.other_hashes.process.log.read_text().splitlines() if "kvtwin: no other" in line
    ]
    assert "WARNING" in line
    assert "PYTHONHASHSEED" in line
    assert "kvtwin: no other" not in strangers.half_precision.process.log.read_text()


def test_engines_of_two_pools_on_one_host_never_answer_each_other(engines, cramped, prompt):
    """They have the same namespace, and each would hit what the other one stored."""
    first, second = prompt(700), prompt(700, 1)
    assert cramped.engine.call("namespace") == engines.writer.call("namespace"), "another test has reset its cache"
    engines.store([first])
    assert cramped.generate([second])["cached"] == cramped.generate([first])["cached"] == [0]
    assert engines.read([second])["cached"] == [0]
    assert cramped.generate([first])["cached"] == engines.read([first])["cached"] == [672]


def exposed_ports(engine):
    """Where the engine's process listens on an address that is not of the loopback interface."""
    process = Path(f"/proc/{engine.process.child.pid}")
    own = {str(link.readlink()) for link in process.glob("fd/*") if link.is_symlink()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in (process / "net" / name).read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {int(port, 16) for address, port in listening if address not in LOOPBACK}


def test_nothing_listens_beyond_loopback_but_what_mooncake_s_clients_always_open(engines, prompt):
    """There is one client in each half. The connector itself listens nowhere."""
    engines.store([prompt(700)])
    engines.read([prompt(700)])
    assert exposed_ports(engines.plain) == set()
    assert len(exposed_ports(engines.pool.owner)) == PORTS_OF_A_CLIENT
    for engine in (engines.writer, engines.reader):
        assert len(exposed_ports(engine)) == 2 * PORTS_OF_A_CLIENT
