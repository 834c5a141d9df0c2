"""The tests' driver for one side of a pair: what a peer-to-peer connector needs on a CPU, and transfers on order."""

from connector.testbed.driver import Driver, greedy, serve
from tests.e2e.engine_driver import FaultyDriver


class PairDriver(FaultyDriver):
    COMMANDS = (
        *FaultyDriver.COMMANDS,
        "wait_for_stores",
        "spoil",
        "begin_pull",
        "steps",
        "forget_what_is_filled",
        "abort",
    )

    def __init__(self, config):
        stand_in_for_a_gpu()
        super().__init__(config)

    def generate(self, prompts, max_tokens, transfers=None):
        return Driver.generate(self, prompts, max_tokens, transfers)

    def _store(self):
        (store,) = (each for each in self.connectors() if type(each).__name__ == "KVTwinConnector")
        return store

    def wait_for_stores(self):
        """Step until all that is to be stored is in the pool; blocks may still wait for the other side."""
        while self._store().has_pending_push_work():
            self.llm.llm_engine.step()

    def spoil(self):
        """Overwrite the whole KV cache."""
        import torch

        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        for cache in runner.kv_caches:
            cache.copy_(torch.randn(cache.shape))

    def begin_pull(self, prompt, transfer):
        """Step until the prompt's transfer has begun, and some more; the id of its request."""
        self.granted.clear()
        request_id = f"pull {id(prompt)}"
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, greedy(16, transfer))
        while not any(self.granted.values()):
            self.llm.llm_engine.step()
        self.steps(20)
        return request_id

    def steps(self, number):
        """Step so often; the tokens computed meanwhile."""
        self.computed.clear()
        for _ in range(number):
            self.llm.llm_engine.step()
        return sum(self.computed.values())

    def forget_what_is_filled(self):
        """Make the store's connector as one that takes every block of a request for filled."""
        for tracked in self._store()._scheduler._tracked.values():
            tracked.filled_len = tracked.request.num_tokens

    def abort(self, request_id):
        self.llm.llm_engine.abort_request([request_id])


def stand_in_for_a_gpu():
    """MooncakeConnector asks which one it is on; and its server would listen on every interface."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    torch.accelerator.current_device_index = lambda: 0
    make = MooncakeBootstrapServer.__init__

    def make_on_loopback(server, host, port):
        make(server, "127.0.0.1", port)

    MooncakeBootstrapServer.__init__ = make_on_loopback


if __name__ == "__main__":
    serve(PairDriver)
