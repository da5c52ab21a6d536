"""An answer as it comes: whole characters, and nothing of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.serve.answer import Answer
from meshpar.train.data.tokenizer import Bytes, Ids

TEXTS = st.one_of(st.binary(max_size=40), st.text("né€😀 \ufffd", max_size=15).map(str.encode))


def written(data: bytes, stop=(), max_tokens=99) -> tuple[list[str], Answer]:
    answer, pieces = Answer(Bytes(), stop, max_tokens), []
    for token in [*data, Bytes.bos]:
        if answer.finish is None:
            pieces.append(answer.add(token))
    return pieces, answer


@given(TEXTS)
def test_the_pieces_are_the_text_of_all_tokens(data):
    pieces, answer = written(data)
    assert "".join(pieces) == answer.text == data.decode("utf-8", "replace")
    assert (answer.finish, answer.tokens) == ("end", list(data))


def test_decoding_each_token_alone_would_not_do():
    assert "".join(Bytes().decode([token]) for token in "€".encode()) != "€"


@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
def test_an_answer_ends_before_the_first_stop_string_that_is_complete(text, stop):
    pieces, answer = written(text.encode(), stop)
    ends = [end for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    first = text[: min(ends)] if ends else text
    begins = [first.find(s) for s in stop if s in first]
    want = first[: min(begins)] if begins else first
    assert "".join(pieces) == answer.text == want
    assert answer.finish == ("stop" if ends else "end")


def test_what_might_become_a_stop_string_waits():
    pieces, answer = written(b"a\n\nb\n\n\nc", ["\n\n\n"])
    assert pieces == ["a", "", "", "\n\nb", "", "", ""]
    assert (answer.text, answer.finish) == ("a\n\nb", "stop")


def test_the_length_ends_an_answer_and_shows_what_was_held():
    pieces, answer = written("né€".encode(), ["€!"], max_tokens=4)
    assert (pieces[-1], answer.text, answer.finish) == ("\ufffd", "né\ufffd", "length")
    with pytest.raises(AssertionError, match="has ended"):
        answer.add(1)


def test_ids_as_text_keep_their_spaces():
    answer = Answer(Ids(vocab_size=20, bos=19), (), 9)
    assert [answer.add(token) for token in (3, 14, 1)] == ["3", " 14", " 1"]
