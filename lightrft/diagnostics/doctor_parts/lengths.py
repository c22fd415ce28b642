"""Check for ``lightrft doctor`` that prompts and responses fit into the model and its engine."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import PolicyConfig, RLConfig
from lightrft.diagnostics.doctor_parts.engine import media_findings
from lightrft.diagnostics.findings import Finding
from lightrft.engines.base import Engine
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.models.processors import Processor
from lightrft.rollout.eval_prompts import load_eval_prompts
from lightrft.trainer.checks.context_limits import check_cache, check_context, longest
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_kinds import kinds_to_check


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
