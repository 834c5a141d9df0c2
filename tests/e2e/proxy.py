"""A TCP proxy on loopback that delays what goes through it, and loses its connections on order."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Stands at `address` before the target HOST:PORT. Each message waits `delay_s`, in both directions."""

    def __init__(self, target):
        host, port = target.split(":")
        self._target = (host, int(port))
        self.delay_s = 0.0
        self._lock = threading.Lock()
        self._open = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self):
        """Lose every connection there is, whatever is on its way; how many."""
        with self._lock:
            lost, self._open = self._open, set()
        for end in lost:
            _close(end)
        return len(lost) // 2

    def close(self):
        _close(self._server)
        self.drop()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, 1)
            except OSError:  # nobody is there
                _close(near)
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay_s)
                sink.sendall(data)
        for end in (source, sink):
            _close(end)
        with self._lock:
            self._open -= {source, sink}


def _close(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
