"""Master, memory and engine, each a process in its own group that is dead after `kill`, whatever happened.

A child also asks the kernel to be killed when its parent dies, so a killed run leaves nothing behind.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
PR_SET_PDEATHSIG = 1
INHERITED = dict(os.environ)
"""As it was before this process opened a store of its own, whose settings go to Mooncake through the environment."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "GLOG_minloglevel": "2",
}


def _die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A child with line-wise stdin and stdout; stderr goes to `log`. A variable of `env` that is None is not set."""

    def __init__(self, command, log, env=None):
        self.log = Path(log)
        path = os.pathsep.join([str(PROJECT), str(PROJECT / "connector")])
        environment = {**INHERITED, **ENVIRONMENT, "PYTHONPATH": path, **(env or {})}
        with self.log.open("ab") as stderr:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={name: value for name, value in environment.items() if value is not None},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._pending = b""

    def read_line(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer within {timeout_s} s\n{self.log_tail()}")
            chunk = os.read(self.child.stdout.fileno(), 1 << 16)
            if not chunk:
                raise RuntimeError(f"process ended with {self.child.wait(10)}\n{self.log_tail()}")
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    def write_line(self, text):
        self.child.stdin.write(text.encode() + b"\n")
        self.child.stdin.flush()

    def log_tail(self, size=6000):
        return self.log.read_text(errors="replace")[-size:]

    def signal(self, number):
        os.killpg(self.child.pid, number)

    def freeze(self):
        """Stop it without ending it, until `thaw`; when this returns, none of its threads runs."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while any(state != "T" for state in self._thread_states()):
            assert time.monotonic() < deadline, "the process does not stop"
            time.sleep(0.005)

    def thaw(self):
        self.signal(signal.SIGCONT)

    def _thread_states(self):
        stats = Path(f"/proc/{self.child.pid}/task").glob("*/stat")
        return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]

    def kill(self):
        if self.child.poll() is None:
            self.signal(signal.SIGKILL)
        self.child.wait(20)
        self.child.stdin.close()
        self.child.stdout.close()


def mooncake_binary(name):
    import mooncake

    return str(Path(mooncake.__file__).with_name(name))


class Master:
    """A Mooncake master on loopback with its own ports."""

    def __init__(self, folder, flags=()):
        self.folder, self.flags = Path(folder), tuple(flags)
        self.port, self.metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self.process = Process(
            [
                mooncake_binary("mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self.metrics_port}",
                "--rpc_thread_num=4",
                "--logtostderr=true",
                *self.flags,
            ],
            self.folder / "master.log",
        )
        self._wait_until_up()

    def _wait_until_up(self, timeout_s=20):
        """Its health is good a moment before it serves."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                self.segments()
                return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError(f"master is not up\n{self.process.log_tail()}")

    def http(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/{path}", timeout=5) as answer:
            return answer.read().decode()

    def stored_keys(self):
        return [key for key in self.http("get_all_keys").split() if key]

    def segments(self):
        return self.http("get_all_segments").split()

    def kill(self):
        self.process.kill()


class SegmentOwner:
    """Lends memory to the master's store until killed."""

    def __init__(self, master, folder, segment_bytes=256 << 20):
        self.process = Process(
            [sys.executable, str(Path(__file__).with_name("segment_owner.py")), master.address, str(segment_bytes)],
            Path(folder) / "owner.log",
        )
        # The client library also prints to stdout.
        while (line := self.process.read_line(60)) != "READY 0":
            assert not line.startswith("READY"), line

    def kill(self):
        self.process.kill()


class DiskOwner:
    """Lends memory, and a folder that takes what the memory has no room for, until killed: Mooncake's own service."""

    def __init__(self, master, folder, flags, env):
        fresh = set(master.segments())
        self.process = Process(
            [
                mooncake_binary("mooncake_client"),
                "--host=127.0.0.1",
                f"--port={free_port()}",
                f"--master_server_address={master.address}",
                *flags,
            ],
            Path(folder) / "owner.log",
            env,
        )
        deadline = time.monotonic() + 20
        while set(master.segments()) <= fresh:
            assert time.monotonic() < deadline, self.process.log_tail()
            time.sleep(0.05)

    def kill(self):
        self.process.kill()


class Engine:
    """A real engine in its own process; see driver.py for configuration and commands."""

    driver = Path(__file__).with_name("driver.py")
    """What the process runs; a subclass may have one with more commands."""

    def __init__(self, config, log, env=None, start_timeout_s=180):
        self.process = Process([sys.executable, str(self.driver)], log, env)
        self.process.write_line(json.dumps(config))
        self._start_timeout_s = start_timeout_s
        self._started = False

    def ready(self):
        """Wait until the engine is up; several engines may start at the same time before this."""
        if not self._started:
            self.answer(self._start_timeout_s)
            self._started = True
        return self

    def call(self, op, timeout_s=60, **arguments):
        self.ask(op, **arguments)
        return self.answer(timeout_s)

    def ask(self, op, **arguments):
        """The first half of `call`: other engines may be asked before `answer`."""
        self.ready()
        self.process.write_line(json.dumps({"op": op, **arguments}))

    def answer(self, timeout_s=60):
        """The second half of `call`."""
        answer = json.loads(self.process.read_line(timeout_s))
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}\n{self.process.log_tail()}")
        return answer["ok"]

    def generate(self, prompts, max_tokens=16, timeout_s=60):
        return self.call("generate", timeout_s, prompts=prompts, max_tokens=max_tokens)

    def kill(self):
        self.process.kill()
