"""Define the data types that every layer shares.

Nothing is padded, and a prompt is stored once per group. Letters in shapes: P distinct prompts, B
responses, N response tokens of all B responses, concatenated.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lightrft.utils.device_transfer import to_device
from lightrft.utils.lazy_imports import Tensor, torch

if TYPE_CHECKING:
    from lightrft.config.generation.decoding import ConstraintConfig

FinishReason = Literal["stop", "length", "abort"]

GOLD = -1
"""``Batch.rank`` of a response that is better than all ranked ones."""

CORRUPTED = -2
"""``Batch.rank`` of a copy of the best response, after a prompt with corrupted media."""


@dataclass(slots=True)
class Ragged:
    """Rows of variable length per sample, concatenated.

    Attributes:
        values: ``[N, ...]``. The rows of all samples.
        lengths: ``[B]``. The number of rows of each sample; 0 for a sample without this input.
    """

    values: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def select(self, index: Tensor) -> Ragged:
        """Return the samples ``index [K]``, in this order.

        If ``index`` selects all samples in their order, return this object, since rows may be
        large.
        """
        # The lengths first: a comparison of values would wait for the device each time.
        if index.numel() == len(self):
            everything = torch.arange(len(self), device=index.device)
            if torch.equal(index, everything):
                return self
        return Ragged(self.values[rows_of(self.lengths, index)], self.lengths[index])

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same data on ``device``; tensors already there are shared."""
        return Ragged(to_device(self.values, device), to_device(self.lengths, device))

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the samples of ``parts``."""
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))


Media = dict[str, Ragged]
"""Rows of each model input, by input name, over the samples of a ``Segments``.

Only the models read them.
"""


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


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The values of an integer tensor on the host, for code that must not wait for the device.

    Attributes:
        of_tensor: The tensor.
        numbers: Its values.
    """

    of_tensor: Tensor
    numbers: list[int]

    @staticmethod
    def of(tensor: Tensor, known: HostCopy | None) -> HostCopy:
        """Return ``known`` if it is a copy of this very ``tensor``, else read the tensor."""
        if known is not None and known.of_tensor is tensor:
            return known
        return HostCopy(tensor, tensor.tolist())

    @staticmethod
    def moved(tensor: Tensor, known: HostCopy | None, to: Tensor) -> HostCopy | None:
        """Return the copy for ``to``, which has the same values on another device.

        Returns ``None`` if the values are unknown without waiting for the device.

        Args:
            tensor: The tensor before the move.
            known: A copy, possibly of another tensor.
            to: The tensor after the move.
        """
        if tensor.device.type != "cpu" and (known is None or known.of_tensor is not tensor):
            return None
        return HostCopy(to, HostCopy.of(tensor, known).numbers)


@dataclass(slots=True)
class Segments:
    """Token sequences, concatenated.

    Attributes:
        tokens: ``[N]``. The tokens of all sequences.
        lengths: ``[S]``. The length of each sequence.
        media: Media of each sequence.
        numbers: ``[S]`` long. Sequences of one step with equal numbers have equal media. ``None``
            if they are not numbered.
        media_key: Equal keys of one step mean equal media of all sequences, on every rank. ``None``
            if the media may be those of any step.
        experts: ``[N, layers, k]`` int16. Experts to replay for each token, -1 where the router
            picks them. ``None`` replays none.
    """

    tokens: Tensor
    lengths: Tensor
    media: Media = field(default_factory=dict)
    _sizes: HostCopy | None = field(default=None, repr=False, compare=False)
    numbers: Tensor | None = field(default=None, repr=False, compare=False)
    media_key: Hashable = field(default=None, repr=False, compare=False)
    experts: Tensor | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.lengths.numel())

    @property
    def sizes(self) -> list[int]:
        """Return ``lengths`` on the host.

        Reading them does not wait for a device that ``to`` moved the sequences to.
        """
        self._sizes = HostCopy.of(self.lengths, self._sizes)
        return self._sizes.numbers

    @staticmethod
    def of(rows: Sequence[Sequence[int]], media: Media | None = None) -> Segments:
        """Build one sequence per row of token ids."""
        flat = [t for row in rows for t in row]
        return Segments(
            torch.tensor(flat, dtype=torch.long),
            torch.tensor([len(r) for r in rows], dtype=torch.long),
            media or {},
        )

    @staticmethod
    def of_prompts(prompts: Sequence[Prompt]) -> Segments:
        """Build one sequence per prompt, with its media."""
        return Segments.cat([Segments.of([p.token_ids], p.media) for p in prompts])

    def select(self, index: Tensor) -> Segments:
        """Return the sequences ``index [K]``, in this order."""
        rows = rows_of(self.lengths, index)
        return Segments(
            self.tokens[rows],
            self.lengths[index],
            {k: r.select(index) for k, r in self.media.items()},
            numbers=None if self.numbers is None else self.numbers[index],
            experts=None if self.experts is None else self.experts[rows],
        )

    def numbered(self) -> Segments:
        """Return the same sequences with ``numbers`` 0, 1, 2, ..."""
        return dataclasses.replace(self, numbers=torch.arange(len(self)))

    def to(self, device: torch.device | str) -> Segments:
        """Return the same data on ``device``; tensors already there are shared.

        ``numbers`` are left out.
        """
        lengths = to_device(self.lengths, device)
        known = HostCopy.moved(self.lengths, self._sizes, lengths)
        return Segments(
            to_device(self.tokens, device),
            lengths,
            {k: r.to(device) for k, r in self.media.items()},
            known,
            media_key=self.media_key,
            experts=None if self.experts is None else to_device(self.experts, device),
        )

    @staticmethod
    def cat(parts: Sequence[Segments]) -> Segments:
        """Concatenate the sequences of ``parts``."""
        return Segments(
            torch.cat([p.tokens for p in parts]),
            torch.cat([p.lengths for p in parts]),
            cat_media(parts),
            experts=_cat_experts(parts),
        )


def _cat_experts(parts: Sequence[Segments]) -> Tensor | None:
    """Concatenate the experts of ``parts``; those of a part without any are unknown."""
    example = next((p.experts for p in parts if p.experts is not None), None)
    if example is None:
        return None
    found = []
    for part in parts:
        unknown = example.new_full((part.tokens.numel(), *example.shape[1:]), -1)
        found.append(unknown if part.experts is None else part.experts)
    return torch.cat(found)


def cat_media(parts: Sequence[Segments]) -> Media:
    """Concatenate the media of ``parts``; a part without some input adds rows of length 0."""
    # The first rows of each input give the shape and dtype of the empty ones.
    some: Media = {}
    for part in parts:
        for name, rows in part.media.items():
            some.setdefault(name, rows)
    joined: Media = {}
    for name, example in some.items():
        of_parts = []
        for part in parts:
            own = part.media.get(name)
            if own is None:
                own = Ragged(example.values[:0], torch.zeros_like(part.lengths))
            of_parts.append(own)
        joined[name] = Ragged.cat(of_parts)
    return joined


def token_column() -> Any:
    """Declare a column of ``Batch`` with one entry per response token."""
    return field(default=None, metadata={"axis": "token"})


def sample_column() -> Any:
    """Declare a column of ``Batch`` with one entry per response."""
    return field(default=None, metadata={"axis": "sample"})


@dataclass(slots=True)
class Batch:
    """A packed batch of P prompts, B responses and N response tokens.

    ``prompt_of [B]`` defines groups: by identity, never by position. A column declares its axis
    once, below. ``select``, ``cat`` and ``to`` use it.

    Attributes:
        prompts: The P distinct prompts.
        responses: The B responses, whose tokens are concatenated.
        prompt_of: ``[B]`` long: the prompt of each response.
        term_names: Names of the K columns of ``terms``.
    """

    prompts: Segments
    responses: Segments
    prompt_of: Tensor
    # [N] bool: the policy sampled this token, so it may carry gradient
    sampled: Tensor | None = token_column()
    # [N] log-prob under the distribution that was sampled from
    behavior_logprobs: Tensor | None = token_column()
    old_logprobs: Tensor | None = token_column()  # [N] policy before the update
    ref_logprobs: Tensor | None = token_column()  # [N]
    teacher_logprobs: Tensor | None = token_column()  # [N]
    process_rewards: Tensor | None = token_column()  # [N] of a process reward model
    step_rewards: Tensor | None = token_column()  # [N] reward of the step that ends at the token
    # [N] policy at the start of an optimizer step, without gradient
    logprobs: Tensor | None = token_column()
    entropy: Tensor | None = token_column()  # [N] of the policy before the update
    versions: Tensor | None = token_column()  # [N] policy version that sampled the token
    values: Tensor | None = token_column()  # [N] V(state before the token)
    advantages: Tensor | None = token_column()  # [N]
    returns: Tensor | None = token_column()  # [N]
    cost_values: Tensor | None = token_column()  # [N] as ``values``, of the cost
    cost_returns: Tensor | None = token_column()  # [N] as ``returns``, of the cost
    # [N] weight of each token's loss in the loss of the global batch
    loss_weights: Tensor | None = token_column()
    # [N] weight of each token's log-likelihood among positive responses
    positive_weights: Tensor | None = token_column()
    token_mask: Tensor | None = token_column()  # [N] factor of the policy loss; 0 masks a token
    # [N] factor of the policy loss where it depends on the whole mini-batch
    correction: Tensor | None = token_column()
    # [N] squared norm of the gradient of the policy's log-prob in its logits
    energy: Tensor | None = token_column()
    # [N] long: step of the response that the token belongs to
    steps: Tensor | None = token_column()
    # [N] long: label of the state before the step; equal states have equal labels
    states: Tensor | None = token_column()
    pull: Tensor | None = token_column()  # [N] coefficient of |log-prob - old log-prob|
    # [N] weight of each token in the sums of its response
    token_weights: Tensor | None = token_column()
    # [N] weight of each token's KL(reference, policy) in the loss of the global batch
    kl_weights: Tensor | None = token_column()
    # [N] weight of each token's divergence from a teacher, if it is not its loss weight
    divergence_weights: Tensor | None = token_column()
    # [N] bool: the token ends where a token of the teacher's tokenizer ends too
    aligned: Tensor | None = token_column()
    # [N] bool: the token ends a step, where a process reward model scores it
    step_ends: Tensor | None = token_column()
    # [N] probability that the step which ends here is right; NaN for none
    step_labels: Tensor | None = token_column()
    sample: Tensor | None = sample_column()  # [B] index among the responses to the prompt
    rewards: Tensor | None = sample_column()  # [B] scalar outcome reward
    # [B] reward as scored, before normalization and shaping
    outcomes: Tensor | None = sample_column()
    costs: Tensor | None = sample_column()  # [B, K] costs that the algorithm limits
    # [B, K] terms of the reward; NaN where a row has no such term
    terms: Tensor | None = sample_column()
    # [B, K] weight of each term in the row's reward; 0 where it has none
    term_weights: Tensor | None = sample_column()
    # [B] reward of the greedy response to the same prompt
    baselines: Tensor | None = sample_column()
    final_values: Tensor | None = sample_column()  # [B] V(state after the last token)
    # [B] as ``final_values``, of the cost
    cost_final_values: Tensor | None = sample_column()
    final_returns: Tensor | None = sample_column()  # [B] targets of ``final_values``
    version: Tensor | None = sample_column()  # [B] oldest policy version among the tokens
    truncated: Tensor | None = sample_column()  # [B] bool: cut by the length limit
    # [B] long: row of the data that the response belongs to
    example: Tensor | None = sample_column()
    # [B] long: 0 is the best response of its example, equal ranks are ties; negative: see
    # ``GOLD`` and ``CORRUPTED``
    rank: Tensor | None = sample_column()
    rating: Tensor | None = sample_column()  # [B] how good the response is
    # [B, H] rating for each head of a reward model; NaN where the response has none
    labels: Tensor | None = sample_column()
    # [B] how much better the response is than the next one of its example
    margin: Tensor | None = sample_column()
    desirable: Tensor | None = sample_column()  # [B] bool: a good response
    # [B, K] weight of each output of a reward model in the loss of the global batch
    output_weights: Tensor | None = sample_column()
    example_weights: Tensor | None = sample_column()  # [B] weight of the example in the loss
    data_source: Tensor | None = sample_column()  # [B] long: number of the data source
    # [B] long: seed of the noise on the embeddings of the prompt and the response
    noise_seeds: Tensor | None = sample_column()
    noise_alpha: Tensor | None = sample_column()  # [B] size of that noise
    # Columns are given as ``**columns``, whose type would have to fit the types of these two.
    # ``tuple[str, ...]``: names of the columns of ``terms``
    term_names: Any = field(default=(), compare=False)
    # ``HostCopy | None``
    _groups: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.prompt_of.numel())

    @property
    def lengths(self) -> Tensor:
        """Return the response lengths, ``[B]``."""
        return self.responses.lengths

    @property
    def tokens(self) -> int:
        """Return N, the number of response tokens."""
        return int(self.responses.tokens.numel())

    @property
    def mask(self) -> Tensor:
        """Return a mask ``[N]`` of tokens that may carry gradient."""
        if self.sampled is None:
            return torch.ones_like(self.responses.tokens, dtype=torch.bool)
        return self.sampled

    @property
    def row_of(self) -> Tensor:
        """Return the response of each token, ``[N]``."""
        rows = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.tokens)

    @property
    def groups(self) -> list[int]:
        """Return ``prompt_of`` on the host.

        Reading it does not wait for a device that ``to`` moved the batch to.
        """
        self._groups = HostCopy.of(self.prompt_of, self._groups)
        return self._groups.numbers

    def columns(self, axis: str) -> dict[str, Tensor]:
        """Return the filled columns of one axis, ``"token"`` or ``"sample"``, by name."""
        filled: dict[str, Tensor] = {}
        for column in dataclasses.fields(self):
            value = getattr(self, column.name)
            if column.metadata.get("axis") == axis and value is not None:
                filled[column.name] = value
        return filled

    def replace(self, **columns: Tensor | None) -> Batch:
        """Return a copy with other columns; the tensors are shared."""
        return dataclasses.replace(self, **columns)

    def select(self, index: Tensor) -> Batch:
        """Return the responses ``index [K]``, in this order, with the prompts that they use."""
        kept, prompt_of = torch.unique(self.prompt_of[index], return_inverse=True)
        rows = rows_of(self.lengths, index)
        return Batch(
            self.prompts.select(kept),
            self.responses.select(index),
            prompt_of,
            **{k: v[rows] for k, v in self.columns("token").items()},
            **{k: v[index] for k, v in self.columns("sample").items()},
            term_names=self.term_names,
        )

    def numbered(self) -> Batch:
        """Return the same batch with numbers of its prompts. The tensors are shared."""
        return dataclasses.replace(self, prompts=self.prompts.numbered())

    def split(self, parts: Iterable[Tensor]) -> list[Batch]:
        """Return one batch per index tensor of ``parts``."""
        return [self.select(index) for index in parts]

    def to(self, device: torch.device | str) -> Batch:
        """Return the same data on ``device``; tensors already there are shared."""
        columns = {**self.columns("token"), **self.columns("sample")}
        moved = {name: to_device(column, device) for name, column in columns.items()}
        prompt_of = to_device(self.prompt_of, device)
        known = HostCopy.moved(self.prompt_of, self._groups, prompt_of)
        return Batch(
            self.prompts.to(device),
            self.responses.to(device),
            prompt_of,
            **moved,
            term_names=self.term_names,
            _groups=known,
        )

    @staticmethod
    def cat(parts: Sequence[Batch]) -> Batch:
        """Concatenate batches. Equal prompts of different parts remain separate groups.

        Raises:
            ValueError: If the parts do not have the same columns.
        """
        terms = {part.term_names for part in parts}
        if len(terms) > 1:
            raise ValueError(f"batches with different reward terms cannot be joined: {terms}")
        names = {axis: [set(p.columns(axis)) for p in parts] for axis in ("token", "sample")}
        for axis, sets in names.items():
            if any(s != sets[0] for s in sets):
                raise ValueError(f"batches with different {axis} columns cannot be joined: {sets}")
        # Prompts of later parts come after those of earlier ones, so their indices move up.
        offsets, seen = [], 0
        for part in parts:
            offsets.append(part.prompt_of + seen)
            seen += len(part.prompts)
        columns = [*sorted(names["token"][0]), *sorted(names["sample"][0])]
        return Batch(
            Segments.cat([p.prompts for p in parts]),
            Segments.cat([p.responses for p in parts]),
            torch.cat(offsets),
            **{k: torch.cat([getattr(p, k) for p in parts]) for k in columns},
            term_names=parts[0].term_names,
        )


def rows_of(lengths: Tensor, index: Tensor) -> Tensor:
    """Return the flat indices of some runs, run after run.

    ``lengths [B]`` are the lengths of all runs of a flat array; ``index [K]`` selects runs.
    """
    starts = torch.cumsum(lengths, 0) - lengths
    kept = lengths[index]
    ends = torch.cumsum(kept, 0)
    # Read once: without ``output_size``, ``repeat_interleave`` would wait for the device again.
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(starts[index] - (ends - kept), kept, output_size=total)
    return torch.arange(total, device=lengths.device) + shift
