"""The control file: what it may say, and that whatever else is in it changes nothing."""

import logging
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector import control
from kvconnector.control import MAX_CHARACTERS, ControlFile, read_switches

from kvcore.access import ALL_ACCESS, NO_ACCESS, Access, Switch
from kvcore.errors import InvalidArgument
from tests.kvconnector.logged import logged

NO_READS, NO_WRITES = Access(reads=Switch.OFF), Access(writes=Switch.OFF)


@pytest.mark.parametrize(
    ("text", "access"),
    [
        ('reads = "off"', NO_READS),
        ('writes = "off"\n', NO_WRITES),
        ('reads = "off"\nwrites = "off"', NO_ACCESS),
        ('reads = "on"', ALL_ACCESS),
        ('# the pool is sick\nreads="off" # until noon\nwrites = "on"', NO_READS),
    ],
)
def test_what_it_may_say(text, access):
    assert read_switches(text) == access


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "to allow all, remove the file"),
        ("# nothing", "reads or writes"),
        ("reads = off", r'TOML such as reads = "off"'),
        ('reads = "of', "TOML such as"),
        ("reads = false", 'reads = False: expected "on" or "off"'),
        ('reads = "OFF"', '"on" or "off"'),
        ('read = "off"', "'read': expected one of reads, writes"),
        ('reads = "off"\n[writes]\nx = 1', "writes = "),
        ('reads = "off"\nreads = "on"', "TOML such as"),
    ],
)
def test_what_is_refused_and_why(text, message):
    with pytest.raises(InvalidArgument, match=message):
        read_switches(text)


SWITCHES = st.dictionaries(st.sampled_from(("reads", "writes")), st.sampled_from(("on", "off")), min_size=1)


@given(SWITCHES, st.integers(1, 40))
def test_half_a_file_never_says_what_the_whole_does_not(switches, cut):
    """Whoever reads while it is being written sees a part: it is refused, or each line in it is whole."""
    whole = "".join(f'{name} = "{value}"\n' for name, value in switches.items())
    part = whole[: max(0, len(whole) - cut)]
    try:
        access = read_switches(part)
    except InvalidArgument:
        return
    assert "=" in part
    assert access == read_switches("".join(line + "\n" for line in whole.splitlines()[: part.count('"') // 2]))


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.toml"


@pytest.fixture
def opened(path, monkeypatch):
    """The file's reader, whose thread never looks."""
    monkeypatch.setattr(control, "LOOK_EVERY_S", 1e6)
    made = []

    def open_it():
        made.append(ControlFile(str(path)))
        return made[-1]

    yield open_it
    for reader in made:
        reader._left.set()


def looked(reader):
    reader.look()
    return reader.access, reader.refused


def test_it_comes_changes_and_goes(opened, path):
    reader = opened()
    assert (reader.access, reader.refused) == (ALL_ACCESS, False)
    for text, access in (('reads = "off"', NO_READS), ('writes = "off"', NO_WRITES), ('writes = "on"', ALL_ACCESS)):
        path.write_text(text)
        assert looked(reader) == (access, False)
    path.write_text('writes = "off"')
    reader.look()
    path.unlink()
    assert looked(reader) == (ALL_ACCESS, False)


def test_it_is_heeded_before_the_first_request(opened, path):
    path.write_text('reads = "off"')
    assert opened().access == NO_READS


def test_what_is_not_understood_leaves_all_as_it_was(opened, path):
    path.write_text('reads = "off"')
    reader = opened()
    broken = [
        lambda: path.write_text(""),
        lambda: path.write_text("reads = on"),
        lambda: path.write_bytes(b"\xff\xfe"),
        lambda: path.write_text('writes = "off" #' + "x" * MAX_CHARACTERS),
        lambda: (path.unlink(), path.mkdir()),
    ]
    for break_it in broken:
        break_it()
        assert looked(reader) == (NO_READS, True)
    path.rmdir()
    assert looked(reader) == (ALL_ACCESS, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_leaves_all_as_it_was(opened, path):
    path.write_text('reads = "off"')
    reader = opened()
    path.chmod(0)
    assert looked(reader) == (NO_READS, True)


def test_the_log_has_each_change_once(opened, path):
    with logged("kvconnector.control", logging.WARNING) as said:
        reader = opened()
        for text in (None, 'reads = "off"', 'reads = "off"', "reads", "reads", 'reads = "off"', 'reads = "on"'):
            if text is not None:
                path.write_text(text)
            reader.look()
            reader.look()
    assert ["is not heeded" in line for line in said] == [False, True, False, False]
    assert [line.rpartition(": ")[2] for line in said] == [
        "from now on reads are off, writes are on",
        "still reads are off, writes are on",
        "from now on reads are off, writes are on",
        "from now on reads are on, writes are on",
    ]


def test_a_thread_looks_by_itself_and_ends(path, monkeypatch):
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.01)
    reader = ControlFile(str(path))
    path.write_text('reads = "off"')
    deadline = time.monotonic() + 5
    while reader.access != NO_READS:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    reader.close()
    assert not reader._thread.is_alive()
