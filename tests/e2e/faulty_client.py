"""Mooncake's client with faults on order, in the engine's process: what goes wrong does so below the store under test.

A fault says where it strikes:

    on       "exists", "get", "put" or "remove"
    calls    [first, end) of those calls; else each
    keys     which keys of them, in the order they come; else all
    group    only keys of this KV cache group
    thread   only calls that this thread makes

all numbered from when the fault is ordered, and what it does there:

    do       hold       waits until other faults are ordered
             delay      waits for `seconds`
             late       waits for `seconds` with the answer
             raise      raises, and calls nobody
             fail       leaves the keys out of the call, and answers `code` for them
             lie        calls, and answers `code` for the keys whatever came of it
             remove     removes the keys' objects before the call
             truncate   leaves half of the keys' objects, before a get or after a put
             corrupt    changes a bit of each, at the same times
"""

import functools
import threading
import time

METHODS = {
    "exists": "batch_is_exist",
    "get": "batch_get_into_multi_buffers",
    "put": "batch_put_from_multi_buffers",
    "remove": "batch_remove",
}
MISSING, NO_SPACE, RPC_FAILED, RPC_TIMEOUT = -704, -200, -900, -901
"""What Mooncake answers."""

CHANGES = {
    "truncate": lambda data: data[: len(data) // 2],
    "corrupt": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


class Fault:
    """One that was ordered, with what it has met since."""

    def __init__(self, on, do, calls=None, keys=None, group=None, thread=None, code=None, seconds=0.0):
        assert on in METHODS, on
        self.on, self.do, self.code, self.seconds = on, do, code, seconds
        self._calls, self._keys, self._group, self._thread = calls, keys, group, thread
        self._num_calls = self._num_keys = 0
        self.over = threading.Event()

    def struck(self, operation, names):
        """Which of the call's keys it strikes, as positions."""
        if operation != self.on or self._thread not in (None, threading.current_thread().name):
            return []
        met = [at for at, name in enumerate(names) if self._group is None or f"-g{self._group}-" in name]
        call, first_key = self._num_calls, self._num_keys
        self._num_calls += 1
        self._num_keys += len(met)
        if self._calls is not None and not self._calls[0] <= call < self._calls[1]:
            return []
        return [at for key, at in enumerate(met, first_key) if self._keys is None or key in self._keys]

    def before(self, client, names):
        """What it does before the call."""
        if self.do == "hold":
            self.over.wait()
        elif self.do == "delay":
            time.sleep(self.seconds)
        elif self.do == "raise":
            raise RuntimeError("a fault that a test ordered")
        elif self.do == "remove":
            client.batch_remove(names, True)
        elif self.do in CHANGES and self.on == "get":
            rewrite(client, names, CHANGES[self.do])

    def after(self, client, names):
        """What it does after it."""
        if self.do == "late":
            time.sleep(self.seconds)
        elif self.do in CHANGES and self.on == "put":
            rewrite(client, names, CHANGES[self.do])


class Faults:
    """Of all clients of this process."""

    def __init__(self):
        self._lock = threading.Lock()
        self._faults = []
        self._calls = []

    def order(self, orders):
        """Take back what was ordered before, and what was counted; a call that is held goes on."""
        with self._lock:
            before, self._faults = self._faults, [Fault(**order) for order in orders]
            self._calls = []
        for fault in before:
            fault.over.set()

    def calls(self, operation):
        """The keys of each such call since faults were last ordered, none or some."""
        with self._lock:
            return [names for called, names in self._calls if called == operation]

    def call(self, client, operation, names, *arguments):
        """The client's answer, a code for each name, with the faults."""
        with self._lock:
            self._calls.append((operation, names))
            found = [(fault, fault.struck(operation, names)) for fault in self._faults]
        found = [(fault, struck) for fault, struck in found if struck]
        for fault, struck in found:
            fault.before(client, [names[at] for at in struck])
        codes = {at: fault.code for fault, struck in found for at in struck if fault.do in ("fail", "lie")}
        left_out = {at for fault, struck in found for at in struck if fault.do == "fail"}
        asked = [at for at in range(len(names)) if at not in left_out]
        answer = dict(zip(asked, _call(client, operation, names, arguments, asked), strict=True)) if asked else {}
        for fault, struck in found:
            fault.after(client, [names[at] for at in struck])
        return [(answer | codes)[at] for at in range(len(names))]


def _call(client, operation, names, arguments, asked):
    """For some of the names; of the arguments, lists are one entry per name."""
    some = [[argument[at] for at in asked] if isinstance(argument, list) else argument for argument in arguments]
    return getattr(client, METHODS[operation])([names[at] for at in asked], *some)


def rewrite(client, names, change):
    """`change(data)` becomes what these objects hold."""
    for name in names:
        data = client.get(name)
        if data:
            client.batch_remove([name], True)
            client.put(name, change(data))


def faulty(client_type, faults):
    """Makes clients as `client_type` does, which answer with these faults."""

    class FaultyClient:
        def __init__(self):
            self._client = client_type()

        def __getattr__(self, name):
            return getattr(self._client, name)

        @functools.wraps(client_type.setup)  # its text tells which options there are
        def setup(self, *arguments, **options):
            return self._client.setup(*arguments, **options)

    for operation, method in METHODS.items():
        setattr(FaultyClient, method, _faulty_method(faults, operation))
    return FaultyClient


def _faulty_method(faults, operation):
    return lambda self, names, *arguments: faults.call(self._client, operation, list(names), *arguments)
