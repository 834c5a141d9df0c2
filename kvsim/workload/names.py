"""The names of trace formats and of units of time, as command line and scenario take them; imports nothing heavy."""

from typing import Literal, TypeAlias

FormatName: TypeAlias = Literal[
    "mooncake", "claude-code", "decision-log", "azure", "burstgpt", "bailian", "kvcache-ai", "multi-turn", "kvtwin"
]
TimeUnit: TypeAlias = Literal["s", "ms", "us"]
