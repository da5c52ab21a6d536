"""A streamed answer has whole characters, and no part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.tokenizer import Bytes, Ids, TokenizerFile
from meshpar.serve.answer import Answer

TEXTS = st.one_of(st.binary(max_size=40), st.text("né€😀 \ufffd", max_size=15).map(str.encode))


def written(data: bytes, stop=(), max_tokens=99) -> tuple[list[str], Answer]:
    answer = Answer(Bytes(), stop, max_tokens)
    pieces = []
    for token in [*data, Bytes().bos]:
        if answer.finish is None:
            pieces.append(answer.add(token))
    return pieces, answer


@given(TEXTS)
def test_the_pieces_are_the_text_of_all_tokens(data):
    pieces, answer = written(data)
    assert "".join(pieces) == answer.text == data.decode("utf-8", "replace")
    assert (answer.finish, answer.tokens) == ("end", list(data))


def test_control_decoding_each_token_alone_breaks_characters():
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


def test_text_that_may_begin_a_stop_string_is_held_back():
    pieces, answer = written(b"a\n\nb\n\n\nc", ["\n\n\n"])
    assert pieces == ["a", "", "", "\n\nb", "", "", ""]
    assert (answer.text, answer.finish) == ("a\n\nb", "stop")


def test_an_answer_that_ends_by_length_includes_the_text_held_back():
    pieces, answer = written("né€".encode(), ["€!"], max_tokens=4)
    assert (pieces[-1], answer.text, answer.finish) == ("\ufffd", "né\ufffd", "length")
    with pytest.raises(AssertionError, match="has ended"):
        answer.add(1)


def test_ids_as_text_keep_their_spaces():
    answer = Answer(Ids(vocab_size=20, bos=19), (), 9)
    assert [answer.add(token) for token in (3, 14, 1)] == ["3", " 14", " 1"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A byte-level tokenizer file with merges, some of them of parts of characters."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["né €uro €uro naïve"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return TokenizerFile(path=str(path))


@given(text=st.text("né€😀 ur", max_size=20))
def test_pieces_of_a_learned_tokenizer_are_the_text(learned, text):
    answer = Answer(learned, (), 99)
    pieces = [answer.add(token) for token in [*learned.encode(text).tolist(), learned.bos]]
    assert "".join(pieces) == answer.text == text


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer whose decoder drops the first space of a text, as those made of SentencePiece models do."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "▁the", "▁capital", "▁is", "▁paris", "▁Rome", "<s>"]
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    library.add_special_tokens(["<s>"])
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    library.save(str(path))
    return TokenizerFile(path=str(path))


def test_the_first_space_of_an_answer_is_kept(pieces):
    """The prompt and its answer together are the text of all tokens."""
    prompt = pieces.encode("the capital is").tolist()
    answer = Answer(pieces, (), 9, prompt=prompt)
    assert [answer.add(4), answer.add(1), answer.add(5), answer.add(pieces.bos)] == [" paris", " the", " Rome", ""]
    assert "the capital is" + answer.text == pieces.decode([*prompt, 4, 1, 5])
    alone = Answer(pieces, (), 9)
    assert [alone.add(4), alone.add(1)] == ["paris", " the"]


@given(text=st.text("né€😀 ur", max_size=20), cut=st.integers(0, 20))
def test_a_prompt_and_its_answer_are_the_text_of_all_tokens(learned, text, cut):
    ids = learned.encode(text).tolist()
    prompt, rest = ids[:cut], ids[cut:]
    answer = Answer(learned, (), 99, prompt=prompt)
    for token in [*rest, learned.bos]:
        answer.add(token)
    if not learned.decode(prompt).endswith("\ufffd"):  # a prompt of ids may end within a character
        assert learned.decode(prompt) + answer.text == text
    else:
        assert answer.text == learned.decode(rest)


def test_an_answer_ends_at_each_of_its_end_ids_and_no_other():
    for ends in ((3,), (3, 5), ()):
        answer = Answer(Ids(vocab_size=20, bos=7), (), 4, ends)
        for token in (1, 7, 5, 3):
            if not answer.finish:
                answer.add(token)
        assert (answer.tokens, answer.finish) == {
            (3,): ([1, 7, 5], "end"), (3, 5): ([1, 7], "end"), (): ([1, 7, 5, 3], "length")
        }[ends]  # fmt: skip
