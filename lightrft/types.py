"""The nouns that every layer shares. Nothing is padded, and a prompt is stored once per group.

Letters in shapes: P distinct prompts, B responses, N response tokens of all B responses laid end to end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightrft.utils.device_transfer import to_device
from lightrft.utils.lazy_imports import Tensor, torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Ragged:
    """Rows of each sample laid end to end: ``values [N, ...]``, ``lengths [B]``; a sample without this input has length 0."""

    values: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def select(self, index: Tensor) -> Ragged:
        """The samples named by ``index [K]``, in its order: where that is all of them as they are, this object, since rows may be large."""
        if index.numel() == len(self) and torch.equal(index, torch.arange(len(self), device=index.device)):
            return self
        return Ragged(self.values[rows_of(self.lengths, index)], self.lengths[index])

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(to_device(self.values, device), to_device(self.lengths, device))

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))


Media = dict[str, Ragged]
"""Model input name to its rows, over the samples of the ``Segments`` that hold it. Nothing outside the models looks inside."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How large something decoded is: the ``shape`` of its array, and when in seconds each entry of the first axis was, if it is time."""

    shape: tuple[int, ...]
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Attachment:
    """Something of a prompt that is not text, for people: a small file of its own. Equal ones have equal names."""

    name: str
    data: bytes = field(repr=False)


@dataclass(slots=True)
class Prompt:
    """One task for the policy.

    ``columns`` holds every other column of the data row: rewards may want them. ``media`` holds this prompt's inputs
    only (each ``Ragged`` has one sample), ``attachments`` what people see and hear of them. ``reference`` is a reference answer or
    solution, ``label`` what a reward compares with.
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

    def as_json(self) -> dict[str, Any]:
        """For files that people read: attachments by name, no media."""
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "media"}
        return {**kept, "attachments": [a.name for a in self.attachments]}


@dataclass(slots=True)
class Rollout:
    """One trajectory as plain lists, so that it pickles, prints and saves as JSON. Token in, token out.

    ``sampled[t]`` says whether the policy sampled token t (tool and environment tokens are not). ``logprobs[t]`` is the
    log-probability under the distribution that token t was drawn from, ``versions[t]`` the policy version that drew it.
    ``baseline`` is the reward of the greedy answer to the same prompt, where one was drawn.
    ``weights`` has the weight of each of ``terms`` that is part of ``reward``; other terms are only told.
    ``failed`` holds the reason when scoring failed, and is empty otherwise.
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
    reward: float | None = None
    baseline: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Request:
    """Sample number ``sample`` of ``prompt``; equal seeds give equal answers whatever else is in the batch.

    ``max_new_tokens`` bounds this answer alone; without it the sampling settings do. A ``greedy`` one takes the likeliest token
    at each place, as all do at temperature 0. An answer goes on from what was ``begun`` of it, and once it has ``pause`` tokens it
    comes back as it is, with finish reason ``abort``, to go on some other time.
    """

    prompt: Prompt
    seed: int
    sample: int = 0
    max_new_tokens: int | None = None
    greedy: bool = False
    begun: Rollout | None = None
    pause: int | None = None

    @property
    def held(self) -> int:
        """Tokens of the answer that are there already."""
        return len(self.begun) if self.begun is not None else 0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The ``numbers`` of one integer tensor, ``of_tensor``, for code on the host that would wait for a device to read it."""

    of_tensor: Tensor
    numbers: list[int]

    @staticmethod
    def of(tensor: Tensor, known: HostCopy | None) -> HostCopy:
        """Return ``known`` if it is of this very ``tensor``, else read the tensor."""
        return known if known is not None and known.of_tensor is tensor else HostCopy(tensor, tensor.tolist())

    @staticmethod
    def moved(tensor: Tensor, known: HostCopy | None, to: Tensor) -> HostCopy | None:
        """Return the copy for ``to``, the same numbers on another device: ``None`` where nothing is known without waiting."""
        if tensor.device.type != "cpu" and (known is None or known.of_tensor is not tensor):
            return None
        return HostCopy(to, HostCopy.of(tensor, known).numbers)


@dataclass(slots=True)
class Segments:
    """Flat token runs: ``tokens [N]``, ``lengths [S]``, and the media of each run."""

    tokens: Tensor
    lengths: Tensor
    media: Media = field(default_factory=dict)
    _sizes: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.lengths.numel())

    @property
    def sizes(self) -> list[int]:
        """``lengths`` on the host. Reading them does not wait for a device that ``to`` moved the runs to."""
        self._sizes = HostCopy.of(self.lengths, self._sizes)
        return self._sizes.numbers

    @staticmethod
    def of(rows: Sequence[Sequence[int]], media: Media | None = None) -> Segments:
        flat = [t for row in rows for t in row]
        return Segments(torch.tensor(flat, dtype=torch.long), torch.tensor([len(r) for r in rows], dtype=torch.long), media or {})

    @staticmethod
    def of_prompts(prompts: Sequence[Prompt]) -> Segments:
        """A run for each of ``prompts``, with its media."""
        return Segments.cat([Segments.of([p.token_ids], p.media) for p in prompts])

    def select(self, index: Tensor) -> Segments:
        """The runs named by ``index [K]``, in its order."""
        return Segments(
            self.tokens[rows_of(self.lengths, index)], self.lengths[index], {k: r.select(index) for k, r in self.media.items()}
        )

    def to(self, device: torch.device | str) -> Segments:
        lengths = to_device(self.lengths, device)
        known = HostCopy.moved(self.lengths, self._sizes, lengths)
        return Segments(to_device(self.tokens, device), lengths, {k: r.to(device) for k, r in self.media.items()}, known)

    @staticmethod
    def cat(parts: Sequence[Segments]) -> Segments:
        return Segments(torch.cat([p.tokens for p in parts]), torch.cat([p.lengths for p in parts]), cat_media(parts))


def cat_media(parts: Sequence[Segments]) -> Media:
    """Media of ``parts`` joined; a part without some input contributes rows of length 0."""
    joined: Media = {}
    for name in dict.fromkeys(k for p in parts for k in p.media):
        some = next(p.media[name] for p in parts if name in p.media)
        rows = [p.media.get(name) or Ragged(some.values[:0], torch.zeros_like(p.lengths)) for p in parts]
        joined[name] = Ragged.cat(rows)
    return joined


def token_column() -> Any:
    """A column of ``Batch`` with one entry per response token."""
    return field(default=None, metadata={"axis": "token"})


def sample_column() -> Any:
    """A column of ``Batch`` with one entry per response."""
    return field(default=None, metadata={"axis": "sample"})


@dataclass(slots=True)
class Batch:
    """P prompts, B responses, N response tokens. Groups are ``prompt_of``: by identity, never by position.

    A column declares its axis once, below; ``select``, ``cat`` and ``to`` follow it.
    """

    prompts: Segments
    responses: Segments
    prompt_of: Tensor
    sampled: Tensor | None = token_column()  # [N] bool: the policy drew this token, so it may carry gradient
    behavior_logprobs: Tensor | None = token_column()  # [N] under the distribution that was sampled from
    old_logprobs: Tensor | None = token_column()  # [N] policy before the update
    ref_logprobs: Tensor | None = token_column()  # [N]
    teacher_logprobs: Tensor | None = token_column()  # [N]
    process_rewards: Tensor | None = token_column()  # [N] of a process reward model
    logprobs: Tensor | None = token_column()  # [N] policy at the start of an optimizer step, without gradient
    entropy: Tensor | None = token_column()  # [N] of the policy before the update
    versions: Tensor | None = token_column()  # [N] the policy version that drew the token
    values: Tensor | None = token_column()  # [N] V(state before the token)
    advantages: Tensor | None = token_column()  # [N]
    returns: Tensor | None = token_column()  # [N]
    loss_weights: Tensor | None = token_column()  # [N] share of each token's loss in the loss of the global batch
    positive_weights: Tensor | None = token_column()  # [N] share of each token's log-likelihood in that of the positive answers
    gate: Tensor | None = token_column()  # [N] factor of the policy loss; 0 leaves a token out
    correction: Tensor | None = token_column()  # [N] factor of the policy loss where it depends on the whole mini-batch
    energy: Tensor | None = token_column()  # [N] squared norm of the gradient of the policy's log-prob in its logits
    steps: Tensor | None = token_column()  # [N] long: which step of its response the token belongs to
    states: Tensor | None = (
        token_column()
    )  # [N] long: name of the state in which that step was taken; equal states have equal names
    pull: Tensor | None = token_column()  # [N] coefficient of |log-prob - old log-prob|
    sample: Tensor | None = sample_column()  # [B] which of the answers to its prompt it is
    rewards: Tensor | None = sample_column()  # [B] scalar outcome reward
    outcomes: Tensor | None = sample_column()  # [B] the same as it was scored, before normalisation and shaping
    terms: Tensor | None = sample_column()  # [B, K] the numbers that make up the reward; nan where a row has no such term
    term_weights: Tensor | None = sample_column()  # [B, K] of each term in the row's reward; 0 where it has none
    baselines: Tensor | None = sample_column()  # [B] reward of the greedy answer to the same prompt
    final_values: Tensor | None = sample_column()  # [B] V(state after the last token)
    version: Tensor | None = sample_column()  # [B] oldest policy version among the tokens
    truncated: Tensor | None = sample_column()  # [B] bool: cut by the length limit
    _groups: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.prompt_of.numel())

    @property
    def lengths(self) -> Tensor:
        """Response lengths ``[B]``."""
        return self.responses.lengths

    @property
    def tokens(self) -> int:
        """N, the number of response tokens."""
        return int(self.responses.tokens.numel())

    @property
    def mask(self) -> Tensor:
        """``[N]`` bool: tokens that may carry gradient."""
        if self.sampled is None:
            return torch.ones_like(self.responses.tokens, dtype=torch.bool)
        return self.sampled

    @property
    def row_of(self) -> Tensor:
        """``[N]`` the response that each token belongs to."""
        rows = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.tokens)

    @property
    def groups(self) -> list[int]:
        """``prompt_of`` on the host. Reading it does not wait for a device that ``to`` moved the batch to."""
        self._groups = HostCopy.of(self.prompt_of, self._groups)
        return self._groups.numbers

    def columns(self, axis: str) -> dict[str, Tensor]:
        """The columns of one axis (``"token"`` or ``"sample"``) that are filled in."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("axis") == axis}
        return {name: column for name, column in named.items() if column is not None}

    def replace(self, **columns: Tensor | None) -> Batch:
        """A copy with other columns; the tensors are shared."""
        return dataclasses.replace(self, **columns)

    def select(self, index: Tensor) -> Batch:
        """The responses named by ``index [K]``, in its order, with the prompts that they use."""
        kept, prompt_of = torch.unique(self.prompt_of[index], return_inverse=True)
        rows = rows_of(self.lengths, index)
        return Batch(
            self.prompts.select(kept),
            self.responses.select(index),
            prompt_of,
            **{k: v[rows] for k, v in self.columns("token").items()},
            **{k: v[index] for k, v in self.columns("sample").items()},
        )

    def split(self, parts: Iterable[Tensor]) -> list[Batch]:
        """One batch per index tensor of ``parts``."""
        return [self.select(index) for index in parts]

    def to(self, device: torch.device | str) -> Batch:
        moved = {k: to_device(v, device) for axis in ("token", "sample") for k, v in self.columns(axis).items()}
        prompt_of = to_device(self.prompt_of, device)
        known = HostCopy.moved(self.prompt_of, self._groups, prompt_of)
        return Batch(self.prompts.to(device), self.responses.to(device), prompt_of, **moved, _groups=known)

    @staticmethod
    def cat(parts: Sequence[Batch]) -> Batch:
        """Batches joined. Equal prompts of different parts stay apart: groups are by identity.

        Raises ``ValueError`` when the parts do not have the same columns.
        """
        names = {axis: [set(p.columns(axis)) for p in parts] for axis in ("token", "sample")}
        for axis, sets in names.items():
            if any(s != sets[0] for s in sets):
                raise ValueError(f"batches with different {axis} columns cannot be joined: {sets}")
        offsets, seen = [], 0
        for part in parts:
            offsets.append(part.prompt_of + seen)
            seen += len(part.prompts)
        columns = [k for sets in names.values() for k in sorted(sets[0])]
        return Batch(
            Segments.cat([p.prompts for p in parts]),
            Segments.cat([p.responses for p in parts]),
            torch.cat(offsets),
            **{k: torch.cat([getattr(p, k) for p in parts]) for k in columns},
        )


def rows_of(lengths: Tensor, index: Tensor) -> Tensor:
    """Positions, in a flat array of runs of ``lengths [B]``, of the runs named by ``index [K]``, run after run."""
    starts = torch.cumsum(lengths, 0) - lengths
    kept = lengths[index]
    ends = torch.cumsum(kept, 0)
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(starts[index] - (ends - kept), kept, output_size=total)
    return torch.arange(total, device=lengths.device) + shift
