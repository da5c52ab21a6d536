"""The literal text of what is said when a model cannot be served."""

from __future__ import annotations

import socket

import pytest

from meshpar.cli import serve


@pytest.fixture
def refused(command):
    """Runs the verb, which must fail; returns its message."""

    def call(*words: object) -> str:
        code, _, err = command("serve", *words)
        assert code == 2
        return err

    return call


def test_an_address_in_use_is_reported_before_anything_is_read(refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = f"meshpar: nothing can listen at 127.0.0.1:{port}: Address already in use; choose another --port\n"
        assert refused("nothing", "--port", port) == message
    assert "nothing can listen at no.such.host.invalid" in refused("nothing", "--host", "no.such.host.invalid")


def test_a_size_that_is_none_and_a_folder_without_a_model_are_reported(refused, tmp_path):
    message = "meshpar: --cache 'much' is not a number of bytes; valid: 1000, 40MiB\n"
    assert refused(tmp_path, "--cache", "much") == message
    assert "is no checkpoint" in refused(tmp_path, "--port", 0)


def test_a_missing_library_is_named_with_its_extra(refused, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert refused("nothing") == "meshpar: uvicorn: not installed; pip install 'meshpar[serve]'\n"


def test_several_processes_are_refused(refused, monkeypatch):
    monkeypatch.setenv("MESHPAR_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("MESHPAR_NUM_PROCESSES", "2")
    monkeypatch.setenv("MESHPAR_PROCESS", "0")
    assert "meshpar serve runs in one process, and meshpar launch started 2" in refused("nothing")
