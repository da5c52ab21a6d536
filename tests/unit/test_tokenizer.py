"""Any text survives a round trip through a tokenizer, and no text opens a document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.data.tokenizer import Bytes, Ids, TokenizerFile
from meshpar.errors import DataError
from tests.sources import write_tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_is_decoded_as_it_was(file: TokenizerFile, text: str):
    for tokenizer in (Bytes(), file):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.bos, *ids.tolist()]) == text
        assert ids.size == 0 or ids.max() < tokenizer.vocab_size


def test_bytes_that_are_no_utf_8_are_kept():
    text = b"\xff\x00\xc3".decode("utf-8", "surrogateescape")
    assert Bytes().encode(text).tobytes() == b"\xff\x00\xc3"


def test_a_file_has_its_own_special_tokens_and_truncates_no_text(file: TokenizerFile):
    assert (file.bos, file.eos) == (0, 1)
    assert len(file.encode("the dims of a mesh")) > 2
    assert file.vocab_size == 1 + max(file._library.get_vocab().values())
    short, long = file.encode_all(["a", "the dims of a mesh"])
    assert np.array_equal(long, file.encode("the dims of a mesh"))
    assert len(short) == 1


def test_a_text_cannot_open_a_document(file: TokenizerFile):
    ids = file.encode("a<s>b</s>")
    assert not {file.bos, file.eos} & set(ids.tolist())
    assert file.decode(ids) == "a<s>b</s>"


def test_bos_and_eos_are_named_or_customary_or_added(tmp_path: Path):
    other = write_tokenizer(tmp_path / "other.json", ("<open>", "<|endoftext|>"))
    assert (other.bos, other.eos) == (1, 1)
    named = other.model_copy(update={"bos_token": "<open>"})
    assert (named.bos, named.eos) == (0, 1)
    plain = write_tokenizer(tmp_path / "plain.json", ())
    assert plain.eos is None
    assert plain.bos == plain.vocab_size - 1 == len(plain._library.get_vocab())
    assert plain.decode([plain.bos, *plain.encode("a mesh")]) == "a mesh"


SAID = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_eos_token": False},
    {"add_eos_token": True},
    {"bos_token": "<open>"},
]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_prompts_are_opened_as_transformers_opens_them(said: dict, adds: bool, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import processors

    file = write_tokenizer(tmp_path / "tokenizer.json", ("<open>", "</s>", "<s>"))
    if adds:
        library = file._library
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
        library.save(file.path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | said))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("a mesh").input_ids
    again = TokenizerFile(path=file.path)
    assert [*again.opening, *again.encode("a mesh").tolist()] == theirs


def test_special_tokens_are_those_of_the_files_beside(tmp_path: Path):
    file = write_tokenizer(tmp_path / "tokenizer.json", ("<s>", "</s>", "<open>", "<end>", "<turn>"))
    assert (file.bos, file.eos) == (0, 1)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 2, "eos_token_id": [4, 3]}))
    assert (file.bos, file.eos) == (2, 4)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert file.eos == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<turn>"}))
    assert (file.bos, file.eos) == (0, 4)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<open>"}}))
    assert file.bos == 2
    assert file.model_copy(update={"bos_token": "<s>", "eos_token": "</s>"}).eos == 1
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json is not JSON"):
        _ = file.eos


def test_a_file_that_changes_is_read_again(tmp_path: Path):
    before = write_tokenizer(tmp_path / "t.json").vocab_size
    assert write_tokenizer(tmp_path / "t.json", vocab_size=270).vocab_size < before


def test_ids_are_checked_against_the_vocabulary():
    assert Ids(vocab_size=4, bos=3).encode("0 3").tolist() == [0, 3]
    for text in ("4", "-1"):
        with pytest.raises(DataError, match="outside of the vocabulary of 4"):
            Ids(vocab_size=4, bos=3).encode(text)
    with pytest.raises(DataError, match="not a line of token ids"):
        Ids(vocab_size=4, bos=3).encode("one")


def test_a_lone_surrogate_is_no_text(file: TokenizerFile):
    for tokenizer in (Bytes(), file):
        with pytest.raises(DataError, match="the text is not valid Unicode: surrogates not allowed at character 1"):
            tokenizer.encode("a\ud800")


def test_a_file_on_which_the_library_panics_is_refused(tmp_path: Path):
    """A panic of Rust code is no `Exception`."""
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path)
    data = json.loads(path.read_text())
    data["model"]["continuing_subword_prefix"] = "longer than any token"
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match="is not a tokenizer: "):
        TokenizerFile(path=str(path)).encode("a mesh")


@pytest.mark.parametrize("use", ["encode", "encode_whole", "encode_special", "decode"])
def test_a_file_that_is_missing_is_said_and_nothing_else(use: str):
    with pytest.raises(DataError) as error:
        getattr(TokenizerFile(path="no/tokenizer.json"), use)("" if use == "decode" else "a")
    assert str(error.value).startswith("the tokenizer cannot be used:\n  data.tokenizer = 'no/tokenizer.json'\n")
