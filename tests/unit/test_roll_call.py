"""Processes wait for each other, and those that do not come are named to all others."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from meshpar.errors import MeshError
from meshpar.launch.workers import free_port
from meshpar.mesh import join, roll_call


@pytest.fixture
def address() -> str:
    return f"{join.LOOPBACK}:{free_port()}"


def outcomes(*calls: partial[None]) -> list[str]:
    """The error of each call, made at the same time; empty where it returned."""

    def outcome(call: partial[None]) -> str:
        try:
            call()
        except MeshError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def test_all_go_on_once_all_are_there_and_the_port_is_free_again(address):
    others = [partial(roll_call.answer, address, index, 20) for index in (1, 2)]
    assert outcomes(*others, partial(roll_call.listen, address, 3, 20)) == ["", "", ""]
    roll_call.check_free(address)


def test_those_that_do_not_come_are_named_to_all_others(address):
    first = partial(roll_call.listen, address, 4, 1)
    told = outcomes(first, partial(roll_call.answer, address, 2, 20))
    assert told == [f"process 1, 3 of 4 did not reach {address} within 1 s"] * 2


def test_a_first_process_that_does_not_come_is_named(address):
    told = outcomes(partial(roll_call.answer, address, 1, 0.5))
    assert told == [f"process 0 did not reach {address} within 0 s: Connection refused"]


def test_somebody_else_who_connects_does_not_count(address):
    def stranger() -> None:
        host, port = address.split(":")
        while True:
            try:
                with socket.create_connection((host, int(port))) as connection:
                    return connection.sendall(b"GET / HTTP/1.1\n")
            except ConnectionRefusedError:
                continue

    calls = [partial(roll_call.listen, address, 2, 20), partial(stranger), partial(roll_call.answer, address, 1, 20)]
    assert outcomes(*calls) == ["", "", ""]


@pytest.mark.parametrize(
    ("nodes", "num_nodes", "expected"),
    [
        ("n1", "1", "127.0.0.1:65528"),
        ("n[007-009,12],m1", "5", "n007:65528"),
        ("gpu[1,3]-ib,gpu7", "3", "gpu1-ib:65528"),
        ("b,c", "2", "b:65528"),
    ],
)
def test_under_slurm_the_first_process_listens_on_the_first_host(monkeypatch, nodes, num_nodes, expected):
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_JOB_ID": "4103", "SLURM_STEP_NUM_NODES": num_nodes}
    for name, value in (step | {join.NODES: nodes}).items():
        monkeypatch.setenv(name, value)
    assert join.place() == join.Place("Slurm", 8, 3, expected)


@pytest.mark.parametrize(
    ("resolved", "expected"), [("10.0.0.7", "10.0.0.7:7"), ("127.0.1.1", "0.0.0.0:7"), (None, "0.0.0.0:7")]
)
def test_under_slurm_the_first_process_listens_at_its_own_address_where_it_is_known(monkeypatch, resolved, expected):
    def resolve(host: str) -> str:
        if resolved is None:
            raise socket.gaierror(-2, "Name or service not known")
        return resolved

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert join._listens_at(join.Place("Slurm", 2, 0, "n1:7")) == expected
