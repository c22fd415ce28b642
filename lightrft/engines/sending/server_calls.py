"""Requests to a server that must answer them and join a collective call at the same time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from lightrft.distributed.local_store import LOOPBACK, is_loopback
from lightrft.engines.weight_transport import LOOK_SECONDS
from lightrft.utils.http_client.server_client import ServerClient

PORTS = {"http": 80, "https": 443}

Answer = Future[Mapping[str, Any]]


def ask_in_thread(client: ServerClient, path: str, body: Mapping[str, Any]) -> Answer:
    """Send a request once, in a thread. Return the future of its answer.

    Args:
        client: Sends requests to the server.
        path: Path of the endpoint.
        body: JSON object to send.
    """
    future: Answer = Future()

    def ask() -> None:
        try:
            future.set_result(client.ask("POST", path, body, once=True))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="served engine").start()
    return future


def wait_until(
    done: Callable[[], bool], look: Callable[[], object], seconds: float, url: str
) -> None:
    """Wait until ``done`` returns True.

    Args:
        done: Returns True once the server has taken part.
        look: Called meanwhile; it may raise to end the wait.
        seconds: Longest wait.
        url: Address of the server, for the message.

    Raises:
        TimeoutError: ``done`` has not returned True within ``seconds``.
    """
    until, wait = time.monotonic() + seconds, LOOK_SECONDS / 50
    while not done():
        look()
        if time.monotonic() > until:
            raise TimeoutError(f"{url} did not take part in {seconds:g} s")
        time.sleep(wait)
        wait = min(2 * wait, LOOK_SECONDS)


def address_towards(url: str) -> str:
    """Return the address of this machine in the network that leads to ``url``."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):
        return LOOPBACK
    found = socket.getaddrinfo(host, parts.port or PORTS[parts.scheme], type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # sends nothing
        probe.connect(address)
        return probe.getsockname()[0]
