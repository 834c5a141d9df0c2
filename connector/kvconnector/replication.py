"""What the pool is told about an object that is put into it: how many copies, where, and how long it is held on to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvconnector.settings import Settings
from kvcore.errors import require


@dataclass(frozen=True, slots=True)
class Replication:
    """Mooncake's `ReplicateConfig`, as far as it can be set; the default is Mooncake's own.

    `num_replicas`: in as many segments; where there are fewer, one in each. `preferred_segments`: names of those that
    are tried first. `soft_pin`: evicted when what is not pinned does not suffice, until `soft_pin_ttl_ms` after the put
    (None: the master's `default_kv_soft_pin_ttl`). `grouped`: what ranks and groups store of the same tokens is leased
    and evicted together.
    """

    num_replicas: int = 1
    preferred_segments: tuple[str, ...] = ()
    soft_pin: bool = False
    soft_pin_ttl_ms: int | None = None
    grouped: bool = False

    @property
    def is_default(self) -> bool:
        """Whether there is nothing to tell."""
        return self == _DEFAULT

    def config(self, library: Any, groups: Sequence[str]) -> Any:
        """As an object of Mooncake's for one call; `groups` has one name for each key."""
        config = library.ReplicateConfig()
        config.replica_num = self.num_replicas
        if len(self.preferred_segments) == 1:
            (config.preferred_segment,) = self.preferred_segments
        elif self.preferred_segments:
            config.preferred_segments = list(self.preferred_segments)
        if self.soft_pin:
            config.soft_pin_action = library.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = self.soft_pin_ttl_ms
        if self.grouped:
            config.group_ids = list(groups)
        return config

    def require_known_to(self, library: Any) -> None:
        """Raises InvalidArgument for what the installed Mooncake does not have."""
        one, several = len(self.preferred_segments) == 1, len(self.preferred_segments) > 1
        wanted = (
            ("replica_num", self.num_replicas > 1, "replica_num"),
            ("preferred_segment", one, "preferred_segment"),
            ("preferred_segment", several, "preferred_segments"),
            ("soft_pin", self.soft_pin, "soft_pin_action"),
            ("enable_group_semantics", self.grouped, "group_ids"),
        )
        for key, is_wanted, attribute in wanted:
            expected = f"a Mooncake whose ReplicateConfig has {attribute}, as 0.3.13 has: upgrade it, or leave this out"
            require(not is_wanted or hasattr(library.ReplicateConfig, attribute), key, "set", expected)


_DEFAULT = Replication()


def read_replication(settings: Settings) -> Replication:
    """The names are Mooncake's, and those of vLLM's MooncakeStoreConnector."""
    soft_pin = settings.flag("soft_pin", default=False)
    soft_pin_ttl_ms = settings.count_if_set("soft_pin_ttl_ms", at_least=1)
    require(soft_pin or soft_pin_ttl_ms is None, "soft_pin_ttl_ms", soft_pin_ttl_ms, "nothing but with soft_pin true")
    return Replication(
        num_replicas=settings.count("replica_num", 1, at_least=1),
        preferred_segments=settings.names("preferred_segment"),
        soft_pin=soft_pin,
        soft_pin_ttl_ms=soft_pin_ttl_ms,
        grouped=settings.flag("enable_group_semantics", default=False),
    )
