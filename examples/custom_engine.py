"""An engine of one's own: it runs the whole model again for each token, and keeps no cache.

    lightrft rl config.yaml engine.kind=examples/custom_engine.py:KIND

It has a copy of the policy's weights, which each update replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightrft.config.base import Settings, build
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.fingerprint import checksums
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.requests import check_requests, refuse_native_settings, response_room
from lightrft.engines.sampling import greedy, process, sample_tokens, seed_keys, uniforms
from lightrft.engines.stop_strings import StopStrings, end_ids, model_ends
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.types import Request, Rollout
from lightrft.workers.engine_kinds import EngineKind, EngineParts


class Options(Settings):
    """The settings ``engine.options`` of this engine."""

    seed: int = 0
    """Number that is added to the seed of each request."""


class PlainEngine(Engine):
    """Grows all responses by a token in turn.

    Args:
        decoder: Holds the weights.
        tokenizer: Decodes responses and finds stop strings.
        config: Settings of the engine.
    """

    def __init__(self, decoder: KVDecoder, tokenizer, config: EngineConfig) -> None:
        self.decoder, self.tokenizer, self.config = decoder, tokenizer, config
        self.options = build(Options, dict(config.options))
        self.version = 0

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """See ``Engine.generate``. What cannot be done is refused at once."""
        wanted = list(requests)
        refuse_native_settings(sampling, self.config.kind)
        check_requests(wanted, sampling, self.config)
        return self._answers(wanted, sampling, stopped)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """See ``Engine.load_weights``."""
        self.decoder.load(weights)
        self.version = version
        return checksums(self.decoder.parameters())

    def _answers(
        self, requests: Sequence[Request], sampling: SamplingConfig, stopped: Callable[[], bool]
    ) -> Iterator[Rollout]:
        stops = StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None
        model_end = model_ends(self.tokenizer, self.decoder.eos_token_ids)
        ends = set(end_ids(self.tokenizer, model_end, sampling))
        growing = [GrowingResponse.of(request, sampling, stops) for request in requests]
        while growing:
            is_stopped = stopped()
            for response in list(growing):
                if is_stopped:
                    response.reason = "abort"
                else:
                    self._append(response, ends)
                if response.reason is not None:
                    growing.remove(response)
                    yield response.rollout(self.tokenizer)

    @torch.no_grad()
    def _append(self, response: GrowingResponse, ends: set[int]) -> None:
        """Sample the next token of ``response``."""
        request, sampling, n = response.request, response.sampling, len(response.token_ids)
        ids = torch.tensor([[*request.prompt.token_ids, *response.token_ids]])
        logits = self.decoder.model(ids.to(self.decoder.device)).logits[:, -1]
        seen, banned = torch.zeros_like(logits, dtype=torch.bool), None
        seen[0, ids[0]] = True
        if n + 1 < sampling.min_new_tokens:
            banned = torch.zeros_like(seen)
            banned[0, list(ends)] = True
        if request.greedy:
            sampling = sampling.model_copy(update={"temperature": 0.0})
        row = process(logits, sampling, seen, banned)
        if sampling.temperature == 0:
            token, logprob = greedy(row)
        else:
            keys = seed_keys([request.seed + self.options.seed])
            u = torch.from_numpy(uniforms(keys, np.array([n]))).to(row.device)
            token, logprob = sample_tokens(row, u)
        response.append(int(token), float(logprob), self.version, ends)
        room = request.num_generated + response_room(request, response.sampling)
        if response.reason is None and len(response.token_ids) >= room:
            response.end("length", "the engine")


def _build(parts: EngineParts) -> Engine:
    """Build the engine of a run."""
    return PlainEngine(parts.decoder.with_own_weights(), parts.tokenizer, parts.config)


KIND = EngineKind(title="plain", build=_build)
