"""Reward functions that stay in the program, and that the workers of rewards call there.

The program listens on an address of this machine. A worker sends a rollout as JSON, and gets the
terms of the reward. So a function may use what cannot be sent to another process, such as a model
on a GPU or an open file.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Lock, Thread
from typing import Any

from lightrft.rewards.sandbox.results import rows_of, terms_of
from lightrft.rewards.sandbox.rollout_view import PromptView, RolloutView
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ConfigError, first_line
from lightrft.utils.memory_function import DIGITS, code_of, shown_source


class Here:
    """A reward function that runs in the process of the program, see ``here``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(*arguments, **options)

    def write(self, folder: Path) -> str:
        """Write a file by which workers call the function, and return its name for settings.

        The name of the file has a digest of the code. The values that the code uses are not
        compared.
        """
        name = getattr(self.function, "__name__", type(self.function).__name__)
        name = name if name.isidentifier() else "function"
        key = f"{name}-{hashlib.sha256(b''.join(code_of(self.function))).hexdigest()[:DIGITS]}"
        program = served()
        program.functions[key] = self.function
        parameters = [
            (one.name, int(one.kind), one.default is not inspect.Parameter.empty)
            for one in inspect.signature(self.function).parameters.values()
        ]
        given = f"__name__, {name!r}, {program.server_address[1]}, {program.token!r}, {key!r}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{key}-here.py"
        text = (
            f"# {name}, a function that runs in the program that started the run:\n#\n"
            f"{shown_source(self.function)}\n\n"
            "from lightrft.rewards.program_function import remote\n\n"
            f"{name} = remote({given}, {parameters!r})\n"
        )
        write_atomic(file, text, private=True)  # it holds the token
        return f"{file}:{name}"


def here(function: Callable[..., Any]) -> Here:
    """Keep a reward function in this process, for values that cannot be sent to another one.

    Calls come one at a time, in a thread. ``reward.timeout`` ends the wait for a call, and not the
    call itself. ``reward.memory_mb`` does not hold. The run needs this program: it cannot be
    continued from the command line.

    Example::

        lightrft.rl("recipe.yaml", rewards=[lightrft.here(score_with_my_model), "format"])

    Raises:
        ConfigError: ``function`` is no function.
    """
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"here({function!r}): give a reward function")
    return Here(function)


class ProgramServer(ThreadingTCPServer):
    """Calls functions of this program for workers that know ``token``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = secrets.token_hex(16)
        self.functions: dict[str, Callable[..., Any]] = {}
        self.lock = Lock()

    def answer(self, line: bytes) -> dict[str, object]:
        """Return the answer to one request: ``rows`` of terms, or an ``error``."""
        asked = json.loads(line)
        if not secrets.compare_digest(str(asked["token"]), self.token):
            return {"error": "the token is wrong"}
        function = self.functions[asked["key"]]
        views = [RolloutView(PromptView(**one.pop("prompt")), **one) for one in asked["rollouts"]]
        with self.lock:
            try:
                result = function(views if asked["batched"] else views[0], **asked["options"])
                if inspect.isawaitable(result):
                    result = asyncio.run(_awaited(result))
                rows = rows_of(result, len(views)) if asked["batched"] else [result]
                return {
                    "rows": [{k or "reward": v for k, v in terms_of(row).items()} for row in rows]
                }
            except Exception as error:
                return {"error": f"{type(error).__name__}: {first_line(error)}"}


class _Handler(StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, ProgramServer)
        answer = self.server.answer(self.rfile.readline())
        self.wfile.write(json.dumps(answer).encode() + b"\n")


async def _awaited(value: Any) -> Any:
    return await value


@cache
def served() -> ProgramServer:
    """Return the server of this process, which answers in a thread."""
    server = ProgramServer()
    Thread(target=server.serve_forever, name="rewards of the program", daemon=True).start()
    return server


def remote(
    module: str,
    name: str,
    port: int,
    token: str,
    key: str,
    parameters: Sequence[tuple[str, int, bool]],
) -> Callable[..., Any]:
    """Return a function that a worker calls, and that calls a function of the program.

    Args:
        module: Name of the module that defines it.
        name: Its name.
        port: Port of the program.
        token: Shows the program that the call is of its run.
        key: Key of the function in the program.
        parameters: Name and kind of each parameter, and whether it has a default.
    """
    batched = parameters[0][0] == "rollouts"

    def call(rollout: Any, **options: object) -> Any:
        rollouts = [asdict(one) for one in (rollout if batched else [rollout])]
        asked = {"token": token, "key": key, "batched": batched, "options": options}
        text = json.dumps({**asked, "rollouts": rollouts}) + "\n"
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(text.encode())
                line = connection.makefile("rb").readline()
        except ConnectionError:
            line = b""
        if not line:
            raise RuntimeError(
                f"the program of the reward {name!r} has ended; start the run from it again"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["rows"] if batched else answer["rows"][0]

    call.__module__, call.__name__, call.__qualname__ = module, name, name
    kinds = list(inspect._ParameterKind)
    call.__signature__ = inspect.Signature(  # ty: ignore[missing-attribute]
        [
            inspect.Parameter(each, kinds[kind], default=None if has else inspect.Parameter.empty)
            for each, kind, has in parameters
        ]
    )
    return call
