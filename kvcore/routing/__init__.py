"""Routing policies: which instance takes a request. One policy, one file."""
