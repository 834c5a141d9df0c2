"""Conversations of vLLM's multi-turn benchmark: text in, lengths and shared content out."""

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.workload import multi_turn
from kvsim.workload.load import load_trace
from kvsim.workload.stats import stats
from kvsim.workload.trace import TraceError


def messages(*texts):
    return [{"role": multi_turn.ROLES[i % 2], "content": text} for i, text in enumerate(texts)]


def conversation(name, *texts):
    return {"id": name, "messages": messages(*texts)}


def write(path, *conversations):
    path.write_text(json.dumps(conversations, ensure_ascii=False), encoding="utf-8")
    return path


def read(folder, *conversations):
    return multi_turn.read(write(folder / "c.json", *conversations))


def test_columns_of_a_small_trace(tmp_path):
    path = write(tmp_path / "c.json", conversation("a", "x" * 100, "y" * 30, "z", "w" * 9), conversation("b", "é"))
    trace = load_trace(path, use_cache=False)
    assert (trace.name, trace.format, trace.granule_len) == ("c.json", "multi-turn", 16)
    # 100 bytes, 130, 131 and 140 of the first: 25 tokens, 33, 33 and 35; "é" has 2 bytes
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([25, 1, 33], [8, 0, 2])
    assert trace.session.tolist() == [0, 1, 0], "turns are in order of their number"
    assert trace.after.tolist() == [0, 1, 0]
    assert trace.arrival_ps.tolist() == trace.delay_ps.tolist() == [0, 0, 0]
    stream = trace.segments(0, 1)[0][0]
    assert [trace.segments(i, 1) for i in (0, 2)] == [((stream, 0, 33),), ((stream, 0, 35),)]
    assert trace.segments(1, 1)[0][0] != stream
    assert stats(trace)["ideal_hit_rate"] == 33 / 59, "a conversation's next prompt holds the answer before it"


def test_conversations_share_the_text_that_they_begin_with(tmp_path):
    common = "You are a poet. " * 8 + "!"  # 129 bytes: two pieces of 64
    trace = read(tmp_path, conversation("a", common + "a" * 99, "1"), conversation("b", common + "b" * 99, "2"))
    (first, second) = (trace.segments(i, 1) for i in range(2))
    assert first[0][0] == second[0][0]
    assert second[0][2] == 32 and second[1][0] != first[0][0]


def test_an_answer_that_differs_parts_two_conversations(tmp_path):
    trace = read(tmp_path, conversation("a", "q" * 64, "1" * 64, "m"), conversation("b", "q" * 64, "2" * 64, "m"))
    first, second = ([trace.segments(i, 1) for i in range(4) if trace.session[i] == number] for number in (0, 1))
    assert [segments[0][0] for segments in first] == [segments[0][0] for segments in second]
    assert first[0] == ((first[0][0][0], 0, 32),)
    assert second[0] == (second[1][0], (second[1][1][0], 16, 32)), (
        "the answer has the name that the next prompt gives it"
    )
    assert second[1][1] == (second[1][1][0], 16, 33)


def test_answers_that_begin_with_the_same_text_are_not_shared_in_part(tmp_path):
    answers = ("a" * 640 + last for last in "12")
    trace = read(tmp_path, *(conversation(str(number), "q" * 64, a, "m") for number, a in enumerate(answers)))
    (asked, _), (answered, asked_on) = ([trace.segments(i, 1) for i in ends] for ends in ((0, 2), (1, 3)))
    assert asked == ((0, 0, 177),), "a question of 16 tokens and an answer of 160 and a bit"
    stream = answered[1][0]
    assert stream != 0
    assert answered == ((0, 0, 16), (stream, 16, 177))
    assert asked_on == ((0, 0, 16), (stream, 16, 177)), "the next question begins in the answer's last token"


texts = st.lists(st.text(max_size=200) | st.text("ab", max_size=80), min_size=1, max_size=7).filter(
    lambda found: found[0]
)


@given(st.lists(texts, min_size=1, max_size=4))
def test_prompts_follow_their_conversations(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("c")
    trace = read(folder, *(conversation(str(number), *texts) for number, texts in enumerate(found)))
    for session, texts in enumerate(found):
        turns = [i for i in range(trace.num_requests) if trace.session[i] == session]
        lengths = [-(-len("".join(texts[:end]).encode()) // 4) for end in range(1, len(texts) + 1)]
        assert trace.input_len[turns].tolist() == lengths[::2]
        assert (trace.input_len + trace.output_len)[turns].tolist() == [*lengths, lengths[-1]][1::2]
        for turn, after in pairwise(turns):
            assert trace.after[after] == turn
            prompt, longer = trace.segments(turn, 1)[:-1], trace.segments(after, 1)
            assert prompt == longer[: len(prompt)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (7, ": JSON, 7, expected a JSON object"),
        ({"id": "b"}, ": messages, missing, expected a list of objects"),
        ({**conversation("b", "x"), "extra": 1}, ": extra, 1, expected only the fields id, messages"),
        ({"messages": messages("x")}, ": id, missing, expected a text that no conversation before it has"),
        (conversation(3, "x"), ": id, 3, expected a text that"),
        (conversation("a", "x"), ": id, 'a', expected a text that no conversation before it has"),
        (conversation("b"), ": messages, [], expected at least one message"),
        ({"id": "b", "messages": "x"}, ": messages, 'x', expected a list of objects"),
        ({"id": "b", "messages": ["x"]}, ", message 0: JSON, 'x', expected a JSON object"),
        ({"id": "b", "messages": messages("x")[:1] * 2}, ", message 1: role, 'user', expected 'assistant'"),
        ({"id": "b", "messages": messages("x", "y")[1:]}, ", message 0: role, 'assistant', expected 'user'"),
        ({"id": "b", "messages": [{"role": "system", "content": "x"}]}, ", message 0: role, 'system', expected 'user'"),
        ({"id": "b", "messages": [{"content": "x"}]}, ", message 0: role, missing, expected 'user'"),
        ({"id": "b", "messages": [{"role": "user"}]}, ", message 0: content, missing, expected a text"),
        (conversation("b", "x", None), ", message 1: content, None, expected a text"),
        (conversation("b", "x", ["y"]), ", message 1: content, ['y'], expected a text"),
        (conversation("b", "", "y"), ", message 0: content, '', expected a text that is not empty"),
        (
            {"id": "b", "messages": [{**messages("x")[0], "name": 1}]},
            ", message 0: name, 1, expected only the fields role",
        ),
    ],
)
def test_a_bad_conversation_is_one_line_with_its_index(tmp_path, bad, says):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, conversation("a", "x"), bad)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'c.json'}:conversation 1{says}"), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[", "JSON, b'[', expected one list of conversations ("),
        (b"", "JSON, b'', expected one list of conversations ("),
        (b'{"messages": []}', "file, {'messages': []}, expected a list of objects"),
        (b"[]", "file, [], expected at least one conversation"),
        (b'[{"id": "\xff"}]', 'JSON, b\'[{"id": "\\xff"}]\', expected one list of conversations ('),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path, content, says):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        multi_turn.read(path)
    assert str(caught.value).startswith(f"{path}:1: {says}")


def test_the_conversation_without_its_fault_is_read(tmp_path):
    """The tables above reject faults, not the conversation they are made from."""
    path = tmp_path / "c.json.gz"
    path.write_bytes(gzip.compress(json.dumps([conversation("a", "x"), conversation("b", "x", "", "y")]).encode()))
    assert multi_turn.read(path).num_requests == 3
