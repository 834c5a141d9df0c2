"""Eviction policies: which key leaves a full cache. One policy, one file."""
