"""The entry point `vllm.general_plugins`: makes `KVTwinConnector` a name that vLLM knows."""

import contextlib


def register() -> None:
    """Register the connector's name without loading it; vLLM calls this in each of its processes, maybe twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector("KVTwinConnector", "kvconnector.connector", "KVTwinConnector")
