"""Build the engine of a run that asks a server, which may be one that the run starts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import ProcessGroup, run_on_all_ranks
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.decoder_protocol import DecoderProtocol
from lightrft.engines.http import HTTPEngine, TextAlone
from lightrft.engines.served.served_engine import ServedEngine
from lightrft.engines.served.sglang_options import (
    command_of,
    installed_version,
    missing_package,
    server_options,
    version_warning,
)
from lightrft.engines.served.start_checks import open_client
from lightrft.engines.served.vllm_media import ServedMedia
from lightrft.engines.served.vllm_server import VLLMServerEngine
from lightrft.engines.sglang import SGLangEngine
from lightrft.engines.stop_strings import model_ends
from lightrft.engines.text_endpoint import TextEndpoint
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.families import context_length, family_of
from lightrft.models.loading.adapter_base import has_adapters
from lightrft.models.loading.adapter_folder import lora_of
from lightrft.models.loading.from_pretrained import base_and_lora, model_settings, where_of
from lightrft.models.loading.meta_device import dtype_of
from lightrft.models.multimodal.merge_inputs import media_token_ids
from lightrft.roles import TrainableModel, engine_weights
from lightrft.rollout.logprob_check import refuse_weights, unequal_weight
from lightrft.strategy.base import Strategy
from lightrft.types import Request, Rollout
from lightrft.utils.errors import ConfigError, UserError
from lightrft.utils.module_tensors import factor_of
from lightrft.workers.local_vllm import (
    Said,
    SampledConfig,
    check_replica,
    media_kinds,
    refuse_merging,
)
from lightrft.workers.scoring.reward_wire import weights_digest, weights_layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

WAY_OUT = (
    "serve the model of model.path, or set engine.check_logprobs=false to evaluate what is served"
)


class Connect(Protocol):
    """Connects to the server of ``engine``, or starts it, with all checks of the start of a run.

    Nothing changes a server that runs: no weights are sent, and it joins no process group.

    Args:
        model: The model.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        ends: Token ids that end a response.
        device: Device of a server that the run starts.
        trains: The weights will change.
        media: Kinds of media of the prompts.

    Raises:
        ConfigError: See ``local_served``.
        ResourceError: The server does not answer.
    """

    def __call__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        device: torch.device,
        *,
        trains: bool,
        media: Collection[str] = (),
    ) -> Engine: ...


def local_served(
    connect: Connect,
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    decoder: DecoderProtocol,
    ranks: ProcessGroup,
    device: torch.device,
    tensor_parallel_size: int = 1,
    *,
    trains: bool,
    media: Collection[str] = (),
) -> Engine:
    """Connect to the server of ``engine``, or start one.

    It is sent the policy's weights if they will change, or if the run starts it. With several
    ranks, rank 0 asks a server for all of them, and each rank starts one of its own. Every rank
    must call it.

    Args:
        connect: Connects to the server.
        model: The model.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        decoder: Holds the weights of the policy.
        ranks: All ranks of the run.
        device: Device of a server that the run starts.
        tensor_parallel_size: The setting ``strategy.tensor_parallel``.
        trains: The weights will change.
        media: Kinds of media of the prompts.

    Raises:
        ConfigError: The server has another model or tokenizer, or cannot follow this policy, or
            cannot generate for such media.
        ModelError: The server has other weights than the policy after they were sent.
        ResourceError: The server does not answer, or cannot start.
    """
    own = engine.starts_server
    if own:
        check_replica(engine.kind, tensor_parallel_size)

    def make() -> Engine | None:
        if ranks.rank and not own:
            return None
        ends = model_ends(tokenizer, decoder.eos_token_ids)
        built = connect(model, engine, tokenizer, ends, device, trains=trains, media=media)
        # shards are sent later
        if ranks.size == 1 and (trains or own):
            _send_first(built, decoder)
        return built

    if ranks.size == 1:
        built = make()
        assert built is not None
        return built
    made: list[Engine | None] = []
    # every rank raises what another one finds
    try:
        run_on_all_ranks(ranks, lambda: made.append(make()))
    except BaseException:
        for one in made:
            if one is not None:
                one.close()
        raise
    [built] = made
    if not own:
        return RankZeroEngine(built, ranks)
    assert built is not None
    return built


def async_served(
    connect: Connect,
    config: RLConfig,
    policy: TrainableModel[Actor],
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
) -> Engine:
    """Build an engine that generates during training, and gets the trained weights alone.

    With several ranks, all weights are gathered and sent once, and rank 0 keeps a copy of the
    frozen ones that adapters are added to. Every rank must call it.

    Args:
        connect: Connects to the server.
        config: Settings of the run.
        policy: The policy.
        tokenizer: Tokenizer of the model.
        strategy: Strategy of the policy.

    Raises:
        ConfigError: See ``local_served``.
        ModelError: The server did not take the weights.
    """
    model, ranks = policy.model.model, strategy.ranks
    if config.engine.starts_server and ranks.size > 1:
        refuse_merging(config)
    built = local_served(
        connect,
        config.model,
        config.engine,
        tokenizer,
        KVDecoder(model),
        ranks,
        strategy.device,
        config.strategy.tensor_parallel,
        trains=True,
    )
    if isinstance(built, RankZeroEngine):
        # The thread that generates has collective calls of its own.
        shared = RankZeroEngine(built.engine, ranks.duplicate())
        _send_whole(shared, engine_weights(strategy, policy.state))
        return shared
    built.stays_awake = config.engine.starts_server
    if has_adapters(config.model):
        # adapters are merged into weights that training does not change, and does not send
        built.frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return built


def _send_whole(engine: RankZeroEngine, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Send all ``weights`` as version 0. Keep the ones that later adapters are added to.

    Every rank must call it.
    """
    bases: dict[str, Tensor] = {}

    def kept() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            _, factor = factor_of(name) or (name, None)
            if engine.engine is not None and factor == "base":
                bases[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor

    with closed_on_error(engine):
        engine.load_weights(kept(), 0)
    if engine.engine is not None:
        engine.engine.frozen = bases


def connect_http(
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    device: torch.device,
    *,
    trains: bool,
    media: Collection[str] = (),
) -> Engine:
    """Connect to ``lightrft serve``, vLLM or an endpoint of texts. See ``Connect``.

    Args:
        model: The model.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        ends: Token ids that end a response.
        device: Device of a server that the run starts.
        trains: The weights will change.
        media: Kinds of media of the prompts.
    """
    try:
        built = HTTPEngine.connect(engine, tokenizer, ends, vocabulary_of(model))
    except TextAlone as error:
        # Text alone will do where nothing is compared with it.
        if trains or engine.check_logprobs:
            raise
        endpoint = TextEndpoint(open_client(engine), tokenizer, engine, error.model)
        with closed_on_error(endpoint):
            check_server_media(endpoint, media)
        return endpoint
    with closed_on_error(built):
        return _checked(_trainable(built, model, trains=trains), model, media, trains=trains)


def connect_sglang(
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    device: torch.device,
    *,
    trains: bool,
    media: Collection[str] = (),
) -> Engine:
    """Connect to a served SGLang, or start one on the device of this rank. See ``Connect``.

    Args:
        model: The model.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        ends: Token ids that end a response.
        device: Device of a server that the run starts.
        trains: The weights will change.
        media: Kinds of media of the prompts.
    """
    vocabulary, own = vocabulary_of(model), engine.starts_server
    if own:
        options = own_server_options(model, engine, device)
        built = SGLangEngine.start(engine, tokenizer, ends, options, vocabulary)
    else:
        built = SGLangEngine.connect(engine, tokenizer, ends, vocabulary)
    with closed_on_error(built):
        return _checked(built, model, media, trains=trains or own)


@contextmanager
def closed_on_error(engine: Engine) -> Generator[None]:
    """Close ``engine`` if the block raises an error."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def _checked(
    built: ServedEngine, model: ModelConfig, media: Collection[str], *, trains: bool
) -> ServedEngine:
    """Return the engine that the run uses over a server, after all checks."""
    banning(built, model)
    check_server_media(built, media)
    if trains:
        built.lora = lora_of(model)
        built.require_updates()
    return built


def check_server_media(engine: Engine | None, kinds: Collection[str]) -> None:
    """Raise ``ConfigError`` if the server of ``engine`` takes no media of ``kinds``.

    Args:
        engine: The engine of the run.
        kinds: Kinds of media of the prompts.
    """
    if kinds and engine is not None:
        engine.refuse_media(f"prompts with media of kind {', '.join(sorted(kinds))}", kinds)


def banning(engine: ServedEngine, model: ModelConfig) -> ServedEngine:
    """Let ``engine`` ban what ``model`` reads as media. Return it.

    ``lightrft serve`` bans it without being asked.

    Args:
        engine: The engine over a server.
        model: The model.
    """
    settings = model_settings(model)
    engine.banned = media_token_ids(settings, family_of(settings))
    return engine


def vocabulary_of(model: ModelConfig) -> int:
    """Return the number of token ids that ``model`` knows, padded ones that no text has included.

    Args:
        model: The model.
    """
    return int(model_settings(model).get_text_config(decoder=True).vocab_size)


def own_server_options(model: ModelConfig, engine: EngineConfig, device: torch.device) -> list[str]:
    """Return the options of the server that a run starts.

    Args:
        model: The model.
        engine: Settings of the engine.
        device: Device of the server.
    """
    settings = model_settings(model)
    dtype, context = dtype_of(model, settings), context_length(settings)
    return server_options(base_and_lora(model), where_of(model), engine, dtype, device, context)


def examine_sglang(config: SampledConfig, device: torch.device) -> Iterator[Said]:
    """Say what ``lightrft doctor`` can tell of an SGLang that each process of the run starts."""
    if problem := missing_package():
        yield "bad", "engine.kind", problem
    elif warning := version_warning():
        yield "warn", "engine.kind", warning
    else:
        yield "ok", "engine.kind", f"= sglang, version {installed_version()}"
    try:
        options = own_server_options(config.model, config.engine, device)
    except UserError as error:
        yield "bad", "engine.kind", str(error)
        return
    each = "the run starts" if config.launch.processes == 1 else "each process starts, on its GPU,"
    yield "ok", "engine.server_options", f"{each} {command_of(options)}"


def _send_first(engine: Engine, decoder: DecoderProtocol) -> None:
    """Send the weights of the policy. Close ``engine`` and raise an error if they differ there."""
    weights = dict(decoder.parameters())
    with closed_on_error(engine):
        refuse_weights(engine.load_weights(weights.items(), 0), weights, 0)


def _trainable(built: HTTPEngine, model: ModelConfig, *, trains: bool) -> ServedEngine:
    """Return the engine over the same server that can get new weights, if ``trains`` is set."""
    folder = built.config.weights_dir
    if built.is_own and built.is_paused and not trains:
        # another run updates the weights, and the server answers after that
        built.check_generated()
    # only an update of all weights ends the pause
    elif built.is_paused and (folder is not None or not trains):
        raise ConfigError(
            f"{built.where} is paused: a run updates its weights, or ended while it did; wait, or "
            "restart the server"
        )
    if folder is not None and (built.is_own or not trains):
        raise ConfigError(
            f"engine.weights_dir = {folder} changes nothing here: it is for the adapters of a run "
            "that trains on a vLLM server; leave it out"
        )
    if built.is_own or not trains:
        return built
    if folder is not None and model.load_in_4bit:
        raise ConfigError(
            f"engine.weights_dir = {folder} with model.load_in_4bit = true: a server that gets "
            "adapters alone keeps the weights that were not quantised; leave out "
            "engine.weights_dir, and merged weights are sent"
        )
    media = None
    if kinds := media_kinds(model):
        # a server that gets adapters has not our backend of weight transfer
        media = ServedMedia(model_settings(model), kinds, own_positions=folder is not None)
    return VLLMServerEngine.over(built, media)


def check_served_weights(engine: HTTPEngine, actor: Actor, *, compares: bool) -> None:
    """Raise ``ConfigError`` if the server has other weights than ``actor``.

    A digest tells it for ``lightrft serve``, if both hold their weights by the same names and
    types. For other servers, and other types, the log-probs of the first responses must do.

    Args:
        engine: The engine over the server.
        actor: The policy.
        compares: The weights of ``actor`` are loaded. Else there is nothing to compare.
    """
    update = engine.update_name()
    if not compares:
        if update:
            log.warning(
                "%s holds the weights %s of a run that updated it, and they are evaluated",
                engine.where,
                update,
            )
        return
    is_alike = bool(engine.layout) and engine.layout == weights_layout(actor)
    if update:
        held = engine.shown_fingerprint() if is_alike else {}
        if not held or unequal_weight(held, KVDecoder(actor.model).parameters()):
            raise ConfigError(
                f"{engine.where} holds the weights {update} of a run that updated it, and nothing "
                f"shows that they are those of model.path = {actor.config.path!r}; restart it to "
                f"{WAY_OUT}"
            )
    elif engine.digest and not is_alike:
        log.warning(
            "%s holds its weights in other types or by other names than model.path = %r has here, "
            "so their digests cannot be compared: the log-probs of the first responses alone are; "
            "set model.dtype to the type of the server",
            engine.where,
            actor.config.path,
        )
    elif engine.digest and (ours := weights_digest(actor)) != engine.digest:
        raise ConfigError(
            f"{engine.where} serves other weights than model.path = {actor.config.path!r}: their "
            f"digest is {engine.digest}, and that of model.path is {ours}; {WAY_OUT}"
        )


T = TypeVar("T")


class RankZeroEngine(Engine):
    """An engine that rank 0 calls for all ranks. The other ranks only help to gather weights.

    Args:
        engine: The engine. ``None`` on other ranks than 0.
        ranks: All ranks of the run.
    """

    shared_by_all_ranks = True

    def __init__(self, engine: Engine | None, ranks: ProcessGroup) -> None:
        self.engine = engine
        self._ranks = ranks

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses on rank 0, see ``Engine.generate``.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. ``True`` aborts unfinished responses.
        """
        assert self.engine is not None, "other ranks than 0 have no engine"
        return self.engine.generate(requests, sampling, stopped)

    def check_limits(self, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
        """See ``Engine.check_limits``. Every rank must call it.

        Args:
            longest: Length of the longest prompt, in tokens.
            sampling: Settings of the responses.
            key: Name of the setting that holds ``sampling``, for the message.
            data: Name of the setting that holds the prompts, for the message.
        """

        def check() -> None:
            if self.engine is not None:
                self.engine.check_limits(longest, sampling, key, data)

        run_on_all_ranks(self._ranks, check)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """See ``Engine.refuse_media``."""
        if self.engine is not None:
            self.engine.refuse_media(what, kinds)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """See ``Engine.load_weights``. Every rank must call it."""

        def take(stream: Iterator[tuple[str, Tensor]]) -> Fingerprint:
            assert self.engine is not None
            return self.engine.load_weights(stream, version)

        return led(self._ranks, weights, take)

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``."""
        if self.engine is not None:
            self.engine.sleep(level)

    def wake(self) -> None:
        """See ``Engine.wake``."""
        if self.engine is not None:
            self.engine.wake()

    def take_counts(self) -> Mapping[str, float]:
        """See ``Engine.take_counts``."""
        return {} if self.engine is None else self.engine.take_counts()

    def close(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()


def led(
    ranks: ProcessGroup,
    weights: Iterable[tuple[str, Tensor]],
    take: Callable[[Iterator[tuple[str, Tensor]]], T],
) -> T:
    """Run ``take`` on ``weights`` on rank 0 and broadcast its result.

    The other ranks only join the collective calls that gather the weights.

    Args:
        ranks: all ranks of the run.
        weights: full tensors by name. Iterating may be a collective operation.
        take: function that consumes them on rank 0.
    """
    stream = iter(weights)

    def work() -> Any:
        try:
            return take(stream) if ranks.rank == 0 else None
        finally:
            # Every rank must exhaust the stream, since gathering a tensor is a collective call.
            deque(stream, maxlen=0)

    return run_on_all_ranks(ranks, work)[0]
