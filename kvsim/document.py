"""What a command prints: plain types in a fixed order, as JSON has them."""

import json
from typing import Any, TypeAlias

Document: TypeAlias = dict[str, Any]


def to_json(document: Document) -> str:
    """One JSON document with an end of line; NaN and infinity are bugs."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
