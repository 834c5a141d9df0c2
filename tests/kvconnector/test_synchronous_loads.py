"""Why loads are asynchronous only (docs/DESIGN.md, 21): what vLLM 0.32 keeps of a synchronous one that failed."""

import pytest

pytestmark = pytest.mark.engine

BLOCK = 4
HIT_LEN = 2 * BLOCK
TEXT = "abcdefghijklmnopqrst"


@pytest.fixture
def engine(monkeypatch):
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    return modelless_engine.Engine([modelless_engine.full(BLOCK)], num_blocks=60)


def promise(engine, *, asynchronously):
    """A connector that offers "one" two blocks, and writes neither."""
    connector = engine.connector
    connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (
        (HIT_LEN, asynchronously) if request.request_id == "one" else (0, False)
    )
    connector.update_state_after_alloc = lambda request, blocks, num_external_tokens: None


def serve_and_lose(engine):
    """Serve "one" up to the report that nothing was written, and let its client leave; the two blocks."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    engine.add("one", TEXT, num_output=2)
    output = engine.scheduler.schedule()
    promised = engine.scheduler.kv_cache_manager.get_block_ids("one")[0][: HIT_LEN // BLOCK]
    report = KVConnectorOutput(finished_recving={"one"}, invalid_block_ids=set(promised))
    is_running = "one" in output.num_scheduled_tokens
    if is_running:
        report.finished_recving = None
    result = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=report)
    engine.scheduler.update_from_output(output, result)
    assert engine.scheduler.requests["one"].num_computed_tokens == 0, "the failure was not noticed"
    engine.abort("one")
    return promised


def local_hit_of_another(engine):
    """Of a request with the same text: the blocks that its first step reads as the engine's own."""
    engine.add("two", TEXT, num_output=2)
    (admitted,) = engine.scheduler.schedule().scheduled_new_reqs
    return admitted.block_ids[0][: admitted.num_computed_tokens // BLOCK]


def test_the_blocks_of_a_failed_synchronous_load_are_hits_of_the_next_request(engine):
    promise(engine, asynchronously=False)
    unwritten = serve_and_lose(engine)
    hit = local_hit_of_another(engine)
    assert hit[: len(unwritten)] == unwritten, "vLLM forgets them now: synchronous loads could be offered"


def test_control_those_of_an_asynchronous_one_are_not(engine):
    promise(engine, asynchronously=True)
    serve_and_lose(engine)
    assert local_hit_of_another(engine) == []
