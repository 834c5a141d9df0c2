"""Prefill and decode on two engines, as connector/deploy/pd says, and what the proxy in front of them does.

KV goes from one to the other over TCP, with NIXL or with Mooncake's peer-to-peer connector; the pool is beside it.
"""

import json
import urllib.request
import uuid
from pathlib import Path

from connector.testbed.processes import PROJECT, Engine, free_port

RECIPES = PROJECT / "connector" / "deploy" / "pd"
PEERS = {"nixl": "NixlPullConnector", "mooncake": "MooncakeConnector"}
"""Class of the connector that each recipe names."""

STORE = "KVTwinConnector"


def recipe(peer, side, store_extra):
    """vLLM's kv_transfer_config for the "prefill" or "decode" side; `store_extra` is added to the store's settings."""
    config = json.loads((RECIPES / f"{peer}-{side}.json").read_text())
    (store,) = (each for each in config["kv_connector_extra_config"]["connectors"] if each["kv_connector"] == STORE)
    store["kv_connector_extra_config"] = {**store.get("kv_connector_extra_config", {}), **store_extra}
    return config


class Pair:
    """`prefill` and `decode` are engines of class `engine` that start together; `ready` waits for both."""

    def __init__(self, peer, model, pool, folder, store_extra, engine=Engine):
        self.peer, self._bootstrap = peer, f"http://127.0.0.1:{free_port()}"
        self.prefill, self.decode = (
            engine(
                {
                    "model": model,
                    "transfer": recipe(peer, side, store_extra),
                    # vLLM 0.32's MultiConnector has no place for the numbers of a MooncakeConnector.
                    "options": {"disable_log_stats": peer == "mooncake"},
                },
                Path(folder) / f"{side}.log",
                {**pool.environment(), **self._environment()},
            )
            for side in ("prefill", "decode")
        )

    def _environment(self):
        return {
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": self._bootstrap.rpartition(":")[2],
        }

    def ready(self):
        self.prefill.ready()
        self.decode.ready()
        return self

    def kill(self):
        self.prefill.kill()
        self.decode.kill()

    def prefilled(self, prompt):
        """Let the one compute the prompt: its answer, and the kv_transfer_params with which the other fetches it."""
        transfer_id = uuid.uuid4().hex
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        answer = self.prefill.call("generate", prompts=[prompt], max_tokens=1, transfers=[wanted])
        if self.peer == "nixl":
            return answer, answer["transfers"][0]
        with urllib.request.urlopen(f"{self._bootstrap}/query", timeout=5) as registered:
            ((_, entry),) = json.load(registered).items()
        return answer, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": entry["engine_id"],
            "remote_bootstrap_addr": self._bootstrap,
        }

    def decoded(self, prompt, max_tokens, transfer):
        """Let the other one fetch the prompt's KV and answer. When this returns, neither holds a block of it."""
        self.prefill.ask("settle")  # it hands its blocks over while it steps
        answer = self.decode.call("generate", prompts=[prompt], max_tokens=max_tokens, transfers=[transfer])
        self.decode.call("settle")
        self.prefill.answer()
        return answer
