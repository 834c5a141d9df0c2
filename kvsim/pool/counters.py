"""What happened to a pool."""

from dataclasses import dataclass


@dataclass(slots=True)
class PoolCounters:
    """In objects unless said otherwise; an object is one block of one group, however many copies it has."""

    lookups: int = 0
    """Calls of exists."""
    asked: int = 0
    """Keys that exists was asked for."""
    found: int = 0
    """Keys that exists found."""
    found_on_disk: int = 0
    """Of these, those that were on disk alone."""
    got: int = 0
    """Keys that get found."""
    got_from_disk: int = 0
    """Of these, those that were on disk alone."""
    late: int = 0
    """Keys that get was asked for and did not get: they were gone, or `unreadable`, or `unstaged`."""
    unreadable: int = 0
    """Of these, those whose every copy was with a client that is dead."""
    unstaged: int = 0
    """Of these, those on disk that did not fit the buffer of who reads them."""
    put: int = 0
    rejected: int = 0
    """Puts refused for want of space, or sent to a client that is dead."""
    removed: int = 0
    removed_from_disk: int = 0
    """Of these, those that were on disk alone."""
    evicted: int = 0
    """Those that left memory to make room."""
    evicted_pinned: int = 0
    """Of these, those that were soft-pinned."""
    evictions: int = 0
    """Passes that evicted something."""
    offloaded: int = 0
    """Those written to disk."""
    evicted_from_disk: int = 0
    """Those that left disk to make room."""
    promoted: int = 0
    """Those copied from disk to memory because they were read."""
    lost: int = 0
    """Those that left memory with the last client that had a copy."""
    lost_from_disk: int = 0
    """Those whose disk was that of such a client."""
