"""Push the model of a run to the Hugging Face Hub, during the run and at its end."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config.run import HubConfig
from lightrft.distributed.process_group import run_on_all_ranks
from lightrft.observability.metrics import Metrics, Sum
from lightrft.trainer.model_card import Hub, message_of, model_card
from lightrft.utils.errors import ConfigError

if TYPE_CHECKING:
    from lightrft.observability.trackers import Summary
    from lightrft.trainer.run_session import RunSession

log = logging.getLogger(__name__)

FOLDER = "hub"
"""Folder in the run folder of a model that is being pushed."""


def reached(settings: HubConfig) -> Hub | None:
    """Return the repository that ``settings`` name, or None if they name none.

    Raises ``ConfigError`` if the hub refuses the repository, or cannot be reached.
    """
    if not settings.repo:
        return None
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would break the line of the run
    asked = f"hub.repo = {settings.repo!r}"
    return Hub(settings.repo, private=settings.private, asked=asked)


class HubPushes:
    """Pushes the models of a run. A thread uploads them, one after the other.

    Only rank 0 calls the hub. An upload that fails is reported and counted, and the run continues.

    Args:
        settings: The repository, and when to push.
        session: The run.

    Raises:
        ConfigError: The hub refuses the repository, or cannot be reached.
    """

    def __init__(self, settings: HubConfig, session: RunSession) -> None:
        self.settings = settings
        self._session = session
        self._thread = ThreadPoolExecutor(1, "hub")
        self._pending: Future[None] | None = None
        self._hub: Hub | None = None

        def reach() -> None:
            if session.ranks.rank == 0:
                self._hub = reached(settings)

        run_on_all_ranks(session.ranks, reach)

    def push_if_due(self, step: int, write: Callable[[Path], None]) -> Metrics:
        """Push the model of ``step`` if ``hub.push_every`` says so. Return the failed uploads.

        Args:
            step: The step. The upload runs while the next ones are taken.
            write: Writes the model as a folder. All ranks call it.
        """
        every = self.settings.push_every
        if not every or step % every:
            return Metrics()
        failed = self._wait()
        folder = self._session.path / FOLDER
        write(folder)
        if self._hub is not None:
            known: Summary = {"verb": self._session.verb, "steps": step}
            known["seconds"] = self._session.seconds
            known["environment"] = self._session.environment
            known["changed"] = self._session.folder.changed
            self._submit(self._hub, folder, known)
        return Metrics({"hub/failed": Sum(failed)})

    def push_last(self, summary: Summary) -> Summary:
        """Push ``model/`` of a finished run on rank 0, and return fields of the summary."""
        if self._hub is None:
            return {}
        self._wait()
        self._submit(self._hub, self._session.path / "model", summary)
        return {"hub_failed": 1} if self._wait() else {"hub": self._hub.address}

    def close(self) -> None:
        """Wait for the upload, and remove its folder."""
        self._wait()
        self._thread.shutdown()
        if self._hub is not None:
            shutil.rmtree(self._session.path / FOLDER, ignore_errors=True)

    def _submit(self, hub: Hub, folder: Path, summary: Summary) -> None:
        card = model_card(self._session.path, folder, summary)
        self._pending = self._thread.submit(hub.push, folder, card, message_of(summary))

    def _wait(self) -> int:
        """Wait for the upload, and return the number of failed ones."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except ConfigError as error:
            log.warning(
                "a model was not pushed: %s. The run continues; lightrft.Run(%r).push_to_hub(%r) "
                "pushes the model of a finished run",
                error,
                str(self._session.path),
                self.settings.repo,
            )
            return 1
        return 0
