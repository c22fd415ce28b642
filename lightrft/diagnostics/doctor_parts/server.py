"""Check the server of a run for ``lightrft doctor``, as the run does at its start."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.verbs import PolicyConfig, TrainingConfig
from lightrft.diagnostics.findings import Finding
from lightrft.diagnostics.memory.sent_weights import asks_server
from lightrft.engines.base import Engine, ServerKind
from lightrft.engines.served.start_checks import open_client, served_model
from lightrft.engines.stop_strings import model_ends
from lightrft.utils.errors import RESUMES, UserError
from lightrft.utils.http_client.server_client import Unanswered
from lightrft.workers.engine_kinds import kind_of
from lightrft.workers.local import local_tokenizer

PATIENCE = 10.0
"""Seconds within which a server must tell its model."""
CHECK_PATIENCE = 60.0
"""Seconds without anything new from a server that is checked. It may have to finish requests."""


@dataclass(slots=True)
class ServerReport:
    """The result of the checks of a server.

    Attributes:
        findings: The findings. Empty for a run that asks no server.
        engine: The engine over the server. ``None`` if there is none, or if a check failed.
    """

    findings: tuple[Finding, ...] = ()
    engine: Engine | None = None

    @property
    def kind(self) -> ServerKind | None:
        """The kind of the server. ``None`` if it is unknown."""
        return None if self.engine is None else self.engine.server

    @property
    def is_paused(self) -> bool:
        """The server answers nobody until a run sends its weights."""
        return self.engine is not None and self.engine.is_paused

    def close(self) -> None:
        """Close the connections."""
        if self.engine is not None:
            self.engine.close()


def examine_server(config: TrainingConfig) -> ServerReport:
    """Check ``engine.url`` as the run does before it sends weights. The server stays as it is.

    Args:
        config: Settings of the run.
    """
    if not asks_server(config):
        return ServerReport()
    assert isinstance(config, PolicyConfig)
    connect = kind_of(config.engine).connect
    assert connect is not None  # of kinds with a server alone
    about, url = "engine.url", config.engine.url
    try:
        name = _served_name(config.engine)
        try:
            tokenizer = local_tokenizer(config.model)
        except UserError:
            # it is a finding of its own
            says = f"= {url}, serves {name}; the other checks need the tokenizer of model.path"
            return ServerReport((Finding("engine", "warn", about, says),))
        ends = model_ends(tokenizer, ())
        # all verbs that train send their weights, also for evaluations alone
        patient = _within(config.engine, CHECK_PATIENCE)
        built = connect(config.model, patient, tokenizer, ends, torch.device("cpu"), trains=True)
    except UserError as error:
        says = str(error).removesuffix(f". {RESUMES}")
        return ServerReport((Finding("engine", "bad", about, says),))
    except Unanswered as error:
        says = f"= {url!r}: {error}; start the server, or set engine.kind=native"
        return ServerReport((Finding("engine", "bad", about, says),))
    says = f"= {url}, serves {name}, and passes the checks of the start"
    return ServerReport((Finding("engine", "ok", about, says),), built)


def _served_name(engine: EngineConfig) -> str:
    """Return the name of the served model."""
    quick = _within(engine, PATIENCE)
    with closing(open_client(quick)) as client:
        return str(served_model(client, quick)["id"])


def _within(engine: EngineConfig, seconds: float) -> EngineConfig:
    return engine.model_copy(update={"deadline": min(engine.deadline, seconds)})
