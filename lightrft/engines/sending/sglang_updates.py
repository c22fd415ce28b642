"""Open and close the weight updates of an SGLang server, and compare what it holds."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

import torch

from lightrft.engines.fused_layers import FUSED
from lightrft.utils.errors import ModelError
from lightrft.utils.http_client.server_client import ServerClient, Unanswered

log = logging.getLogger(__name__)

DTYPES = {"half": "float16", "float": "float32"}
"""Names of dtypes that SGLang has besides those of torch."""
PATH = "/weights_checker"
Sums = tuple[Mapping[str, str], ...]
"""Checksums by name, of each process."""


class UpdateSession:
    """A session of weight updates. Older versions of SGLang have none.

    Args:
        client: Sends requests to the server.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def open(self) -> None:
        """Open a session. One that an update left open, since it broke off, is closed first.

        Raises ``Unanswered`` if the server refuses it.
        """
        try:
            self._ask("begin")
        except Unanswered as error:
            if not error.refused:
                raise
            self._ask("end")
            self._ask("begin")

    def close(self) -> None:
        """Close the session: the server finishes what it does once for all tensors of an update.

        Raises ``Unanswered`` if it fails.
        """
        self._ask("end")

    def _ask(self, step: str) -> None:
        try:
            self._client.ask("POST", f"/{step}_weight_update", {}, once=True)
        except Unanswered as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise


class HeldChecksums:
    """Compares the checksums of a server before and after an update.

    They are of SGLang's own layouts, so they are compared with one another. A tensor that was sent
    with other values must have another checksum in some process.

    Args:
        client: Sends requests to the server.
        where: The server, for messages.
        server: What the server says about itself.
    """

    def __init__(self, client: ServerClient, where: str, server: Mapping[str, Any]) -> None:
        self._client, self._where = client, where
        self._before: Sums = ()
        # In an unknown or coarser type, weights may stay as they are though the trainer's change.
        self._is_able = not server.get("quantization") and server_dtype(server) is not None

    def note(self) -> None:
        """Take the checksums of an update whose tensors may equal those that were there."""
        self._before = self._asked()

    def check(self, changed: Collection[str]) -> None:
        """Raise ``ModelError`` if the server holds one of the ``changed`` matrices as before."""
        before, after = self._before, self._asked()
        self._before = after
        if len(before) != len(after):
            return
        lost = [name for name in changed if _is_same(_held_name(name), before, after)]
        if lost:
            raise ModelError(
                f"{self._where} holds {len(lost)} of {len(changed)} changed tensors as before the "
                f"update, e.g. {lost[0]}. Cause: a lost update"
            )

    def _asked(self) -> Sums:
        """Return the checksums of the server, or nothing if it has none."""
        if not self._is_able:
            return ()
        try:
            answer = self._client.ask("POST", PATH, {"action": "checksum"})
            return tuple(dict(rank["checksums"]) for rank in answer["ranks"])
        except Unanswered as error:
            if not error.refused:
                raise
            problem: object = error
        except (KeyError, TypeError, ValueError) as error:
            problem = f"its answer has no {error}"
        self._is_able = False
        log.warning(
            "%s does not show checksums of its weights (%s): only the log-probs of a batch show "
            "that an update arrived, and in bfloat16 they show no small one",
            self._where,
            problem,
        )
        return ()


def server_dtype(server: Mapping[str, Any]) -> torch.dtype | None:
    """Return the type of the server's matrices, or ``None`` if it does not say.

    Args:
        server: What the server says about itself.
    """
    name = str(server.get("dtype"))
    dtype = getattr(torch, DTYPES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _held_name(name: str) -> str:
    """Return SGLang's name of the parameter that holds the tensor ``name``."""
    for fused, parts in FUSED.items():
        for part in parts:
            name = name.replace(f".{part}.", f".{fused}.")
    return name


def _is_same(name: str, before: Sums, after: Sums) -> bool:
    """Return True if ``name`` is known and has one checksum before and after in every process."""
    known = [(old[name], new.get(name)) for old, new in zip(before, after) if name in old]
    return bool(known) and all(old == new for old, new in known)
