"""The line that says, when the engine starts, what will be shared with whom: engines that say the same share."""

from collections import Counter

from kvconnector.config import ConnectorConfig
from kvconnector.keys import KeySpace
from kvcore.spec import GroupSpec, ModelSpec


def announcement(config: ConnectorConfig, keys: KeySpace, model: ModelSpec, hashes: str) -> str:
    """`hashes` names the algorithm and the seed of the engine's block hashes."""
    return (
        f"kvtwin: {config.role.value}: {_use(config)} {_pool(config)}; shared with every engine in namespace "
        f"{keys.namespace or '(none)'} of key format {config.key_format.value}, integrity {config.integrity.value}: "
        f"{_groups(model.groups)}, hashed every {keys.hash_block_size} tokens by {hashes}, "
        f"{_shards(keys, model)} on {keys.num_ranks} rank(s)"
    )


def _shards(keys: KeySpace, model: ModelSpec) -> str:
    """How many objects each block is; one number where groups agree."""
    numbers = [keys.num_shards(group) for group in range(len(model.groups))]
    return f"{' + '.join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))} shard(s) of each block"


def _use(config: ConnectorConfig) -> str:
    uses = {"loads from": config.loads, "stores to": config.stores}
    return " and ".join(use for use, wanted in uses.items() if wanted) or "only lends memory to"


def _pool(config: ConnectorConfig) -> str:
    pool = config.pool
    devices = f" on {pool.device_name}" if pool.device_name else ""
    return f"the pool of {pool.master_server_address} over {pool.protocol}{devices}, tenant {pool.tenant_id}"


def _groups(groups: tuple[GroupSpec, ...]) -> str:
    """Equal groups once."""
    kinds = Counter(f"{type(group).__name__} in blocks of {group.block_size} tokens" for group in groups)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
