"""The policy: any transformers causal language model, scored for the log-probs of responses."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightrft.config.model import Layout, ModelConfig
from lightrft.distributed.collectives import EqualCalls
from lightrft.distributed.process_group import ModelParallelGroup, has_other_processes
from lightrft.distributed.shards import ShardLayout, local_shard_of
from lightrft.models.attention import interface
from lightrft.models.attention.embedding_noise import noisy_embeddings
from lightrft.models.attention.layout_check import LAYOUTS
from lightrft.models.attention.layouts import Packed, pack
from lightrft.models.attention.training_flops import TrainingFlops
from lightrft.models.attention.ulysses import Exchanged, Row, SequencePart, check_heads
from lightrft.models.divergence.token_divergence import AnyTarget, Target, divergence_of
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.families import decoder_of, family_of, head_transform, unknown_scale
from lightrft.models.loading.sharded_read import DeferredWeights, build_model
from lightrft.models.logprobs import (
    head_input,
    logit_energy,
    token_logprobs,
    transform_logits,
    wide,
)
from lightrft.models.lora import adapter_dropout, base_model, check_frozen, is_adapted, merged_state
from lightrft.models.multimodal.merge_inputs import (
    MergedInputs,
    merge_multimodal_inputs,
    own_inputs,
)
from lightrft.models.multimodal.own_forward import states_by_own_forward
from lightrft.models.multimodal.submodules import LANGUAGE, part_of, parts_of
from lightrft.models.multimodal.towers import KeptFeatures
from lightrft.models.reward.saved_form import holds_heads
from lightrft.models.router_loss import RouterLoss, counts_of_tokens, report_unread
from lightrft.models.sampled_distribution import (
    Distribution,
    SampledDistribution,
    TokenFilters,
    temperature_of,
)
from lightrft.models.training_mode import attention_dropout, check_layer_drop, set_training
from lightrft.types import Batch
from lightrft.utils.errors import ModelError

interface.register()

log = logging.getLogger(__name__)


class TokenScores(NamedTuple):
    """Scores of each response token, ``[N]`` each.

    It is a tuple, because sharding wrappers search tuples for tensors.

    Attributes:
        logprobs: Log-prob under the softmax at the given temperature.
        entropy: Entropy of that softmax, in nats.
        divergence: Divergence between the next-token distributions of this model and a teacher.
        energy: Squared norm of the log-prob's gradient in the logits.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    energy: Tensor | None = None


class HiddenStates(NamedTuple):
    """Final states ``[n, H]`` of this rank.

    ``part`` says which of all requested states they are, since a sequence-parallel group shards
    them.
    """

    states: Tensor
    part: SequencePart


class Backbone(nn.Module):
    """A causal language model that turns a ``Batch`` into hidden states, in any of three layouts.

    Args:
        model: The transformers or peft model.
        config: Layout, attention and memory settings. ``None`` uses the settings of an empty
            ``ModelConfig``.
    """

    counts_tokens: bool = False
    """Count the positions of media as those of text, whatever the family has."""
    kept_features: KeptFeatures | None = None
    """Outputs of the towers in this step, shared with equal towers. ``None`` keeps none."""
    experts: ExpertReplay | None = None
    """Replays the experts that the sampler chose. ``None`` leaves the choice to the routers."""
    router_loss: RouterLoss | None = None
    """The load-balancing loss of experts in training. ``None`` for none."""
    flops: TrainingFlops | None = None
    """Counts the FLOPs of training. ``None`` counts nothing."""

    def __init__(self, model: nn.Module, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config or ModelConfig()
        self.model = model
        self.family = family_of(self.base.config)
        loaded = self.text_config._attn_implementation
        self._own_attention = None if loaded == interface.NAME else loaded
        # the more general of the two: the family names the fastest layout that is exact for it
        self._layout: Layout = max(self.config.layout, self.family.layout, key=LAYOUTS.index)
        self._run_towers: bool | None = None
        self._model_parallel_group = ModelParallelGroup(0, 1)
        self._has_reported = False
        self.equal_calls = EqualCalls()
        self.unread: DeferredWeights | None = None
        self.longest_row: int | None = None
        """Most tokens of a row that the run allows, if known. ``check_layout`` tries no more."""
        # New adapters and heads are in training mode, whatever the mode of the model is.
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode, in which ``model.dropout`` decides about the random parts of a forward."""
        super().train(mode)
        if not mode:
            return self
        set_training(self.model, noise=self.config.dropout, adapter_noise=self._drops_adapters)
        self.fit_layout()
        if not self._has_reported and self.router_loss is None:
            report_unread(self.base.config)
        self._has_reported = True
        return self

    def fit_layout(self) -> None:
        """Take padded rows if the model drops attention weights in training.

        ``load`` calls it too, so that a resumed run computes every step in one layout.
        """
        rate = attention_dropout(self.text_config) if self.config.dropout else None
        if rate is not None and self._layout != "padded":
            log.warning(
                "model.layout: padded, since only padded rows can drop attention weights (%s of the "
                "model's config); model.dropout=false trains in %s",
                rate,
                self._layout,
            )
            self._layout = "padded"

    @property
    def is_random(self) -> bool:
        """Return ``True`` in a training mode with random parts, such as dropout."""
        return self.training and self._drops_adapters

    @property
    def _drops_adapters(self) -> bool:
        return self.config.dropout or adapter_dropout(self.model) > 0

    def read_weights(self, held: ShardLayout = local_shard_of) -> None:
        """Fill weights that were created on the meta device and have memory by now.

        ``held`` selects the part of each weight that this rank stores. Raises ``ModelError`` on
        every rank alike.
        """
        if self.unread is not None:
            self.unread.read(self.model, held)
            self.unread = None

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, with adapters in place."""
        return base_model(self.model)

    @property
    def decoder(self) -> nn.Module:
        return decoder_of(self.base, self.family)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def layout(self) -> Layout:
        """``prefix_shared``, ``packed`` or ``padded``. All three give the same numbers."""
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        if layout not in LAYOUTS:
            raise ModelError(f"model.layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")
        self._layout = layout

    @property
    def model_parallel_group(self) -> ModelParallelGroup:
        """The sequence-parallel group, which shards the tokens of each call.

        Its ranks must call the model on the same batch.
        """
        return self._model_parallel_group

    @model_parallel_group.setter
    def model_parallel_group(self, ranks: ModelParallelGroup) -> None:
        if ranks.size > 1:
            if self._layout == "padded":
                raise _rows_of_their_own(ranks)
            check_heads(self.text_config, ranks)
        self._model_parallel_group = ranks

    def freeze_output_head(self) -> None:
        """Freeze an output head whose logits are not used. An optimizer needs no state for it."""
        output = self.base.get_output_embeddings()
        if output is not None and output.weight is not self.base.get_input_embeddings().weight:
            output.requires_grad_(False)

    def hidden(self, batch: Batch, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the states ``[N, H]`` that predict the response tokens.

        With ``final``, also return the states after each last token, ``[B, H]``. In a
        sequence-parallel group, return this rank's states.
        """
        found, after = self.read(batch, final)
        return found.states, None if after is None else after.states

    def read(self, batch: Batch, final: bool = False) -> tuple[HiddenStates, HiddenStates | None]:
        """Return the states of ``hidden``, and which of all requested states they are."""
        states, packed = self.compute(batch, final)
        after = None if packed.final is None else self.read_at(states, packed, packed.final)
        return self.read_at(states, packed, packed.gather), after

    def compute(
        self, batch: Batch, final: bool = False, whole: bool = False
    ) -> tuple[Tensor, Packed]:
        """Return the states ``[S * T, H]`` of one model call, and the call.

        In a sequence-parallel group, return this rank's states.

        Args:
            batch: Prompts and responses.
            final: Also compute each response's last token.
            whole: Compute the last layer's state of every prompt token. Otherwise some states of a
                prompt before its last token are 0 or wrong.
        """
        batch = batch.to(self.device)
        if self.family.own_forward is not None:
            return states_by_own_forward(self, batch, final)
        seen = merge_multimodal_inputs(
            self.base,
            self.family,
            batch.prompts,
            batch.responses,
            batch.prompt_of,
            every_tower=self.run_towers,
            kept=self.kept_features,
            equal=self.equal_calls,
        )
        axes = None if seen is None or self.counts_tokens else seen.positions
        routed = self.router_loss is not None and self.router_loss.reads_calls
        # routers count every token of a row, as the model's own forward does
        packed = pack(batch, self._layout, final=final or routed, axes=axes)
        if routed:
            packed.counts = counts_of_tokens(batch, packed.source)
            packed.final = packed.final if final else None
        if (whole or routed) and packed.plan is not None:
            packed.plan.heads = ()
        if self.flops is not None and torch.is_grad_enabled():
            self.flops.add(packed)
        return self.states(packed, seen).flatten(0, 1), packed

    def read_at(self, states: Tensor, packed: Packed, places: Tensor) -> HiddenStates:
        """Return the states at ``places`` of the call ``packed``.

        Args:
            states: ``[n, H]`` states of ``compute``.
            packed: The call of ``compute``.
            places: ``[N]`` indices in the tokens of the call.
        """
        if self._model_parallel_group.size == 1:
            return HiddenStates(
                states.index_select(0, places),
                SequencePart(self._model_parallel_group, len(places)),
            )
        part, own = Row(self._model_parallel_group, packed.input_ids.numel()).reads(places)
        return HiddenStates(states.index_select(0, own), part)

    def states(self, packed: Packed, seen: MergedInputs | None = None) -> Tensor:
        """Return the last hidden states ``[S, T, H]`` of one model call.

        In a sequence-parallel group, ``T`` counts this rank's tokens.
        """
        self.use_attention("padded" if packed.plan is None else "flat")
        if self._model_parallel_group.size > 1:
            inputs, source = self._own_tokens(packed)
        else:
            inputs, source = packed.inputs, packed.source
        if self.experts is not None:
            self.experts.replay(packed.experts_of(source))
        with noisy_embeddings(self.base, packed.noise, source):
            if seen is not None:
                inputs |= seen.inputs(self.base, inputs.pop("input_ids"), source)
            if packed.plan is not None:
                # no loss reads a prompt's last states but one, so the last layer skips the others
                packed.plan.last_layer = self.text_config.num_hidden_layers - 1
                packed.plan.spans = None if seen is None else seen.spans(packed.source)
            elif seen is not None:
                embeddings = inputs["inputs_embeds"]
                inputs |= seen.masks(self.text_config, embeddings, packed.source, packed.mask)
            if packed.counts is None or self.router_loss is None:
                return self.decoder(**inputs, use_cache=False).last_hidden_state
            output = self.decoder(**inputs, use_cache=False, output_router_logits=True)
            self.router_loss.read(output.router_logits, packed.counts, self._model_parallel_group)
            return output.last_hidden_state

    def _own_tokens(self, packed: Packed) -> tuple[dict[str, Any], Tensor]:
        """Return ``packed.inputs`` and ``packed.source`` of this rank's tokens."""
        plan = packed.plan
        if plan is None:
            raise _rows_of_their_own(self._model_parallel_group)
        row = Row(self._model_parallel_group, packed.input_ids.numel())
        ids, positions = row.own(packed.input_ids), row.own(packed.position_ids)
        own = {"input_ids": ids, "position_ids": positions, "attention_plan": Exchanged(plan, row)}
        return own, row.own(packed.source, -1)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the language model. In a multimodal model it is a part of the config."""
        return self.base.config.get_text_config(decoder=True)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that can be trained or frozen separately."""
        return parts_of(self.family)

    def part_of(self, name: str) -> str:
        """Return the entry of ``parts`` that the parameter ``name`` belongs to."""
        return part_of(self.family, name.removeprefix("model."))

    def check_trained(self, names: Iterable[str]) -> None:
        """Raise ``ModelError`` if ``names`` change weights that ``model.freeze`` selects."""
        check_frozen(self.family, self.config, (n.removeprefix("model.") for n in names))

    @property
    def run_towers(self) -> bool:
        """``True`` if towers also run for batches without media.

        Unless set, this is ``True`` where several processes train towers: each process waits for
        the gradient of every parameter from all others.
        """
        if self._run_towers is not None:
            return self._run_towers
        if not has_other_processes() or not torch.is_grad_enabled():
            return False
        # ranks must agree on the gradients that they reduce, whichever of them has media
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        own = self.family.own_forward is not None
        return any(own or self.part_of(name) != LANGUAGE for name in trained)

    @run_towers.setter
    def run_towers(self, always: bool | None) -> None:
        self._run_towers = always
        # Each process chooses its own layers, and a call of a sharded layer waits for all processes.
        if always and self.config.dropout and has_other_processes():
            check_layer_drop(self.model)

    def use_attention(self, kind: str) -> None:
        """Select attention by plan (``flat``) or transformers' own (``padded``).

        It applies to the text layers; towers keep theirs.
        """
        if kind == "flat":
            self.text_config._attn_implementation = interface.NAME
        else:
            self.text_config._attn_implementation = self.padded_attention

    @property
    def padded_attention(self) -> str | None:
        """The transformers implementation of attention in the ``padded`` layout."""
        return self.config.attention or self.family.padded_attention or self._own_attention

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, object] | None = None
    ) -> None:
        """Recompute layers in the backward pass.

        transformers does so only while the model is in training mode.
        """
        options = gradient_checkpointing_kwargs
        if options is None:
            # the reentrant kind gives no gradients if the embeddings are frozen, as under LoRA
            options = {"use_reentrant": False}
        # Newer transformers renamed the method.
        if hasattr(self.base, "activation_checkpointing_enable"):
            self.base.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        # The layers that recompute have flags of their own.
        self.train(self.training)

    def gradient_checkpointing_disable(self) -> None:
        if hasattr(self.base, "activation_checkpointing_disable"):
            self.base.activation_checkpointing_disable()
        else:
            self.base.gradient_checkpointing_disable()


class Actor(Backbone):
    """The policy. With adapters off, it is its own reference."""

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Actor:
        """Load the model of ``config.path``.

        Adapters, frozen parts and gradient checkpointing are set up by ``config``.

        Args:
            config: Path and settings of the model.
            device: Device of the weights. On the meta device they have no memory; allocate it, then
                call ``read_weights``.
            dtype: Dtype of the weights. ``None`` uses ``config.dtype``.

        Raises:
            ModelError: The folder cannot be used as ``config`` asks.
        """
        if holds_heads(config.path):
            raise ModelError(
                f"model.path = {config.path!r} is a reward model: its heads score responses, and "
                "nothing has trained it to generate them; take a language model, or name this "
                "folder in reward.models"
            )
        model, unread = build_model(config, device, dtype)
        actor = cls(model, config)
        actor.unread = unread
        # weights without values compute nothing to compare
        if unread is None and actor.device.type != "meta":
            actor.check_head()
        actor.fit_layout()
        if config.gradient_checkpointing:
            actor.gradient_checkpointing_enable()
        return actor

    def score(
        self,
        batch: Batch,
        *,
        temperature: Distribution = 1.0,
        entropy: bool = False,
        target: AnyTarget | None = None,
        energy: bool = False,
    ) -> TokenScores:
        """Return log-probs of every response token, and the scores that are asked for.

        All but ``energy`` are differentiable outside ``torch.no_grad()``.

        Args:
            batch: Prompts and responses.
            temperature: Divisor of the logits, or the filtered distribution of sampling.
            entropy: Also return the entropy of the softmax.
            target: Also return the divergence from this teacher. ``None`` leaves it out.
            energy: Also return the gradient norm, see ``logit_energy``.
        """
        # through the module's call, whose hooks gather shards and cast inputs
        return self(batch, temperature=temperature, entropy=entropy, target=target, energy=energy)

    def forward(
        self,
        batch: Batch,
        *,
        temperature: Distribution = 1.0,
        entropy: bool = False,
        target: AnyTarget | None = None,
        energy: bool = False,
        states_alone: bool = False,
    ) -> TokenScores | Tensor:
        """Return ``score``, or with ``states_alone`` the hidden states ``[N, H]`` that it reads.

        It is ``forward``, so that wrappers that act on a module's call (sharding, mixed precision)
        see it.

        Args:
            batch: Prompts and responses.
            temperature: Divisor of the logits, or the filtered distribution of sampling.
            entropy: Also return the entropy of the softmax.
            target: Also return the divergence from this teacher. ``None`` leaves it out.
            energy: Also return the gradient norm, see ``logit_energy``.
            states_alone: Return the hidden states instead of scores.
        """
        batch = batch.to(self.device)
        (states, part), _ = self.read(batch)
        if states_alone:
            return part.whole(states)
        targets = part.of(batch.responses.tokens)
        filters = None
        if isinstance(temperature, SampledDistribution):
            filters = temperature.at_tokens(batch, part)
        divisor = temperature_of(temperature)
        scores = self.score_states(
            states, targets, temperature=divisor, entropy=entropy, filters=filters
        )
        softcap, scale = head_transform(self.base.config, self.family)
        limit = self.config.logits_limit(states.device.type)
        options = {"softcap": softcap, "scale": scale, "chunk_mb": limit}
        if energy:
            head = self.base.get_output_embeddings()
            found = logit_energy(
                states, head, targets, temperature=divisor, filters=filters, **options
            )
            scores = scores._replace(energy=found)
        if target is not None:
            head = self.base.get_output_embeddings()
            divergence = divergence_of(states, head, target, batch, part.of, **options)
            scores = scores._replace(divergence=divergence)
        logprobs, *others = (None if own is None else part.whole(own) for own in scores)
        assert logprobs is not None
        return TokenScores(logprobs, *others)

    @torch.no_grad()
    def target(
        self,
        batch: Batch,
        kind: str,
        *,
        temperature: float = 1.0,
        beta: float = 0.5,
        head: nn.Module | None = None,
    ) -> Target:
        """Return this model's distributions at the response tokens, for a student to match.

        Args:
            batch: Prompts and responses.
            kind: Name of the divergence.
            temperature: Divisor of the logits of both models.
            beta: Weight of the teacher in the mixture of ``jsd``.
            head: A full copy of the head, for a model whose head is sharded between calls. ``None``
                uses the model's head.
        """
        softcap, scale = head_transform(self.base.config, self.family)
        head = self.base.get_output_embeddings() if head is None else head
        return Target(self(batch, states_alone=True), head, kind, temperature, beta, softcap, scale)

    def score_states(
        self,
        states: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        filters: TokenFilters | None = None,
    ) -> TokenScores:
        """Return log-probs of ``targets [N]`` from the ``states [N, H]`` that predict them.

        Args:
            states: ``[N, H]`` hidden states.
            targets: ``[N]`` token ids.
            temperature: Divisor of the logits.
            entropy: Also return the entropy of the softmax.
            filters: Temperature and filters of sampling at the targets. ``None`` filters nothing.
        """
        softcap, scale = head_transform(self.base.config, self.family)
        head = self.base.get_output_embeddings()
        options = {
            "filters": filters,
            "softcap": softcap,
            "scale": scale,
            "entropy": entropy,
            "chunk_mb": self.config.logits_limit(states.device.type),
        }
        return TokenScores(
            *token_logprobs(states, head, targets, temperature=temperature, **options)
        )

    def logits(self, states: Tensor) -> Tensor:
        """Return all logits ``[..., V]`` of ``states [..., H]`` at once."""
        softcap, scale = head_transform(self.base.config, self.family)
        return transform_logits(self.base.get_output_embeddings()(states), scale, softcap)

    @property
    def has_adapters(self) -> bool:
        return is_adapted(self.model)

    @contextmanager
    def reference(self) -> Generator[Actor, None, None]:
        """Turn adapters off inside the context: the model then equals its base bit for bit.

        Exceptions restore the adapters too.

        Raises ``ModelError`` if there are no adapters to turn off.
        """
        if not self.has_adapters:
            problem = "the policy has no adapters (model.lora is not set)"
            raise ModelError(f"{problem}, so it cannot be its own reference")
        experts, self.experts = self.experts, None
        try:
            if experts is not None:
                experts.replay(None)
            with self.model.disable_adapter():  # ty: ignore[not-callable]
                yield self
        finally:
            self.experts = experts

    def merge(self) -> dict[str, Tensor]:
        """Return the weights with adapters added in; the actor is unchanged.

        They have the names of the model without adapters.
        """
        return merged_state(self.model) if self.has_adapters else dict(self.base.state_dict())

    @torch.no_grad()
    def check_head(self) -> None:
        """Compare the head with the model's own forward on four tokens.

        It costs one call of the model. Raises ``ModelError`` if the model computes its logits in
        another way: scaled, capped or cut by an unknown config field.
        """
        # no setting selects float64, and the experts' fused kernels do not support it
        if self.base.dtype == torch.float64:
            return
        ids = torch.arange(4, 8, device=self.device)[None] % self.text_config.vocab_size
        self.use_attention("padded")
        states: list[Tensor] = []
        hook = self.decoder.register_forward_hook(lambda module, given, out: states.append(out[0]))
        try:
            expected = self.base(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        if not expected.isfinite().all():  # such weights fail elsewhere, with a clearer message
            return
        kind = self.base.config.model_type
        if not states:
            problem = f"its own forward does not call {type(self.decoder).__name__}"
            raise ModelError(f"model type {kind!r} cannot be scored: {problem}")
        found = self.logits(states[-1])
        # half precision rounds the two ways to the logits differently
        is_exact = self.base.dtype in (torch.float32, torch.float64)
        bound = 1e-3 if is_exact else 0.1
        if found.shape != expected.shape:
            raise ModelError(
                f"model type {kind!r} cannot be scored: "
                f"its head gives {found.shape[-1]} logits, its own forward {expected.shape[-1]}"
            )
        gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if gap > bound:
            raise ModelError(
                f"model type {kind!r} cannot be scored: its own logits differ from its head's by "
                f"{gap:.2g} of the largest. {unknown_scale(self.text_config, self.family)}"
            )

    def own_logprobs(self, batch: Batch, at: Tensor | None = None) -> Tensor:
        """Return log-probs of the response tokens by the model's own forward.

        It runs on padded rows and includes the head. ``at`` selects response tokens by index;
        ``None`` selects all. The head is called on the selected states alone.
        """
        reader = self.family.reader
        if reader is not None and reader.alone and len(batch) > 1:
            # the family's own forward takes the media of one row only
            rows = []
            for b, length in enumerate(batch.lengths):
                if length:
                    row = batch.select(torch.tensor([b], device=batch.prompt_of.device))
                    rows.append(self.own_logprobs(row))
            whole = torch.cat(rows)
            return whole if at is None else whole[at]
        # the reference for all layouts, so by transformers' attention and not by a plan
        self.use_attention("padded")
        packed = pack(batch, "padded")
        if self.experts is not None:
            self.experts.replay(packed.experts_of(packed.source))
        gather, targets = packed.gather, batch.responses.tokens
        if at is not None:
            gather, targets = gather[at], targets[at]
        inputs = own_inputs(self.base, self.family, batch, packed)

        def read(states: Tensor) -> Tensor:
            return states.flatten(0, -2).index_select(0, gather)[None]

        # the states are cut before the head, so the other logits never exist
        with head_input(self.base.get_output_embeddings(), read):
            logits = self.base(**inputs, use_cache=False).logits[0]
        logprobs = logits.to(wide(logits.dtype)).log_softmax(-1)
        return logprobs.gather(1, targets[:, None])[:, 0]


def _rows_of_their_own(ranks: ModelParallelGroup) -> ModelError:
    return ModelError(
        f"strategy.sequence_parallel = {ranks.size} splits the tokens of one row, "
        "but this model runs with model.layout = padded, in separate rows, "
        "because it is set so or cannot do otherwise; set strategy.sequence_parallel=1"
    )
