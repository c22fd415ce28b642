"""A process reward model: a language model that scores each step of a response.

A step is scored at the last token of the separator after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, StepHeadKind
from lightrft.models.actor import Backbone
from lightrft.models.families import head_transform
from lightrft.models.loading.save_model import Saved, save_model
from lightrft.models.loading.sharded_read import build_model
from lightrft.models.logprobs import transform_logits, wide
from lightrft.models.reward.heads import WideLinear, draw_value_weights, state_width
from lightrft.models.reward.process_form import (
    ProcessForm,
    Separator,
    read_process_form,
    write_process_form,
)
from lightrft.types import Batch
from lightrft.utils.errors import ModelError
from lightrft.utils.seeding import derive_seed, seeded_weights


class StepScores(NamedTuple):
    """Scores of the steps of a batch, response by response, in order.

    It is a tuple, because sharding wrappers search tuples for tensors.

    Attributes:
        scores: ``[S]``. Probability that the step is right, or the score of a regression.
        places: ``[S]`` long. Index in the ``N`` response tokens of the token that ends the step.
        steps: ``[B]`` long. Number of steps of each response.
        logits: ``[S]``. Log-odds of ``scores``. It is the score of a regression.
    """

    scores: Tensor
    places: Tensor
    steps: Tensor
    logits: Tensor


class StepHead(nn.Module):
    """The layers that map states ``[S, H]`` to logits ``[S]``, in float32 at least.

    Args:
        kind: Form of the head.
        width: Width H of the states.
        seed: Seed of the initial weights.
    """

    def __init__(self, kind: StepHeadKind, width: int, seed: int) -> None:
        super().__init__()
        count = 2 if kind in ("classes", "mlp") else 1
        with seeded_weights(derive_seed(seed, "steps")):
            last = WideLinear(width, count)
            inner = WideLinear(width, width) if kind == "mlp" else None
        draw_value_weights(last.weight, derive_seed(seed, "steps"))
        nn.init.zeros_(last.bias)
        self.layers = last if inner is None else nn.Sequential(inner, nn.ReLU(), last)

    def forward(self, states: Tensor) -> Tensor:
        outputs = self.layers(states)
        # the softmax of two classes is the sigmoid of the difference of their logits
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs[:, 0]


class ProcessRewardModel(Backbone):
    """A language model that scores each step of a response.

    Scores are the same in every layout, and do not depend on the rest of the batch.

    Args:
        model: The transformers or peft model.
        config: Layout, attention and memory settings. ``None`` uses the settings of an empty
            ``ModelConfig``.
        settings: Kind of the head.
        separator: Text after each step and its tokens. ``None`` if only batches with
            ``step_ends`` are scored.
        verdicts: Ids of the tokens of a right and of a wrong step, for ``head: tokens``.
        seed: Seed of the initial weights of the head.

    Raises:
        ModelError: ``head: tokens`` without ids of the two tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig | None,
        settings: ProcessModelConfig,
        *,
        separator: Separator | None = None,
        verdicts: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, config)
        self.settings = settings
        self.separator = separator
        self.verdicts = verdicts
        self.step_head: StepHead | None = None
        if settings.head == "tokens":
            if verdicts is None:
                raise ModelError("process_model.head = 'tokens' needs the ids of right and wrong")
            return
        self.step_head = StepHead(settings.head, state_width(self.base), seed)
        # last, so that the head starts from the same numbers as in float32
        if self.base.dtype == torch.float64:
            self.step_head.double()
        if self.device.type != "meta":
            self.step_head.to(self.device)
        self.freeze_output_head()

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        settings: ProcessModelConfig | None = None,
        *,
        separator: Separator | None = None,
        verdicts: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> ProcessRewardModel:
        """Load the model of ``config.path`` in evaluation mode, with the head of its folder.

        Heads of other frameworks are read too, see ``read_process_form``.

        Args:
            config: Path and settings of the model.
            settings: Kind of the head. ``None`` uses the head of the folder.
            separator: Text after each step and its tokens. ``None`` uses those of the folder.
            verdicts: Ids of the tokens of a right and of a wrong step. ``None`` uses those of the
                folder.
            device: Device of the weights. On the meta device they have no memory until
                ``read_weights``.
            dtype: Dtype of the weights. ``None`` uses ``config.dtype``.
            seed: Seed of the initial weights of a new head.

        Raises:
            ModelError: As ``load_model``; or the folder holds a head of another kind, or none and
                there are no settings.
        """
        form = read_process_form(config)
        if form is None and settings is None:
            raise ModelError(
                f"model.path = {config.path!r}: the folder holds no process reward model "
                "(process_reward_model.json, or a head of another framework); train one by "
                "lightrft prm"
            )
        if form is not None and settings is not None and form.settings.head != settings.head:
            raise ModelError(
                f"process_model.head = {settings.head!r}, and model.path = {config.path!r} holds a "
                f"head of kind {form.settings.head!r}; set the same, or start from a language model"
            )
        if form is not None:
            settings = settings or form.settings
            separator, verdicts = separator or form.separator, verdicts or form.verdicts
        assert settings is not None
        needs_logits = settings.head == "tokens"
        # files of reward models often lack the output head
        model, unread = build_model(config, device, dtype, output_head=needs_logits)
        reward = cls(model, config, settings, separator=separator, verdicts=verdicts, seed=seed)
        if form is not None:
            reward.load_head(form.tensors)
        reward.unread = unread
        if config.gradient_checkpointing:
            reward.gradient_checkpointing_enable()
        return reward.eval()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        separator: Separator | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> ProcessRewardModel:
        """Load a saved process reward model in evaluation mode. Raises ``ModelError`` as ``load``.

        Args:
            path: Folder that ``save`` wrote, or a published model with a head.
            separator: Text after each step and its tokens. ``None`` uses those of the folder.
            device: Device of the weights.
            dtype: Dtype of the weights. ``None`` keeps that of the files.
        """
        config = ModelConfig(path=str(path))
        return cls.load(config, separator=separator, device=device, dtype=dtype)

    def save(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        path: str | Path,
        processor: Saved | None = None,
        *,
        merge: bool = True,
    ) -> None:
        """Write a folder that ``load`` and ``open`` read back.

        Args:
            tokenizer: Written too, unless ``None``.
            path: The folder.
            processor: Written too, unless ``None``.
            merge: Add adapters into the written weights. If ``False``, write only the adapters.
        """
        save_model(self, tokenizer, path, processor=processor, merge=merge)
        form = ProcessForm(self.settings, self.separator, self.verdicts, self.own_tensors())
        write_process_form(form, path)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the weights of the head, by name."""
        return {} if self.step_head is None else dict(self.step_head.state_dict())

    def load_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the weights of the head by name. A missing bias is 0.

        Raises ``ModelError`` for a missing, unknown or misshapen tensor.
        """
        own = self.own_tensors()
        wrong = tensors.keys() - own.keys()
        wrong |= {n for n in own.keys() - tensors.keys() if not n.endswith("bias")}
        wrong |= {n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape}
        if wrong:
            raise ModelError(
                f"model.path = {self.config.path!r}: {len(wrong)} tensors of its head are "
                f"missing, unknown or misshapen, e.g. {sorted(wrong)[0]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                given = tensors.get(name)
                tensor.zero_() if given is None else tensor.copy_(given)

    def score_steps(self, batch: Batch) -> StepScores:
        """Return the scores of the steps of ``batch``.

        A step ends where ``batch.step_ends`` says so. Without this column, it ends where the
        response has the tokens of the separator. Tokens after the last separator are no step.

        Raises ``ModelError`` if neither the column nor the separator is known.
        """
        # through the module's call, whose hooks gather shards and cast inputs
        return self(batch)

    def forward(self, batch: Batch) -> StepScores:
        """Return ``score_steps``.

        It is ``forward``, so that wrappers that act on a module's call see it.
        """
        batch = batch.to(self.device)
        places = self.step_places(batch)
        states, packed = self.compute(batch, final=True)
        assert packed.final is not None
        row = batch.row_of
        ends = batch.lengths.cumsum(0)
        is_last = places + 1 == ends[row[places]]
        # the state at a token is the state that predicts the next one
        following = (places + 1).clamp(max=max(batch.tokens - 1, 0))
        at = torch.where(is_last, packed.final[row[places]], packed.gather[following])
        read = self.read_at(states, packed, at)
        # clone: hooks that wrap the output (FSDP) must not get a view
        logits = read.part.whole(self.logits_of(read.states)).clone()
        scores = logits if self.settings.head == "regression" else logits.sigmoid()
        steps = torch.bincount(row[places], minlength=len(batch))
        return StepScores(scores, places, steps, logits)

    def logits_of(self, states: Tensor) -> Tensor:
        """Return the logits ``[S]`` of steps from the states ``[S, H]`` at their ends."""
        if self.step_head is not None:
            return self.step_head(states)
        softcap, scale = head_transform(self.base.config, self.family)
        # only separators are read, so the logits of the whole vocabulary are few rows
        outputs = self.base.get_output_embeddings()(states)
        assert self.verdicts is not None
        own = outputs[:, list(self.verdicts)].to(wide(outputs.dtype))
        right, wrong = transform_logits(own, scale, softcap).unbind(1)
        return right - wrong

    def step_places(self, batch: Batch) -> Tensor:
        """Return the index ``[S]`` in the response tokens of the token that ends each step.

        Raises ``ModelError`` if neither ``batch.step_ends`` nor the separator is known.
        """
        if batch.step_ends is not None:
            return batch.step_ends.nonzero()[:, 0]
        if self.separator is None:
            raise ModelError(
                f"model.path = {self.config.path!r}: the folder does not name the separator of "
                "steps; give it, such as <extra_0> for Qwen2.5-Math-PRM"
            )
        return separator_places(batch, self.separator.ids)


def separator_places(batch: Batch, ids: Sequence[int]) -> Tensor:
    """Return the index ``[S]`` in the response tokens of each last token of a separator.

    Args:
        batch: Prompts and responses.
        ids: The tokens of the separator.
    """
    tokens, row = batch.responses.tokens, batch.row_of
    found = torch.ones_like(tokens, dtype=torch.bool)
    for back, token in enumerate(reversed(ids)):
        at = torch.arange(len(tokens), device=tokens.device) - back
        # a separator does not cross responses
        known = at >= 0
        at = at.clamp(min=0)
        found &= known & (tokens[at] == token) & (row[at] == row)
    return found.nonzero()[:, 0]
