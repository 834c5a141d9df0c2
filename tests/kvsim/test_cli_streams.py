"""The command line among terminals, pipes, full disks, closed streams and signals."""

import os
import pty
import signal
import subprocess

import pytest

from tests.kvsim.command import KVSIM


def test_progress_is_for_terminals_only(tiny):
    assert "9/9" in on_terminal("run", tiny)
    assert on_terminal("run", tiny, "--json") == ""


def on_terminal(*arguments):
    """What a run writes to standard error when that is a terminal."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen([KVSIM, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 4096):
            written += chunk
    except OSError:  # how a terminal says that nobody is left on the other side
        pass
    os.close(ours)
    assert child.wait(timeout=60) == 0
    return written.decode()


def test_a_reader_that_has_seen_enough_ends_it_quietly(tiny):
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.Popen([KVSIM, "run", tiny, "--json"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert child.communicate(timeout=60)[1] == b""
    assert child.returncode == -signal.SIGPIPE


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_output_that_cannot_be_written_is_one_line(trace, as_json):
    with open("/dev/full", "w") as full:
        child = subprocess.run([KVSIM, "trace", "stats", trace, *as_json], stdout=full, stderr=subprocess.PIPE)
    assert child.returncode == 1
    assert child.stderr == b"standard output: not written: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("as_json", ["", "--json"])
def test_streams_may_be_closed(tiny, closed, as_json):
    child = subprocess.run(f"'{KVSIM}' run '{tiny}' {as_json} {closed}", shell=True, capture_output=True, timeout=60)
    assert (child.returncode, child.stderr) == (0, b"")
    assert bool(child.stdout) == (closed == "2>&-")


def test_a_message_goes_nowhere_rather_than_to_standard_output():
    child = subprocess.run(f"'{KVSIM}' trace stats none 2>&-", shell=True, capture_output=True, timeout=60)
    assert (child.returncode, child.stdout) == (2, b"")


def test_ctrl_c_ends_it_quietly(tiny, tmp_path):
    pipe = tmp_path / "trace.jsonl"
    os.mkfifo(pipe)
    child = subprocess.Popen(
        [KVSIM, "run", tiny, "--trace", pipe, "--format", "mooncake", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with pipe.open("w"):  # opens once the child reads
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60) == (b"", b"")
    assert child.returncode == 128 + signal.SIGINT
