"""The public actors and critics, without their media inputs.

They are thin wrappers around ``Actor`` and ``Critic``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import is_flash_attn_2_available

from lightrft.config.model import ModelConfig
from lightrft.models import utils
from lightrft.models.actor import Actor, Backbone
from lightrft.models.actor_modality import ActorModality
from lightrft.models.attention.padded import Given, PaddedRows
from lightrft.models.critic import Critic
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.lora import base_model, is_adapted
from lightrft.models.public.module_actor import ModuleActor
from lightrft.utils.errors import ModelError

_log = logging.getLogger(__name__)
NOTHING = "num_actions is None, so return_output must be True: there would be nothing to return"
_GENERATE: dict[str, Any] = {
    "attention_mask": None,
    "do_sample": True,
    "early_stopping": None,
    "eos_token_id": None,
    "max_length": None,
    "max_new_tokens": None,
    "min_new_tokens": 1,
    "num_beams": 1,
    "pad_token_id": None,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "use_cache": True,
}


COUNTED = (
    *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"),
    "cross_attention_mask",
)
"""Tensors of processors that follow from the token ids, and are computed for whole rows."""


def split_tensors(given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the media among keywords of ``generate``, and its options.

    Args:
        given: The keywords. A tensor is of the media, unless its name is that of an option.
    """
    media = {k: v for k, v in given.items() if isinstance(v, Tensor) and k not in _GENERATE}
    return media, {k: v for k, v in given.items() if k not in media}


def uncounted(given: Mapping[str, Any] | None) -> dict[str, Tensor | None]:
    """Return the tensors of ``given`` that do not follow from the token ids.

    Raises ``TypeError`` for something else than a tensor or ``None``, which a typing error gives.
    """
    given = given or {}
    odd = [k for k, value in given.items() if not (value is None or isinstance(value, Tensor))]
    if odd:
        raise TypeError(f"got an unexpected keyword argument {', '.join(odd)}, which is no tensor")
    return {name: value for name, value in given.items() if name not in COUNTED}


def refuse(why: str, **given: object) -> None:
    """Raise ``ModelError`` with ``why`` if one of the ``given`` inputs is not ``None``."""
    if found := [name for name, value in given.items() if value is not None]:
        raise ModelError(f"{', '.join(found)}: {why}")


class PublicModel(nn.Module):
    """The methods that public actors and critics share."""

    @property
    def backbone(self) -> Backbone:
        """The actor or the critic inside."""
        raise NotImplementedError

    @property
    def model(self) -> nn.Module:
        """The model inside: a transformers or peft model, or the module that was given."""
        return self.backbone.model

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Recompute layers in the backward pass, in training mode only.

        ``None`` stands for ``{"use_reentrant": False}``.
        """
        self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations for the backward pass again."""
        self.backbone.gradient_checkpointing_disable()

    def print_trainable_parameters(self) -> None:
        """Print the numbers of trainable and of all parameters, in peft's format.

        They go to standard output. A value head counts.
        """
        trainable = 0
        total = 0
        for parameter in self.backbone.parameters():
            total += parameter.numel()
            if parameter.requires_grad:
                trainable += parameter.numel()
        share = 100 * trainable / max(1, total)
        counts = f"trainable params: {trainable:,} || all params: {total:,}"
        sys.stdout.write(f"{counts} || trainable%: {share:.4f}\n")


class PublicActor(PublicModel):
    """A policy with the public interface.

    ``actor`` is the policy that a loop over ``Batch`` uses; both share weights.

    Args:
        pretrain_or_model: A folder, a hub name, a transformers or peft model, or a module. A model
            keeps its device, dtype and attention. A module (see ``ModuleActor``) gets no adapters
            and is not packed.
        use_flash_attention_2: Use flash-attn. Falls back to the model's default attention, with a
            warning, where flash-attn cannot run.
        bf16: Load the weights in bfloat16. Otherwise keep the dtype of the files.
        lora_rank: Rank of new adapters. 0 adds none.
        lora_alpha: Numerator of the adapters' scale.
        lora_dropout: Dropout probability of the adapters' input.
        target_modules: Layers that get adapters. ``None`` selects every linear layer but the output
            head.
        ds_config: DeepSpeed's settings. With ZeRO stage 3, the model is loaded in shards.
        device_map: Placement of the weights, passed to transformers.
        packing_samples: ``forward`` takes rows of several samples.
        high_entropy_token_ratio: Above 0, the output of ``forward`` carries ``action_entropy``.
        load_in_4bit: Load the weights quantised to 4 bits.
        disable_logprobs_flashattn: Not read: log-probs need no flash-attn.
        fused_linear_logprob: Not read: log-probs are computed in chunks in any case.
        trust_remote_code: Run the code of the model folder. LightRFT runs it in any case.

    Raises:
        ModelError: The model cannot be loaded or adapted.
    """

    modality: ClassVar[ActorModality]

    def __init__(
        self,
        pretrain_or_model: str | nn.Module,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        lora_rank: int = 0,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: str | list[str] | None = None,
        ds_config: dict[str, Any] | None = None,
        device_map: str | dict[str, object] | None = None,
        packing_samples: bool = False,
        high_entropy_token_ratio: float = 0.0,
        *,
        load_in_4bit: bool = False,
        disable_logprobs_flashattn: bool = False,
        fused_linear_logprob: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        loader = ModelLoader(use_flash_attention_2, bf16, ds_config, device_map, load_in_4bit)
        loader.trust(trust_remote_code)
        model, config = loader.model(pretrain_or_model)
        if lora_rank > 0:
            model = adapt(model, lora_rank, lora_alpha, lora_dropout, target_modules)
        if packing_samples and not is_known(model):
            problem = f"a {type(model).__name__} is called on rectangles alone"
            raise ModelError(f"packing_samples: {problem}; leave it off")
        self._loader = loader  # DeepSpeed's settings apply only while their object exists
        self.actor = Actor(model, config) if is_known(model) else ModuleActor(model)
        kind = base_model(model).config.model_type if is_known(model) else type(model).__name__
        self.pretrain_or_model: str = config.path or kind
        self.packing_samples = packing_samples
        self.high_entropy_token_ratio = high_entropy_token_ratio

    @property
    def backbone(self) -> Backbone:
        return self.actor

    def score_rows(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | None,
        attention_mask: Tensor | None,
        return_output: bool,
        packed_seq_lens: Sequence[int] | None,
        media: Given,
    ) -> Any:
        """Return log-probs of the actions, or ``(log-probs, output)``.

        Without ``num_actions``, return the model's output alone. Every ``forward`` of an actor
        calls it.

        Args:
            sequences: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Columns at the end of each row that are actions, or one number per packed
                sample.
            attention_mask: ``[B, L]``, 0 for padding. A packed row holds 1..n for its samples.
            return_output: Also return the model's output, with logits of every token.
            packed_seq_lens: Lengths of the packed samples.
            media: Media by input name.

        Returns:
            Log-probs ``[B, num_actions]`` of the last columns; of packed samples ``[1, sum]``,
                concatenated.

        Raises:
            ValueError: There is nothing to return, or packed lengths are missing.
            ModelError: The model cannot read the media, or they do not fit the placeholders.
        """
        if num_actions is None and not return_output:
            raise ValueError(NOTHING)
        rows = PaddedRows.of(
            sequences, attention_mask, num_actions, packed_seq_lens, self.packing_samples
        )
        # before the model call: it raises for action counts that do not fit the rows
        at = None if num_actions is None else rows.places
        states = rows.states(self.actor, media)
        if at is None:
            return CausalLMOutputWithPast(logits=self.actor.logits(states))
        predicting = states.flatten(0, 1)[at.reshape(-1)]
        targets = sequences.reshape(-1)[at.reshape(-1) + 1]
        entropy = self.high_entropy_token_ratio > 0
        scores = self.actor.score_states(predicting, targets, entropy=entropy)
        logprobs = scores.logprobs.reshape(at.shape)
        if not return_output:
            return logprobs
        output = CausalLMOutputWithPast(logits=self.actor.logits(states))
        if scores.entropy is not None:
            output["action_entropy"] = scores.entropy.reshape(at.shape)
        return logprobs, output

    def sample_rows(
        self,
        input_ids: Tensor,
        media: Given,
        given: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Generate responses by transformers' ``generate``.

        Every ``generate`` of an actor calls it. Raises as ``generated_rows``.

        Args:
            input_ids: ``[B, L_in]`` prompts, padded on the left.
            media: Media by input name.
            given: Options of ``generated_rows``.

        Returns:
            ``(sequences [B, L], attention_mask [B, L], action_mask [B, L - L_in])``. See
                ``process_sequences`` for rows that were cut.
        """
        sequences, eos, pad = self.generated_rows(input_ids, media, given)
        return self.process_sequences(sequences, input_ids.shape[1], eos, pad)

    @torch.no_grad()
    def generated_rows(
        self, input_ids: Tensor, media: Given, given: dict[str, Any]
    ) -> tuple[Tensor, int, int]:
        """Return rows as transformers' ``generate`` gives them, and the end and padding tokens.

        Args:
            input_ids: ``[B, L_in]`` prompts, padded on the left.
            media: Media by input name.
            given: Options of ``generate``: ``attention_mask``, ``do_sample``, ``early_stopping``,
                ``eos_token_id``, ``max_length``, ``max_new_tokens``, ``min_new_tokens``,
                ``num_beams``, ``pad_token_id``, ``temperature``, ``top_k``, ``top_p``,
                ``use_cache``.

        Raises:
            TypeError: An option has another name.
            ModelError: There is no end token.
        """
        unknown = sorted(set(given) - set(_GENERATE))
        if unknown:
            raise TypeError(
                f"generate() got unknown {', '.join(unknown)}; known: {', '.join(_GENERATE)}"
            )
        chosen = _GENERATE | given
        options = {name: value for name, value in chosen.items() if value is not None}
        options.setdefault("early_stopping", options["num_beams"] > 1)
        generation = getattr(self.actor.base, "generation_config", None)
        for name in ("eos_token_id", "pad_token_id"):
            options.setdefault(name, getattr(generation, name, None))
        eos = options["eos_token_id"]
        # process_sequences writes one end token, and configs may list several
        eos = eos[0] if isinstance(eos, list | tuple) else eos
        pad = eos if options["pad_token_id"] is None else options["pad_token_id"]
        if eos is None:
            raise ModelError(
                "generate() needs eos_token_id: the model's generation config has none"
            )
        # generate() passes no attention plan
        self.actor.use_attention("padded")
        rows = PaddedRows.of(input_ids, options.get("attention_mask"), None, None, packing=False)
        base: Any = self.actor.base
        keywords = rows.keywords(self.actor, media)
        options["pad_token_id"] = pad
        if isinstance(self.actor, ModuleActor):
            sequences = self.actor.generate(input_ids, rows.mask, options)
        else:
            sequences = base.generate(input_ids=input_ids, **keywords, **options)
        return sequences, eos, pad

    def process_sequences(
        self, sequences: Tensor, input_len: int, eos_token_id: int, pad_token_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return generated rows with their attention and action masks.

        The shapes are ``[B, L]``, ``[B, L]`` and ``[B, L - input_len]``. Note that a row cut by the
        length limit has its last token replaced by the end token.

        Args:
            sequences: ``[B, L]`` prompts and responses.
            input_len: Columns of the prompts.
            eos_token_id: The end token.
            pad_token_id: The padding token.
        """
        return utils.process_sequences(sequences, input_len, eos_token_id, pad_token_id)


class PublicCritic(PublicModel):
    """A value function with the public interface, around ``Critic``.

    Args:
        pretrain_or_model: A folder, a hub name, or a transformers or peft model.
        use_flash_attention_2: Use flash-attn, see ``PublicActor``.
        bf16: Load the weights in bfloat16. Otherwise keep the dtype of the files.
        lora_rank: Rank of new adapters. 0 adds none.
        lora_alpha: Numerator of the adapters' scale.
        lora_dropout: Dropout probability of the adapters' input.
        target_modules: Layers that get adapters. ``None`` selects every linear layer but the output
            head.
        normalize_reward: Shift and scale values by ``mean`` and ``std`` of the model's config.
        ds_config: DeepSpeed's settings. With ZeRO stage 3, the model is loaded in shards.
        init_value_head: Initialise the head even if the folder holds one.
        value_head_prefix: Attribute name of the head on this module.
        device_map: Placement of the weights, passed to transformers.
        packing_samples: ``forward`` takes rows of several samples.
        load_in_4bit: Load the weights quantised to 4 bits.
        trust_remote_code: Run the code of the model folder, see ``PublicActor``.
    """

    modality: ClassVar[ActorModality]

    def __init__(
        self,
        pretrain_or_model: str | nn.Module,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        lora_rank: int = 0,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: str | list[str] | None = None,
        normalize_reward: bool = False,
        ds_config: dict[str, Any] | None = None,
        init_value_head: bool = False,
        value_head_prefix: str = "score",
        device_map: str | dict[str, object] | None = None,
        packing_samples: bool = False,
        *,
        load_in_4bit: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        loader = ModelLoader(use_flash_attention_2, bf16, ds_config, device_map, load_in_4bit)
        loader.trust(trust_remote_code)
        model, config = loader.model(pretrain_or_model)
        if lora_rank > 0:
            model = adapt(model, lora_rank, lora_alpha, lora_dropout, target_modules)
        self._loader = loader  # keeps DeepSpeed's settings alive, see PublicActor
        if not is_known(model):
            given = f"pretrain_or_model is a {type(model).__name__}"
            raise ModelError(f"{given}: a critic needs a path, a transformers or a peft model")
        self.critic = Critic(model, config)
        if isinstance(pretrain_or_model, str) and not init_value_head:
            self.critic.load_value_head(pretrain_or_model)
        self.value_head_prefix = value_head_prefix
        self.packing_samples = packing_samples
        self.normalize_reward = normalize_reward
        settings = self.critic.base.config.to_dict()
        # not persistent: they belong to the config, not to the weights
        for name, default in (("mean", 0.0), ("std", 1.0)):
            value = torch.tensor(float(settings.get(name) or default))
            self.register_buffer(name, value, persistent=False)

    @property
    def backbone(self) -> Backbone:
        return self.critic

    def __getattr__(self, name: str) -> Any:
        # from __dict__, since an attribute that is missing yet would lead back here
        if name != "value_head_prefix" and name == self.__dict__.get("value_head_prefix"):
            return self.critic.value_head
        return super().__getattr__(name)

    def value_rows(
        self,
        input_ids: Tensor,
        num_actions: int | Sequence[int] | None,
        attention_mask: Tensor | None,
        return_output: bool,
        packed_seq_lens: Sequence[int] | None,
        media: Given,
    ) -> Any:
        """Return values of the states before the actions.

        They have the shapes of ``PublicActor.score_rows``. With ``return_output``, also return
        the values of all states ``[B, L]``; without ``num_actions``, these alone. Raises as
        ``score_rows``.

        Args:
            input_ids: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Columns at the end of each row that are actions, or one number per packed
                sample.
            attention_mask: ``[B, L]``, 0 for padding. A packed row holds 1..n for its samples.
            return_output: Also return the values of all states.
            packed_seq_lens: Lengths of the packed samples.
            media: Media by input name.
        """
        if num_actions is None and not return_output:
            raise ValueError(NOTHING)
        rows = PaddedRows.of(
            input_ids, attention_mask, num_actions, packed_seq_lens, self.packing_samples
        )
        at = None if num_actions is None else rows.places
        values = self.critic.value(rows.states(self.critic, media))
        if self.normalize_reward:
            values = (values - self.mean) / self.std
        if at is None:
            return values
        actions = values.reshape(-1)[at]
        return (actions, values) if return_output else actions


class ModelLoader:
    """Loads the model of a path, or passes a module through.

    Args:
        use_flash_attention_2: Use flash-attn, with a warning where it cannot run.
        bf16: Load the weights in bfloat16. Otherwise keep the dtype of the files.
        ds_config: DeepSpeed's settings. With ZeRO stage 3, the model is loaded in shards.
        device_map: Placement of the weights, passed to transformers.
        load_in_4bit: Load the weights quantised to 4 bits.
        output_head: Require the weights of the output head. Otherwise a missing head is 0.
    """

    def __init__(
        self,
        use_flash_attention_2: bool,
        bf16: bool,
        ds_config: dict[str, Any] | None,
        device_map: str | dict[str, object] | None,
        load_in_4bit: bool,
        output_head: bool = True,
    ) -> None:
        self.output_head = output_head
        attention = "flash_attention_2" if use_flash_attention_2 else None
        if use_flash_attention_2 and not is_flash_attn_2_available():
            _log.warning(
                "use_flash_attention_2 = True, but flash-attn is not installed "
                "or there is no GPU that it runs on: using the model's default attention"
            )
            attention = None
        self.settings: dict[str, Any] = {
            "attention": attention,
            "dtype": "bfloat16" if bf16 else "auto",
            "load_in_4bit": load_in_4bit,
        }
        self.device_map = device_map
        self.deepspeed: Any = None
        if ds_config is not None and ds_config.get("zero_optimization", {}).get("stage") == 3:
            from transformers.integrations import HfDeepSpeedConfig

            # while this object lives, transformers shards weights as it loads them (ZeRO stage 3)
            self.deepspeed = HfDeepSpeedConfig(ds_config)

    def trust(self, allowed: bool) -> None:
        """Run the code of a model folder if it is ``allowed``. No test knows its family."""
        if allowed:
            self.settings |= {"trust_remote_code": True, "unproved_family": "allow"}

    def model(self, source: str | nn.Module) -> tuple[nn.Module, ModelConfig]:
        """Return the model of ``source`` and its settings."""
        if isinstance(source, nn.Module):
            return source, ModelConfig(dropout=True)
        # ``train()`` and ``eval()`` of these classes mean what they mean in PyTorch.
        config = ModelConfig(path=str(source), dropout=True, **self.settings)
        # An empty tensor shows torch's default device. Under a meta-device context no weights
        # exist that could be placed.
        device_map = None if torch.empty(0).device.type == "meta" else self.device_map
        model = load_model(
            config,
            device=torch.empty(0).device,
            device_map=device_map,
            output_head=self.output_head,
        )
        return model, config


def is_known(model: nn.Module) -> bool:
    """Return ``True`` if ``model`` is a transformers or peft model, whose hidden states can be
    read."""
    return isinstance(model, PreTrainedModel) or is_adapted(model)


def adapt(
    model: nn.Module,
    rank: int,
    alpha: float,
    dropout: float,
    targets: str | list[str] | None,
) -> nn.Module:
    """Return ``model`` with new adapters.

    Args:
        model: A transformers model.
        rank: Rank of the adapters.
        alpha: Numerator of their scale.
        dropout: Dropout probability of their input.
        targets: Layers that get adapters. ``None`` selects every linear layer but the output head.

    Raises:
        ModelError: The model is no transformers model, or has adapters already.
    """
    if not is_known(model):
        needed = "adapters need a path or a transformers model"
        raise ModelError(f"lora_rank = {rank}: {needed}, not a {type(model).__name__}")
    if is_adapted(model):
        problem = f"lora_rank = {rank} but the model has adapters already"
        raise ModelError(f"{problem}: pass lora_rank=0 to train those")
    return utils.apply_lora_configuration(model, rank, alpha, dropout, targets)  # ty: ignore[invalid-argument-type]
