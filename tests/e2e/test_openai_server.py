"""Two OpenAI-compatible servers on one pool, one of them with two data parallel ranks, as a client sees them."""

import time
from dataclasses import dataclass, field

import pytest

from connector.testbed.server import Server
from tests.e2e.conftest import CONNECTOR, Engines
from tests.e2e.test_pool_hits import overwrite_with_noise

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK = 32
TRANSFER = {
    "kv_connector": CONNECTOR["name"],
    "kv_role": "kv_both",
    "kv_connector_extra_config": CONNECTOR["extra"],
}


@dataclass
class Servers:
    """Where a request can go: (server, data parallel rank or None). `known` texts are in the pool, block by block."""

    engines: Engines
    single: Server
    ranked: Server
    known: set = field(default_factory=set)

    @property
    def places(self):
        return [(self.single, None), (self.ranked, 0), (self.ranked, 1)]

    def ask(self, place, prompt):
        """(answer, tokens that were cached); when this returns, all of it is in the pool."""
        server, rank = place
        before = set(self.engines.pool.master.stored_keys())
        answer, num_cached = server.complete(prompt, rank=rank)
        said = [*prompt, *answer[:-1]]
        new = {tuple(said[:end]) for end in range(BLOCK, len(said) + 1, BLOCK)} - self.known
        self.known |= new
        deadline = time.monotonic() + 30
        while len(set(self.engines.pool.master.stored_keys()) - before) < len(new):
            assert time.monotonic() < deadline, "the answer is not stored"
            time.sleep(0.02)
        return answer, num_cached

    def right(self, prompt):
        return self.engines.plain.generate([prompt])["tokens"][0]


@pytest.fixture(scope="module")
def servers(engines, pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    started = [
        Server(engines.model, folder / "single.log", pool.environment(), TRANSFER),
        Server(engines.model, folder / "ranked.log", pool.environment(), TRANSFER, ["--data-parallel-size=2"]),
    ]
    try:
        yield Servers(engines, *(server.ready() for server in started))
    finally:
        for server in started:
            server.kill()


def prompt_tokens(server):
    """The server's prompt tokens so far, by (engine, tier), as Prometheus would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = (sample for family in text_string_to_metric_families(server.get("metrics")) for sample in family.samples)
    ours = [sample for sample in samples if sample.name == "vllm:kvtwin_prompt_tokens_total"]
    return {(int(sample.labels["engine"]), sample.labels["tier"]): int(sample.value) for sample in ours}


def rise(before, after):
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


one_model = pytest.mark.parametrize("engines", ["qwen3"], indirect=True)


@one_model
def test_a_conversation_alternates_between_servers_and_ranks(servers, prompt):
    said, num_stored = prompt(300), 0
    for turn in range(6):
        answer, num_cached = servers.ask(servers.places[turn % 3], said)
        assert answer == servers.right(said)
        assert num_cached == num_stored
        num_stored = (len(said) + len(answer) - 1) // BLOCK * BLOCK
        said = [*said, *answer, *prompt(50, turn + 1)]


@one_model
def test_each_data_parallel_rank_joins_the_pool_and_shares_with_the_others(servers, prompt):
    tokens, before = prompt(700), prompt_tokens(servers.ranked)
    assert servers.ask((servers.ranked, 0), tokens) == (servers.right(tokens), 0)
    assert servers.ask((servers.ranked, 1), tokens) == (servers.right(tokens), 672)
    assert servers.ask((servers.ranked, 0), tokens) == (servers.right(tokens), 672)
    assert rise(before, prompt_tokens(servers.ranked)) == {
        (0, "computed"): 700 + 28,
        (0, "local"): 672,
        (1, "pool"): 672,
        (1, "computed"): 28,
    }


@one_model
def test_metrics_over_http_say_where_prompts_came_from(servers, prompt):
    tokens = prompt(700)
    servers.ask((servers.ranked, 1), tokens)
    before = prompt_tokens(servers.single)
    servers.ask((servers.single, None), tokens)
    assert rise(before, prompt_tokens(servers.single)) == {(0, "pool"): 672, (0, "computed"): 28}


@one_model
def test_control_noise_in_the_pool_changes_a_server_s_answer(servers, prompt):
    tokens = prompt(700)
    assert servers.ask((servers.single, None), tokens) == (servers.right(tokens), 0)
    overwrite_with_noise(servers.engines.pool)
    answer, num_cached = servers.ranked.complete(tokens, rank=1)
    assert num_cached == 672
    assert answer != servers.right(tokens)
