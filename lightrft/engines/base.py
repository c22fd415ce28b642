"""The base of sampling engines: the calls that a training loop makes to generate responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.types import Request, Rollout

if TYPE_CHECKING:
    from lightrft.engines.constrained.rows import ConstrainedTokens
    from lightrft.engines.decoder_protocol import CompiledSteps

Fingerprint = dict[str, str]
"""A checksum of each parameter that the engine holds, by parameter name."""
ServerKind: TypeAlias = Literal["lightrft", "vllm", "sglang"]
"""A server that an engine may ask."""


def never_stop() -> bool:
    """Return ``False``: the ``stopped`` callback of a call that is never interrupted."""
    return False


class Engine(ABC):
    """A sampling engine. Callers ask its attributes, and never its class.

    Attributes:
        shared_by_all_ranks: One engine serves all ranks of a run, and rank 0 calls it for all of
            them. If ``False``, each rank has an engine.
        tensor_parallel_size: Number of consecutive ranks that shard one model. They must generate
            the same responses in the same calls.
        shares_weights: The engine samples from the trainer's weights and holds no copy of them.
        stays_awake: ``sleep`` keeps everything, for an engine that generates during training.
        frozen: Parameters that are merged with those of each update, for callers that send the
            trained ones alone.
        server: Kind of the server that it asks. ``None`` without one.
        is_paused: The server answers nobody until a run sends its weights.
    """

    shared_by_all_ranks: bool = False
    tensor_parallel_size: int = 1
    shares_weights: bool = False
    stays_awake: bool = False
    frozen: Mapping[str, Tensor] = {}
    server: ServerKind | None = None
    is_paused: bool = False

    @property
    def compiled(self) -> CompiledSteps | None:
        """Counts of the steps that the engine has compiled. ``None`` if it compiles none."""
        return None

    @abstractmethod
    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield one response to each request as it finishes, in no particular order.

        Requests that refer to the same prompt object share its computation. A request with a
        partial response resumes it under the current weights, which recompute the existing tokens.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. Once it returns ``True``, unfinished responses are
                yielded as they are, with finish reason ``abort``. Responses to requests that have
                not started are empty.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Use ``weights`` as policy ``version``.

        Responses generated from now on carry that version.
        """

    def sleep(self, level: int) -> None:  # noqa: B027 (nothing is the default)
        """Free memory for other users of the device.

        Level 1 keeps the weights, level 2 does not.
        """

    def wake(self) -> None:  # noqa: B027
        """Take the memory again that ``sleep`` freed."""

    def close(self) -> None:  # noqa: B027
        """Release all resources."""

    def check_limits(  # noqa: B027
        self, longest: int, sampling: SamplingConfig, key: str, data: str
    ) -> None:
        """Raise ``ConfigError`` if the engine, once started, cannot respond to prompts of a run.

        With an engine that all ranks share, every rank must call it.

        Args:
            longest: Length of the longest prompt, in tokens.
            sampling: Settings of the responses.
            key: Name of the setting that holds ``sampling``, for the message.
            data: Name of the setting that holds the prompts, for the message.
        """

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:  # noqa: B027
        """Raise ``ConfigError`` if the engine, once started, cannot take media.

        Args:
            what: The prompts, for the message.
            kinds: Kinds of media of the prompts.
        """

    def constrained_tokens(
        self, rollouts: Sequence[Rollout], sampling: SamplingConfig
    ) -> ConstrainedTokens | None:
        """Return the tokens that the constraints of ``sampling`` allowed in ``rollouts``.

        ``None`` for an engine that follows no constraints.
        """
        return None

    def take_counts(self) -> Mapping[str, float]:
        """Return the number of events since the last call, see ``HasEventCounts``."""
        return {}
