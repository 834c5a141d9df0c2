"""What step times are of: a model on the GPUs of one instance."""

from typing import NamedTuple


class Deployment(NamedTuple):
    """Names of the catalogue, and parallel sizes under vLLM's names."""

    model: str
    device: str
    tensor_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool

    def __str__(self) -> str:
        return self.shown(self._fields)

    def differences(self, other: "Deployment") -> tuple[str, ...]:
        """Fields in which the two differ."""
        return tuple(name for name in self._fields if getattr(self, name) != getattr(other, name))

    def shown(self, fields: tuple[str, ...]) -> str:
        """The fields as TOML writes them."""
        return ", ".join(f"{name} {str(getattr(self, name)).lower()}" for name in fields)
