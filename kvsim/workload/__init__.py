"""Workloads: recorded traces, one format per module, and generators; all of them give one columnar `Trace`."""
