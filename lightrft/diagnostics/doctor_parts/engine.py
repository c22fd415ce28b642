"""Examine the engine of a run for ``lightrft doctor``, without starting it.

A server is checked as the run checks it at its start. Prompts and responses must fit into the
model and its engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    PolicyConfig,
    RLConfig,
    TrainingConfig,
)
from lightrft.diagnostics.findings import Finding
from lightrft.diagnostics.memory.sent_weights import asks_server
from lightrft.engines.base import Engine, ServerKind
from lightrft.engines.served.start_checks import open_client, served_model
from lightrft.engines.stop_strings import model_ends
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.models.processors import Processor
from lightrft.rollout.evaluation import load_eval_prompts
from lightrft.trainer.checks.context_limits import check_cache, check_context, longest
from lightrft.trainer.checks.preflight import generates
from lightrft.utils.errors import RESUMES, ConfigError, UserError
from lightrft.utils.http_client.server_client import Unanswered
from lightrft.workers.engine_kinds import check_media, kind_of, kinds_to_check
from lightrft.workers.local import local_tokenizer
from lightrft.workers.local_served import check_server_media
from lightrft.workers.local_vllm import check_replica, check_shared_copy


def engine_findings(config: TrainingConfig, device: str) -> Iterator[Finding]:
    """Check the package of ``engine.kind``, and the settings that its engine cannot keep.

    Args:
        config: Settings of the run.
        device: Kind of the device of each process.
    """
    if not isinstance(config, RLConfig | DistillVerbConfig | DPOConfig) or not generates(config):
        return
    kind = kind_of(config.engine)
    if kind.copies_weights and not isinstance(config, RLConfig):
        # that of ``rl`` is checked with its other settings
        try:
            check_replica(config.engine.kind, config.strategy.tensor_parallel)
        except ConfigError as error:
            yield Finding("engine", "bad", "engine.kind", str(error))
    try:
        check_shared_copy(config.engine, config.launch.processes)
    except ConfigError as error:
        yield Finding("engine", "bad", "engine.tensor_parallel", str(error))
    for level, about, says in kind.examine(config, torch.device(device)) if kind.examine else ():
        yield Finding("engine", level, about, says)


def media_findings(
    model: ModelConfig, engine: EngineConfig, kinds: Collection[str], server: Engine | None
) -> Iterator[Finding]:
    """Check that the engine can generate for prompts with media of ``kinds``.

    Args:
        model: The model.
        engine: Settings of the engine.
        kinds: Kinds of media of the prompts.
        server: The engine over its server. ``None`` without one.
    """
    if not kinds:
        return
    try:
        check_media(model, engine, kinds)
        check_server_media(server, kinds)
    except UserError as error:
        yield Finding("engine", "bad", "engine.kind", str(error))
    else:
        says = f"= {engine.kind}, for media of kind {', '.join(sorted(kinds))}"
        yield Finding("engine", "ok", "engine.kind", says)


def eval_set_findings(
    config: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    server: Engine | None,
) -> Iterator[Finding]:
    """Check that the engine can respond to the eval set.

    Args:
        config: Settings of the run.
        tokenizer: Encodes the prompts.
        processor: Prepares media, or None for a text-only model.
        server: The engine over a server. None without one.
    """
    held = config.eval
    prompts = load_eval_prompts(held.data, tokenizer, config.run.seed, held.limit, processor)
    if not prompts:
        return
    # With ``rollout.staleness`` the policy itself responds to the eval set.
    is_ahead = isinstance(config, RLConfig) and config.rollout.staleness
    asked = None if is_ahead else server
    yield from length_findings(config, held.sampling, longest(prompts), asked, "eval.")
    kinds = kinds_to_check(config.engine, prompts)
    yield from media_findings(config.model, config.engine, kinds, server)


def length_findings(
    config: PolicyConfig,
    sampling: SamplingConfig,
    tokens: int,
    server: Engine | None,
    section: str = "",
) -> Iterator[Finding]:
    """Check lengths like ``context_limits.check_lengths``, which would end a run.

    Args:
        config: Settings of the run.
        sampling: Settings of the responses.
        tokens: Length of the longest prompt.
        server: The engine over a server. None without one.
        section: Prefix of the settings of these prompts.
    """
    settings, key, data = model_settings(config.model), f"{section}sampling", f"{section}data"
    about = f"{section}lengths"
    try:
        check_context(settings, tokens, sampling, key, data)
    except ConfigError as error:
        yield Finding("data", "bad", about, str(error))
    else:
        limit = sampling.max_new_tokens
        says = f"longest prompt {tokens}, longest response {limit} tokens"
        yield Finding("data", "ok", about, says)
    try:
        check_cache(config.engine, tokens, sampling, key, data)
    except ConfigError as error:
        says = str(error).removeprefix("engine.max_cache_tokens ")
        yield Finding("settings", "bad", "engine.max_cache_tokens", says)
    if server is not None:
        try:
            server.check_limits(tokens, sampling, key, data)
        except ConfigError as error:
            yield Finding("engine", "bad", "engine.url", str(error))


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
