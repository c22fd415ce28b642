"""Prompts, requests for responses, and the responses, as plain lists."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lightrft.types.tensors import Media
from lightrft.utils.lazy_imports import Tensor

if TYPE_CHECKING:
    from lightrft.config.generation.decoding import ConstraintConfig

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a decoded input.

    Attributes:
        shape: Shape of its array.
        times: Time in seconds of each entry of the first axis; empty unless that axis is time.
        rate: Entries of the first axis per second, for positions in time. ``None`` if only
            ``times`` are known.
    """

    shape: tuple[int, ...]
    times: tuple[float, ...] = ()
    rate: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file attached to a prompt for people to view, such as a small copy of its media.

    Equal files have equal names.
    """

    name: str
    data: bytes = field(repr=False)


@dataclass(slots=True)
class Prompt:
    """One task for the policy.

    Attributes:
        id: Unique name within the data set.
        token_ids: The encoded prompt.
        text: The prompt as text.
        label: The value that a reward compares responses with.
        reference: A reference answer or solution.
        data_source: Name of the data set that the row belongs to.
        columns: Every other column of the data row, for rewards.
        media: Inputs of this prompt only. Each ``Ragged`` has one sample.
        attachments: Files that show ``media`` to people.
        request: Messages of the row before any template, with media as content parts, for judges.
    """

    id: str
    token_ids: list[int]
    text: str = ""
    label: Any = None
    reference: Any = None
    data_source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=dict)
    attachments: tuple[Attachment, ...] = ()
    request: Sequence[Mapping[str, Any]] = ()

    @property
    def begun(self) -> str:
        """Return the text at the end of the prompt that is the beginning of the response."""
        last = self.request[-1] if self.request else {}
        content = last.get("content")
        return content if last.get("role") == "assistant" and isinstance(content, str) else ""

    def as_json(self) -> dict[str, object]:
        """Return the prompt as plain data for files that people read.

        Attachments are given by name, and media are left out.
        """
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # the request is the text again, and may hold the bytes of media
        del kept["media"], kept["request"]
        return {**kept, "attachments": [a.name for a in self.attachments]}


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Experts that a mixture-of-experts model sent each token to; -1 where they are unknown.

    Attributes:
        prompt: ``[T, layers, k]`` int16, for the tokens of the prompt. Responses of a group share
            it.
        response: ``[N, layers, k]`` int16, for the tokens of the response. The last token of a
            response is never fed to the model.
    """

    prompt: Tensor
    response: Tensor

    def as_json(self) -> dict[str, object]:
        """Return the shapes, and the bytes of both in little-endian order, compressed by zlib and
        encoded in base64."""
        found: dict[str, object] = {}
        for name in ("prompt", "response"):
            values = getattr(self, name).cpu().contiguous()
            packed = zlib.compress(values.numpy().astype("<i2").tobytes())
            found[name] = {"shape": list(values.shape), "zlib": base64.b64encode(packed).decode()}
        return found


@dataclass(slots=True)
class Rollout:
    """One trajectory as plain lists, so that it can be pickled, printed and saved as JSON.

    Tokens are never decoded and encoded again. Lists have one entry per token.

    Attributes:
        prompt: The prompt.
        token_ids: The response tokens.
        sampled: The policy sampled the token. False for tokens of tools and environments.
        logprobs: Log-prob of the token under the distribution that it was sampled from.
        versions: Version of the policy that sampled the token.
        finish_reason: ``stop``, ``length``, or ``abort`` for an unfinished response.
        seed: Seed of the request.
        sample: Index among the responses to the prompt.
        text: The response as it was sampled: with its special tokens, but without the token or the
            stop string that ended it.
        plain: The text without special tokens. ``None`` if it is ``text``.
        reward: Outcome reward. ``None`` if the response is not scored.
        baseline: Reward of the greedy response to the same prompt. ``None`` if there is none.
        terms: Reward terms by name.
        weights: Weight of each term that is part of ``reward``; other terms are only reported.
        failed: Reason why generation or scoring failed; empty otherwise.
        step_rewards: Index of a token and the reward at it, for rewards of steps.
        experts: Experts of each token. ``None`` if the engine did not record them.
        drafted: Number of tokens that speculative decoding drafted.
        accepted: Number of drafted tokens that were accepted.
        reused_tokens: Number of prompt tokens whose keys and values came from an earlier sequence.
    """

    prompt: Prompt
    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    seed: int
    sample: int = 0
    text: str = ""
    plain: str | None = None
    reward: float | None = None
    baseline: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    experts: ExpertChoices | None = None
    drafted: int = 0
    accepted: int = 0
    reused_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def plain_text(self) -> str:
        """The text without special tokens, which servers send."""
        return self.text if self.plain is None else self.plain


@dataclass(slots=True)
class Request:
    """A request for one response. Equal seeds give equal responses whatever else is in the batch.

    Attributes:
        prompt: The prompt.
        seed: Seed of the response.
        sample: Index among the responses to the prompt.
        max_new_tokens: Length limit of this response. ``None`` uses the limit of the sampling
            settings.
        greedy: Take the most likely token at each position, as at temperature 0.
        partial: An unfinished response to continue. ``None`` starts a new one.
        pause_after_tokens: Number of tokens at which the response is returned unfinished, with
            finish reason ``abort``, to be continued later. ``None`` for no pause.
        watch: Called with the tokens of the growing response after each token. Once it returns
            ``False``, the response is returned as it is, with finish reason ``abort``.
        constraint: Form of this response. ``None`` takes that of the sampling settings.
        prompt_response_tokens: Number of last tokens of the prompt that are the beginning of a
            response. Placeholders among them stand for no media.
    """

    prompt: Prompt
    seed: int
    sample: int = 0
    max_new_tokens: int | None = None
    greedy: bool = False
    partial: Rollout | None = None
    pause_after_tokens: int | None = None
    watch: Callable[[list[int]], bool] | None = None
    constraint: ConstraintConfig | None = None
    prompt_response_tokens: int = 0

    @property
    def num_generated(self) -> int:
        """Return the number of response tokens that already exist."""
        return len(self.partial) if self.partial is not None else 0
