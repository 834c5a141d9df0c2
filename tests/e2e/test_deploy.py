"""Real engines are started with the files of connector/deploy: what is tested is the recipe.

Changed are addresses, ports, sizes, and how patient engines on a slow machine must be.
"""

import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass

import pytest

from connector.testbed.processes import ENVIRONMENT, PROJECT, Engine, Process, free_port
from connector.testbed.tiny_model import write_tiny_model
from tests.kvconnector.recipes import DEPLOY, command_of, copied, engine_of, installed

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK, GPU_BLOCKS, LEASE_MS = 32, 40, 2_000
BYTES_PER_TOKEN = 4_096  # of the model below
SEGMENT_BYTES = 16 << 20  # the least that Mooncake takes
PATIENCE = {"lookup_deadline_ms": 5_000, "offer_ttl_ms": 1_000}


@dataclass
class Site:
    """Where a recipe is started: its files, as they were changed, and the processes that are up."""

    folder: object
    deploy: object
    ports: dict
    model: str
    running: list

    def serve(self, unit):
        """Start what a unit starts."""
        self.running.append(
            Process(installed(command_of(self.deploy / unit)), self.folder / f"{unit.split('/')[-1]}.log")
        )
        return self.running[-1]

    def engine(self, name, mooncake, transfer):
        """Start an engine with engine.sh's settings."""
        arguments, config, environment = engine_of(self.deploy, mooncake, transfer, self.folder)
        assert arguments[:2] == ["serve", "MODEL"]
        config["kv_connector_extra_config"] |= PATIENCE
        options = {"kv_transfer_config": config, "max_model_len": 1_024, "num_gpu_blocks_override": GPU_BLOCKS}
        self.running.append(Engine({"model": self.model, "options": options}, self.folder / f"{name}.log", environment))
        return self.running[-1]

    def ask_master(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['9003']}/{path}", timeout=5) as answer:
            return answer.read().decode()

    def wait_for_segments(self, count):
        """Until so much memory is lent as the README's check shows."""
        deadline = time.monotonic() + 30
        while True:
            try:
                if len(self.ask_master("get_all_segments").split()) == count:
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, "the memory is not lent"
            time.sleep(0.05)

    def end(self):
        for process in self.running:
            process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 8})


@pytest.fixture(scope="module")
def site(request, model, tmp_path_factory):
    """With a master, which both stores need."""
    folder = tmp_path_factory.mktemp("site")
    ports = {port: str(free_port()) for port in ("50051", "50052", "9003")}
    changes = {
        **ports,
        "mooncake-master": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        "%H": "127.0.0.1",
        "256GB": str(SEGMENT_BYTES),
        "64GB": str(SEGMENT_BYTES),
        "/etc/kvtwin": str(folder),
        "/var/log/kvtwin": str(folder),
        "lease_ttl=10000": f"lease_ttl={LEASE_MS}",
    }
    site = Site(folder, copied(folder, changes), ports, model, [])
    try:
        site.serve("master.service")
        yield site
    finally:
        site.end()


def answer(engine, tokens, max_tokens=16):
    """Without what the engine has cached itself; when this returns, all stores have ended."""
    assert engine.call("reset_local")
    answer = engine.generate([tokens], max_tokens)
    engine.call("settle")
    return answer


def test_a_standalone_store_outlives_engines_and_its_log_tells_how_large_it_should_be(site, prompt):
    site.serve("standalone/owner.service")
    site.wait_for_segments(1)
    recording = site.engine("A", "standalone/mooncake.json", "pool-sizing/kv-transfer.json").ready()
    other = site.engine("B", "standalone/mooncake.json", "standalone/kv-transfer.json")
    share = serve_conversations(recording)
    assert 0.2 < share < 0.8  # the pool is too small: a larger one would have more
    swept = sweep(site, pool_sizes=(SEGMENT_BYTES, 16 * SEGMENT_BYTES))
    print(f"hit share measured {share:.3f}, simulated {swept}")
    assert swept[0] == pytest.approx(share, abs=0.07)
    assert swept[1] > share + 0.1

    tokens = prompt(700)
    missed = answer(recording, tokens)
    assert missed["cached"] == [0]
    recording.kill()
    hit = answer(other.ready(), tokens)
    assert (hit["cached"], hit["tokens"]) == ([672], missed["tokens"])
    assert len(site.ask_master("get_all_segments").split()) == 1

    in_use = json.loads((site.folder / "decisions.log").read_text().splitlines()[0])["namespace"]
    listed = clean_up(site, "list").splitlines()[1:]
    assert [line.split()[:2] for line in listed] == [[in_use, "kvtwin"]]
    clean_up(site, "remove", in_use, "--yes")
    assert site.ask_master("get_all_keys").split() == []
    missed_again = answer(other, tokens)
    assert (missed_again["cached"], missed_again["tokens"]) == ([0], missed["tokens"])
    other.kill()


def test_the_master_s_metrics_that_recipes_and_runbooks_name_are_there(site):
    named = {
        name for path in DEPLOY.rglob("*.md") for name in re.findall(r"master_\w+", path.read_text(encoding="utf-8"))
    }
    there = set(re.findall(r"^(\w+)", site.ask_master("metrics"), re.MULTILINE))
    assert "master_evicted_size_bytes" in named
    assert named - there <= {"master_server_address"}  # a setting


def test_an_embedded_store_is_what_the_engines_lend(site, prompt):
    for process in site.running[1:]:
        process.kill()
    first, second = (site.engine(name, "embedded/mooncake.json", "embedded/kv-transfer.json") for name in ("C", "D"))
    first.ready(), second.ready()
    site.wait_for_segments(2)
    tokens = prompt(700)
    missed = answer(first, tokens)
    hit = answer(second, tokens)
    assert (missed["cached"], hit["cached"]) == ([0], [672])
    assert hit["tokens"] == missed["tokens"]
    first.kill()  # and what it held is gone with it
    left = answer(second, tokens)
    assert left["tokens"] == missed["tokens"]


def serve_conversations(engine):
    """The share of prompt tokens that were hit, in 64 turns of 16 conversations, whichever goes on next."""
    rng, prompt_len, hit_len = random.Random(0), 0, 0
    said = [words(rng, 300) for _ in range(16)]
    for _ in range(64):
        number = rng.randrange(len(said))
        turn = engine.generate([said[number]], 16)
        engine.call("settle")
        prompt_len, hit_len = prompt_len + len(said[number]), hit_len + turn["cached"][0]
        said[number] = (said[number] + turn["tokens"][0] + words(rng, 44))[:900]
    return hit_len / prompt_len


def clean_up(site, *arguments):
    """What the tool of the recipe clean-up says."""
    command = [sys.executable, "-m", "kvconnector.namespaces", "--admin", f"127.0.0.1:{site.ports['9003']}", *arguments]
    paths = f"{PROJECT}:{PROJECT / 'connector'}"
    environment = {"MOONCAKE_CONFIG_PATH": str(site.deploy / "standalone" / "mooncake.json"), "PYTHONPATH": paths}
    told = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    return told.stdout


def words(rng, count):
    return [rng.randrange(3, 1_024) for _ in range(count)]


def sweep(site, pool_sizes):
    """What sweep.py says: the share of hits in all, for pools of so many bytes."""
    script = site.deploy / "pool-sizing" / "sweep.py"
    settings = {
        "--block": BLOCK,
        "--gpu-blocks": GPU_BLOCKS,
        "--bytes-per-token": BYTES_PER_TOKEN,
        "--lease-ms": LEASE_MS,
        "--gb": ",".join(str(size / 1e9) for size in pool_sizes),
    }
    command = [
        sys.executable,
        script,
        site.folder / "decisions.log",
        *(f"{name}={value}" for name, value in settings.items()),
    ]
    told = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    rows = [line.split() for line in told.stdout.splitlines()[1:]]
    return [float(row[1].rstrip("%")) / 100 for row in rows]
