"""What operators and failures do to a pool under real engines: tenants and quotas, owners that die and come back."""

import time
from dataclasses import dataclass

import pytest

from connector.testbed.pool import Pool
from connector.testbed.processes import SegmentOwner
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.e2e.test_faults import resumes_hitting
from tests.e2e.test_metrics import Watch

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

SEGMENT_BYTES = 16 << 20
LEASE_S = 4
QUOTAS = """version: 1
tenants:
  - name: rich
    quota: 32MB
  - name: poor
    quota: 2MB
"""


@dataclass
class Tenants:
    """Engines of two tenants on one pool whose memory two owners lend; `rich` may have all of it, `poor` little."""

    pool: Pool
    rich: Engine
    poor: Engine

    def generate(self, engine, prompts, max_tokens=16):
        """Without the engine's own prefix cache; when this returns, what it stored is stored or refused."""
        assert engine.call("reset_local")
        answer = engine.generate(prompts, max_tokens)
        engine.call("settle")
        return answer


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    quotas = folder / "quotas.yaml"
    quotas.write_text(QUOTAS)
    flags = (
        "--enable_multi_tenants=true",
        f"--tenant_quota_connector_uri={quotas}",
        f"--default_kv_lease_ttl={LEASE_S}s",
    )
    pool = Pool(folder, SEGMENT_BYTES, flags)
    model = write_tiny_model("qwen3", folder / "model")

    def start(tenant):
        connector = {**CONNECTOR, "extra": {**CONNECTOR["extra"], "tenant_id": tenant}}
        return Engine({"model": model, "connector": connector}, folder / f"{tenant}.log", pool.environment())

    rich, poor = start("rich"), start("poor")
    try:
        yield Tenants(pool, rich.ready(), poor.ready())
    finally:
        for part in (rich, poor, pool):
            part.kill()


def test_tenants_do_not_find_each_other_s_objects(tenants, prompt):
    tokens = prompt(700)
    right = tenants.generate(tenants.rich, [tokens])["tokens"]
    assert tenants.generate(tenants.rich, [tokens])["cached"] == [672]
    stranger = tenants.generate(tenants.poor, [tokens])
    assert (stranger["cached"], stranger["tokens"]) == ([0], right)


def test_beyond_its_quota_stores_are_refused_counted_and_offered_again(tenants, prompt):
    """A tenant's own objects make room, but not those that somebody has just asked for."""
    first, second = prompt(700, 1), prompt(700, 2)
    right = tenants.generate(tenants.rich, [second])["tokens"]
    assert resumes_hitting(lambda: tenants.generate(tenants.poor, [first]))
    watch = Watch(tenants.poor)
    assert tenants.generate(tenants.poor, [second])["tokens"] == right
    changes = watch.changes()
    assert changes["keys_total{store,no_space}"] > 0
    assert "breaker_state{worker}" not in changes
    time.sleep(LEASE_S + 0.5)
    assert resumes_hitting(lambda: tenants.generate(tenants.poor, [second]))["tokens"] == right


@pytest.fixture
def second_owner(tenants):
    """Another owner, beside the one that there is: the master takes its time to forget one that is gone."""
    deadline = time.monotonic() + 60
    while len(tenants.pool.master.segments()) > 1:
        assert time.monotonic() < deadline, "an owner is never forgotten"
        time.sleep(0.2)
    owner = SegmentOwner(tenants.pool.master, tenants.pool.folder, SEGMENT_BYTES)
    yield owner
    owner.kill()


def store_on_both(tenants, owner, prompts):
    """Right tokens of the prompts, whose objects lie with both owners."""
    answer = tenants.generate(tenants.rich, prompts)
    assert answer["cached"] == [0] * len(prompts)
    assert len(tenants.pool.master.segments()) == 2
    return answer["tokens"]


def test_with_one_of_two_owners_gone_what_it_held_is_computed(tenants, prompt, second_owner):
    prompts = [prompt(700, number) for number in range(3)]
    right = store_on_both(tenants, second_owner, prompts)
    watch = Watch(tenants.rich)
    second_owner.kill()
    start = time.monotonic()
    for tokens, expected in zip(prompts, right, strict=True):
        assert tenants.generate(tenants.rich, [tokens])["tokens"] == [expected]
    assert time.monotonic() - start < 40.0
    assert watch.changes()["late_misses_total{}"] > 0
    assert resumes_hitting(lambda: tenants.generate(tenants.rich, prompts[:1]))["tokens"] == right[:1]


def test_an_owner_that_dies_under_a_load_costs_the_load(tenants, prompt, second_owner, faults):
    tokens = prompt(700)
    (right,) = store_on_both(tenants, second_owner, [tokens])
    assert tenants.rich.call("reset_local")
    faults(tenants.rich, {"on": "get", "do": "hold"})
    request = tenants.rich.call("begin_load", prompt=tokens)
    second_owner.kill()
    faults(tenants.rich)
    assert tenants.rich.call("finish", request_id=request) == right
    tenants.rich.call("settle")
    assert resumes_hitting(lambda: tenants.generate(tenants.rich, [tokens]))["tokens"] == [right]


def test_an_owner_that_comes_back_is_used_again(tenants, prompt):
    tokens = prompt(700)
    tenants.pool.owner.kill()
    start = time.monotonic()
    right = tenants.generate(tenants.rich, [tokens])["tokens"]
    assert time.monotonic() - start < 30.0
    tenants.pool.lend()
    assert resumes_hitting(lambda: tenants.generate(tenants.rich, [tokens]))["tokens"] == right
