"""A packed batch of responses, with the columns that the phases of a step fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrft.types.rollouts import Prompt
from lightrft.types.tensors import HostCopy, Media, Ragged, rows_of
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.utils.lazy_imports import Tensor, torch

GOLD = -1
"""``Batch.rank`` of a response that is better than all ranked ones."""

CORRUPTED = -2
"""``Batch.rank`` of a copy of the best response, after a prompt with corrupted media."""


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

    # Policy: log-probs, and what the loss of a token is multiplied by.
    # [N] bool: the policy sampled this token, so it may carry gradient
    sampled: Tensor | None = token_column()
    # [N] log-prob under the distribution that was sampled from
    behavior_logprobs: Tensor | None = token_column()
    old_logprobs: Tensor | None = token_column()  # [N] policy before the update
    # [N] policy at the start of an optimizer step, without gradient
    logprobs: Tensor | None = token_column()
    entropy: Tensor | None = token_column()  # [N] of the policy before the update
    # [N] squared norm of the gradient of the policy's log-prob in its logits
    energy: Tensor | None = token_column()
    versions: Tensor | None = token_column()  # [N] policy version that sampled the token
    version: Tensor | None = sample_column()  # [B] oldest policy version among the tokens
    truncated: Tensor | None = sample_column()  # [B] bool: cut by the length limit
    sample: Tensor | None = sample_column()  # [B] index among the responses to the prompt
    # [N] weight of each token's loss in the loss of the global batch
    loss_weights: Tensor | None = token_column()
    # [N] weight of each token's log-likelihood among positive responses
    positive_weights: Tensor | None = token_column()
    token_mask: Tensor | None = token_column()  # [N] factor of the policy loss; 0 masks a token
    # [N] factor of the policy loss where it depends on the whole mini-batch
    correction: Tensor | None = token_column()
    pull: Tensor | None = token_column()  # [N] coefficient of |log-prob - old log-prob|
    # [N] weight of each token in the sums of its response
    token_weights: Tensor | None = token_column()

    # Reference and teacher.
    ref_logprobs: Tensor | None = token_column()  # [N]
    # [N] weight of each token's KL(reference, policy) in the loss of the global batch
    kl_weights: Tensor | None = token_column()
    teacher_logprobs: Tensor | None = token_column()  # [N]
    # [N] weight of each token's divergence from a teacher, if it is not its loss weight
    divergence_weights: Tensor | None = token_column()
    # [N] bool: the token ends where a token of the teacher's tokenizer ends too
    aligned: Tensor | None = token_column()

    # Rewards and advantages.
    rewards: Tensor | None = sample_column()  # [B] scalar outcome reward
    # [B] reward as scored, before normalization and shaping
    outcomes: Tensor | None = sample_column()
    # [B, K] terms of the reward; NaN where a row has no such term
    terms: Tensor | None = sample_column()
    # [B, K] weight of each term in the row's reward; 0 where it has none
    term_weights: Tensor | None = sample_column()
    # [B] reward of the greedy response to the same prompt
    baselines: Tensor | None = sample_column()
    costs: Tensor | None = sample_column()  # [B, K] costs that the algorithm limits
    advantages: Tensor | None = token_column()  # [N]
    returns: Tensor | None = token_column()  # [N]
    data_source: Tensor | None = sample_column()  # [B] long: number of the data source

    # Critic, and the critic of the cost.
    values: Tensor | None = token_column()  # [N] V(state before the token)
    final_values: Tensor | None = sample_column()  # [B] V(state after the last token)
    final_returns: Tensor | None = sample_column()  # [B] targets of ``final_values``
    cost_values: Tensor | None = token_column()  # [N] as ``values``, of the cost
    cost_returns: Tensor | None = token_column()  # [N] as ``returns``, of the cost
    # [B] as ``final_values``, of the cost
    cost_final_values: Tensor | None = sample_column()

    # Steps of a response.
    # [N] long: step of the response that the token belongs to
    steps: Tensor | None = token_column()
    # [N] long: label of the state before the step; equal states have equal labels
    states: Tensor | None = token_column()
    step_rewards: Tensor | None = token_column()  # [N] reward of the step that ends at the token
    process_rewards: Tensor | None = token_column()  # [N] of a process reward model
    # [N] bool: the token ends a step, where a process reward model scores it
    step_ends: Tensor | None = token_column()
    # [N] probability that the step which ends here is right; NaN for none
    step_labels: Tensor | None = token_column()

    # Examples of preference and reward models.
    # [B] long: row of the data that the response belongs to
    example: Tensor | None = sample_column()
    example_weights: Tensor | None = sample_column()  # [B] weight of the example in the loss
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

    # Noise on embeddings.
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
        """Return a copy with other columns; the tensors are shared.

        Raises:
            ConfigError: There is no such column, or it has another number of rows.
        """
        known = {one.name: one.metadata.get("axis") for one in dataclasses.fields(self)}
        if odd := next((name for name in columns if name not in known), ""):
            raise ConfigError(f"a batch has no column {odd!r}{did_you_mean(odd, known)}")
        made = dataclasses.replace(self, **columns)
        for name, column in columns.items():
            if column is None or known[name] is None:
                continue
            size = made.tokens if known[name] == "token" else len(made)
            shape = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
            if shape[:1] != [size]:
                of = "token" if known[name] == "token" else "response"
                more = (
                    "; repeat_interleave(batch.lengths) gives each token the number of its response"
                )
                raise ConfigError(
                    f"{name} = {shape}: it has one number for each {of}, [{size}]"
                    f"{more if shape == [len(made)] else ''}"
                )
        return made

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
