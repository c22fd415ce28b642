"""TCP stores that listen on the loopback interface only, for runs on one machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is a name or address of this machine that others cannot reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_store(port: int, timeout: timedelta) -> TCPStore:
    """Open a ``TCPStore`` at ``port`` of the loopback interface. Port 0 selects a free port.

    By default PyTorch listens on all interfaces.
    """
    from torch.distributed import TCPStore

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        number = listener.getsockname()[1]
        # The store takes over the descriptor, and closes it.
        return TCPStore(
            LOOPBACK,
            number,
            None,
            True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except BaseException:
        listener.close()
        raise


def keep_gloo_local() -> None:
    """Make gloo listen on the loopback interface, unless the environment names an interface."""
    names = {name for _, name in socket.if_nameindex()}
    if found := next((name for name in ("lo", "lo0") if name in names), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
