"""``python warm_client.py SOCKET words...``: have the server of ``tests/warm.py`` at ``SOCKET`` run ``python words...``.

The program gets the environment, the folder and the streams of this process, which ends when and as the program does. A signal to
this process does not reach the program.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> None:
    ours, theirs = socket.socketpair()
    request = {
        "words": sys.argv[2:],
        "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109  (pathlib would double the time that this takes)
        "seats": 0,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, theirs.fileno()])
    theirs.close()
    for _ in ("pid", "status"):
        said = ours.recv(64)
        if not said:
            sys.exit(f"the server at {sys.argv[1]} ended while {request['words']} ran")
    status = int(said)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
