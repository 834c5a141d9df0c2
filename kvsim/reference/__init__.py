"""The oracle: the installed vLLM's own scheduler in place of the fast engine's, in the same virtual time.

Importing it imports vLLM (some seconds); nothing else in kvsim does.
"""

from kvsim.reference.engine import reference_simulation

__all__ = ["reference_simulation"]
