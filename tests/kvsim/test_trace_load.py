"""Which format a path is in, and the cache of parsed traces, which may never change a result."""

import gzip
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvcore.errors import InvalidArgument
from kvsim.workload import cache, load
from kvsim.workload.load import load_trace, sniff
from kvsim.workload.trace import COLUMN_NAMES, TraceError

ROW = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
SESSION = {
    "id": "s",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [{"t": 0.0, "type": "n", "in": 70, "out": 1, "hash_ids": [1]}],
}
BAILIAN = {**ROW, "chat_id": 0, "parent_chat_id": -1, "type": "text", "turn": 1}
ALL = ", ".join(load.FORMATS)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "kvtwin"


@pytest.fixture
def mooncake_file(tmp_path):
    path = tmp_path / "rows.anything"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "hash_ids": [1, 3]}) + "\n")
    return path


@pytest.fixture
def session_folder(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "b.json").write_text(json.dumps(SESSION, indent=1))
    (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(SESSION).encode()))
    (folder / "README.md").write_text("not a session")
    return folder


def same(left, right):
    return (left.name, left.format, left.granule_len) == (right.name, right.format, right.granule_len) and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in COLUMN_NAMES
    )


def test_the_format_is_told_by_content(mooncake_file, session_folder):
    assert sniff(mooncake_file) == "mooncake"
    assert [sniff(path) for path in (session_folder, session_folder / "b.json", session_folder / "a.json.gz")] == [
        "claude-code"
    ] * 3
    assert load_trace(mooncake_file).format == "mooncake"
    assert load_trace(str(session_folder)).num_sessions == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON fields"),
        ("hello", "no JSON fields"),
        ('{"prompt": "x", "n": 3}', "fields n, prompt"),
        ("when,how long\r\n1,2\r\n", "fields how long, when"),
        ("TIMESTAMP,Request tokens\n", "fields Request tokens, TIMESTAMP"),
        ("a\rb,\0\n", "fields \0, a\rb"),
        (json.dumps({**BAILIAN, "block_size": 16}), "fields block_size, chat_id, hash_ids, input_length"),
        (json.dumps(ROW) + json.dumps(SESSION), "fields block_size, hash_id_scope, hash_ids, id"),
    ],
)
def test_an_unknown_format_is_an_error_that_lists_the_formats(tmp_path, text, says):
    path = tmp_path / "what"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value) == f"{path}:1: format, {says}, expected one of {ALL}"


def test_names_count_wherever_the_first_row_has_them(tmp_path):
    path = tmp_path / "sorted"
    row = {"hash_ids": [2**64 - 1 - i for i in range(2000)], "input_length": 512 * 2000}
    path.write_text(json.dumps({**row, "output_length": 1, "timestamp": 0}) + "\n")
    assert sniff(path) == "mooncake"


def piped(path, content):
    """The path of a named pipe that somebody writes the content into, once, a few bytes first."""
    os.mkfifo(path)

    def write():
        with path.open("wb", buffering=0) as stream:
            for start, end in ((0, 5), (5, len(content))):
                stream.write(content[start:end])

    threading.Thread(target=write, daemon=True).start()
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_once_and_whole(mooncake_file, session_folder, tmp_path, cache_folder, pack):
    rows = mooncake_file.read_bytes() * 1000  # more than a reader's buffer
    trace = load_trace(piped(tmp_path / "rows", pack(rows)), "mooncake")
    assert trace.num_requests == 2000
    session = json.dumps(SESSION).encode()
    assert load_trace(piped(tmp_path / "session", pack(session)), "claude-code").num_requests == 1
    assert not cache_folder.exists(), "another time, other rows come out of it"


def test_a_pipe_does_not_tell_its_format(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=f":1: format, not given, expected one of {ALL}: a pipe is"):
        load_trace(tmp_path / "pipe")


def test_a_bad_first_row_is_told_by_its_reader(tmp_path):
    path = tmp_path / "t"
    path.write_text('{"timestamp": 0, "input_length": 600}')
    with pytest.raises(TraceError, match="t:1: output_length, missing, expected an integer"):
        load_trace(path)


def test_a_given_format_is_taken_at_its_word(mooncake_file):
    with pytest.raises(TraceError, match=":1: JSON, b'"):
        load_trace(mooncake_file, "claude-code")
    with pytest.raises(
        InvalidArgument, match="format = 'csv': expected mooncake or claude-code or decision-log or azure or"
    ):
        load_trace(mooncake_file, "csv")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("fmt", [None, "mooncake", "claude-code"])
def test_a_missing_path_is_one_line(tmp_path, fmt, use_cache):
    with pytest.raises(TraceError) as caught:
        load_trace(tmp_path / "none", fmt, use_cache=use_cache)
    assert str(caught.value).startswith(f"{tmp_path / 'none'}")
    assert "No such file or directory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_no_folder_takes_is_one_line(tmp_path):
    with pytest.raises(TraceError, match=":1: file, File name too long, expected a file that can be read"):
        load_trace(tmp_path / ("x" * 300))


@pytest.mark.parametrize("operation", ["iterdir", "stat"])
def test_a_folder_that_may_not_be_read_is_one_line(session_folder, monkeypatch, operation):
    real = getattr(Path, operation)

    def denied(path, *args, **options):
        if path.name == "a.json.gz" or operation == "iterdir":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(Path, operation, denied)
    with pytest.raises(TraceError, match="sessions:1: file, Permission denied, expected a file that can be read"):
        load_trace(session_folder)


def forbidden(_path):
    raise AssertionError("parsed again")


@pytest.fixture
def no_parsing(monkeypatch):
    """After `no_parsing()`, a trace that is not cached cannot be had."""

    def forbid():
        for name, known in load.FORMATS.items():
            monkeypatch.setitem(load.FORMATS, name, load.Format(forbidden, known.version, known.fields))

    return forbid


def test_a_trace_is_parsed_once(mooncake_file, session_folder, no_parsing):
    first = [load_trace(path) for path in (mooncake_file, session_folder)]
    no_parsing()
    second = [load_trace(path) for path in (mooncake_file, session_folder)]
    assert all(same(left, right) for left, right in zip(first, second, strict=True))
    assert first[0].segments(1, 16) == second[0].segments(1, 16)
    with pytest.raises(AssertionError, match="parsed again"):
        load_trace(mooncake_file, use_cache=False)


def test_no_cache_means_none_is_written(mooncake_file, cache_folder):
    load_trace(mooncake_file, use_cache=False)
    assert not cache_folder.exists()


def test_a_changed_source_is_parsed_again(mooncake_file, session_folder, cache_folder):
    load_trace(mooncake_file)
    load_trace(session_folder)
    before = mooncake_file.stat()
    mooncake_file.write_text(mooncake_file.read_text().replace("600", "601"))
    os.utime(mooncake_file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert mooncake_file.stat().st_size == before.st_size
    assert load_trace(mooncake_file).input_len.tolist() == [601, 601]
    (session_folder / "c.json").write_text(json.dumps(SESSION))
    assert load_trace(session_folder).num_sessions == 3
    assert len(list(cache_folder.iterdir())) == 2, "the new entry takes the place of the stale one"


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n", "azure"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "burstgpt"),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
            "burstgpt",
        ),
        (json.dumps(BAILIAN), "bailian"),
        (json.dumps({"block_size": 16, "hash_ids": [1], "input_length": 3}), "kvcache-ai"),
        (json.dumps({**ROW, "block_size": 512}), "kvcache-ai"),
        (json.dumps({**ROW, "block_tokens": [512, 88]}), "kvcache-ai"),
        (json.dumps([{"id": "a", "messages": [{"role": "user", "content": json.dumps(ROW)}]}]), "multi-turn"),
        (json.dumps(ROW), "mooncake"),
        (json.dumps(SESSION), "claude-code"),
        ('{"kvtwin_record": 1, "granule_len": 16}', "decision-log"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_format_is_told_by_its_names(tmp_path, text, fmt, pack):
    path = tmp_path / "rows"
    path.write_bytes(pack(text.encode()))
    assert sniff(path) == fmt


def test_another_time_unit_is_parsed_again(mooncake_file):
    mooncake_file.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "timestamp": 2}) + "\n")
    for unit, last_ps in (
        (None, 2 * 10**9),
        ("us", 2 * 10**6),
        ("s", 2 * 10**12),
        ("ms", 2 * 10**9),
        ("ms", 2 * 10**9),
    ):
        assert load_trace(mooncake_file, time_unit=unit).arrival_ps.tolist() == [0, last_ps]
        assert load_trace(mooncake_file, time_unit=unit, use_cache=False).arrival_ps.tolist() == [0, last_ps]
    assert load_trace(piped(mooncake_file.with_name("p"), mooncake_file.read_bytes()), "mooncake", time_unit="s").name


def test_a_unit_of_sessions_is_of_their_times(session_folder):
    late = {**SESSION, "requests": [SESSION["requests"][0], {**SESSION["requests"][0], "t": 8.5, "think_time": 3}]}
    (session_folder / "b.json").write_text(json.dumps(late))
    for unit, unit_ps in (("s", 10**12), ("ms", 10**9)):
        assert load_trace(session_folder, time_unit=unit).arrival_ps[-1] == 8.5 * unit_ps


@pytest.mark.parametrize(
    ("fmt", "unit", "says"),
    [
        ("mooncake", "h", "time_unit = 'h': expected s or ms or us"),
        ("azure", "s", "time_unit = 's': expected none for azure, whose times are no numbers of an open unit"),
        ("decision-log", "ms", "time_unit = 'ms': expected none for decision-log"),
        ("multi-turn", "us", "time_unit = 'us': expected none for multi-turn"),
    ],
)
def test_a_unit_that_does_not_fit_is_a_mistake(mooncake_file, fmt, unit, says):
    with pytest.raises(InvalidArgument, match=says):
        load_trace(mooncake_file, fmt, time_unit=unit)


def test_an_older_file_of_the_same_size_in_its_place_is_parsed_again(mooncake_file):
    load_trace(mooncake_file)
    before = mooncake_file.stat()
    other = mooncake_file.with_name("other")
    other.write_text(mooncake_file.read_text().replace("600", "601"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(mooncake_file)
    assert mooncake_file.stat().st_mtime_ns == before.st_mtime_ns
    assert load_trace(mooncake_file).input_len.tolist() == [601, 601]


def test_another_reader_version_or_format_is_parsed_again(mooncake_file, monkeypatch):
    load_trace(mooncake_file)
    known = load.FORMATS["mooncake"]
    monkeypatch.setitem(load.FORMATS, "mooncake", load.Format(forbidden, known.version + 1, known.fields))
    with pytest.raises(AssertionError, match="parsed again"):
        load_trace(mooncake_file)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "folder"])
def test_a_damaged_entry_is_as_good_as_none(mooncake_file, cache_folder, damage):
    first = load_trace(mooncake_file)
    (entry,) = cache_folder.iterdir()
    content = entry.read_bytes()
    at = content.index(first.input_len.tobytes())
    entry.unlink()
    if damage == "folder":
        entry.mkdir()
    else:
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        entry.write_bytes({"empty": b"", "cut": content[: at + 8], "flipped": flipped, "text": b"hello"}[damage])
    assert same(load_trace(mooncake_file), first)


def test_an_entry_that_lacks_a_column_or_breaks_a_rule_is_as_good_as_none(mooncake_file, cache_folder):
    first = load_trace(mooncake_file)
    (entry,) = cache_folder.iterdir()
    stored = dict(np.load(entry))
    for broken in (
        {name: value for name, value in stored.items() if name != "after"},
        {**stored, "after": stored["after"] + 1},
        {**stored, "segment_end": stored["segment_end"].astype(np.float64)},
    ):
        np.savez(entry, **broken)
        assert same(load_trace(mooncake_file), first)
    good = cache.load(mooncake_file, str(stored["fingerprint"]))
    assert good is not None, "the last load put a sound entry back"


def test_a_folder_that_cannot_be_written_is_no_error(mooncake_file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert same(load_trace(mooncake_file), load_trace(mooncake_file, use_cache=False))


@pytest.mark.parametrize("configured", ["", "cache", "~/cache"])
def test_the_folder_is_absolute_or_the_default(mooncake_file, tmp_path, monkeypatch, configured):
    monkeypatch.setenv("XDG_CACHE_HOME", configured)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    load_trace(mooncake_file)
    assert len(list((tmp_path / "home" / ".cache" / "kvtwin").iterdir())) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"home", mooncake_file.name}


def test_an_interrupted_write_leaves_nothing(mooncake_file, cache_folder, monkeypatch):
    def full(*_args, **_arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    load_trace(mooncake_file)
    assert list(cache_folder.iterdir()) == []
