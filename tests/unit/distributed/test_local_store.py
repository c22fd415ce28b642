"""A run on one machine listens on the loopback interface alone."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from lightrft.distributed import process_group
from lightrft.distributed.local_store import is_loopback, loopback_store
from lightrft.distributed.torchrun import OneMachine
from lightrft.engines.weight_transport import ProcessGroupBroadcast, open_meeting
from tests import warm

PATIENCE = timedelta(seconds=300)


def listening() -> set[tuple[str, int]]:
    """Addresses and ports that this process listens on."""
    return {
        tuple(c.laddr)
        for c in psutil.Process().net_connections(kind="tcp")
        if c.status == psutil.CONN_LISTEN
    }


def test_a_store_listens_on_loopback_and_is_reached_there() -> None:
    before = listening()
    store = loopback_store(0, PATIENCE)
    assert listening() - before == {("127.0.0.1", store.port)}
    client = TCPStore("127.0.0.1", store.port, None, False, PATIENCE)
    client.set("a", "b")
    assert store.get("a") == b"b"


def test_the_launchers_own_store_listens_on_loopback() -> None:
    before = listening()
    info = OneMachine("run").next_rendezvous()
    new = listening() - before
    assert {address for address, _ in new} == {"127.0.0.1"}
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) in new


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node-3", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_the_first_rank_opens_its_store_on_loopback_and_gloo_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = loopback_store(0, PATIENCE)
    port = free.port
    del free
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = listening()
    store, rank, size = process_group._store_at("127.0.0.1", str(port), PATIENCE)
    assert (rank, size) == (0, 2) and store.port == port
    assert listening() - before <= {("127.0.0.1", port)} and os.environ["GLOO_SOCKET_IFNAME"] in (
        "lo",
        "lo0",
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_weights_for_workers_of_this_machine_are_sent_over_loopback() -> None:
    before = listening()

    class Stop(Exception):
        """Ends the broadcast before it waits for workers."""

    class Absent:
        def call(self, *args: Any) -> Any:
            assert {address for address, _ in listening() - before} == {"127.0.0.1"}
            raise Stop

    place = open_meeting("127.0.0.1", senders=1, receivers=1, seconds=300.0)
    with pytest.raises(Stop):
        ProcessGroupBroadcast([Absent()], 1024, torch.device("cpu"), 300.0, place)  # type: ignore[list-item]


PROGRAM = """
import psutil
from lightrft.distributed.process_group import init_process_group

with init_process_group(10.0) as all_ranks:
    all_ranks.duplicate().gather(all_ranks.rank)
    here = psutil.Process()
    found = {c.laddr.ip for p in (here, here.parent()) for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert found == {"127.0.0.1"}, found
"""


@pytest.mark.slow
def test_ranks_that_a_launcher_starts_here_and_the_launcher_listen_on_loopback_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = str(tmp_path / "program.py")
    launch = (
        "from lightrft.distributed.torchrun import run_processes; raise "
        f"SystemExit(run_processes('x', [{program!r}], 2, 2.0))"
    )
    done = warm.run(["-c", launch], env=os.environ, seats=2)
    assert done.returncode == 0, done.stderr[-2000:]
