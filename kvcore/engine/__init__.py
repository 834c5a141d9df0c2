"""Mode `engine`: what vLLM's own managers and its in-tree Mooncake connector answer, oddities included.

The definition is `kvcore.hit` and `kvcore.masks`; docs/DIFFERENCES.md lists where these answer otherwise.
"""
