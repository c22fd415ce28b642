"""A reward model: a language model whose heads score a response as a whole."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.actor import Backbone, HiddenStates
from lightrft.models.attention.layouts import Packed
from lightrft.models.attention.ulysses import Row, SequencePart
from lightrft.models.families import Family
from lightrft.models.loading.save_model import Saved, save_model
from lightrft.models.loading.sharded_read import build_model
from lightrft.models.logprobs import wide
from lightrft.models.lora import is_adapted
from lightrft.models.multimodal.merge_inputs import MergedInputs
from lightrft.models.reward.heads import (
    HEADS,
    HeadOutputs,
    LearnedVector,
    RewardHead,
    WideLinear,
    draw_value_weights,
    state_width,
)
from lightrft.models.reward.other_layouts import read_other_form
from lightrft.models.reward.pooling import (
    QUERY_STD,
    RaggedAttentionPooling,
    mean_pooling,
    prompt_ends,
    row_places,
)
from lightrft.models.reward.probed_layer import cut_layers, layer_index, leave_out_norm
from lightrft.models.reward.saved_form import SavedForm, check_form, read_form, write_form
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError
from lightrft.utils.peft_folder import merge_hint
from lightrft.utils.seeding import derive_seed, seeded_weights, torch_generator

MIXTURE = "mixture"
"""Name of the score that a gate combines."""

WITHOUT_HEAD = (
    "train one by lightrft rm, or set reward.judges for a language model that judges by text"
)
"""What to do about a language model in place of a reward model."""


class RewardModel(Backbone):
    """A language model with heads that score responses.

    Scores are the same in every layout, and do not depend on the rest of the batch.

    In evaluation mode, scores are normalised by ``set_normalization``. In training mode they are
    multiplied by learned scales instead, where a head has one. Outputs are never changed.

    Args:
        model: The transformers or peft model. With an inner layer, the layers after it are removed.
        config: Layout, attention and memory settings. ``None`` uses the settings of an empty
            ``ModelConfig``.
        settings: Heads, gate, pooling and layer.
        seed: Seed of the initial weights of heads and pooling.
        is_cut: The layers after the pooled one are not in ``model`` already.

    Raises:
        ModelError: The model has no such layer, or its inner states cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig | None,
        settings: RewardModelConfig,
        *,
        seed: int = 0,
        is_cut: bool = False,
    ) -> None:
        super().__init__(model, config)
        self.settings = settings
        self.is_cut = is_cut
        self.counts_tokens = settings.positions == "text"
        self._cut()
        width = state_width(self.base)
        self.head_names = [head.name for head in settings.heads]
        _check_names(self.head_names)
        self.score_names = [*self.head_names, MIXTURE] if settings.gate else self.head_names
        heads = [RewardHead(head, width, seed) for head in settings.heads]
        self.heads = nn.ModuleDict(dict(zip(self.head_names, heads)))
        self.pools = nn.ModuleDict()
        if settings.pooling == "attention":
            for name in self.head_names:
                self.pools[name] = RaggedAttentionPooling(width, derive_seed(seed, "pooling", name))
        self.end_token = self._new_end_token(seed) if settings.pooling == "token" else None
        self.gate = _gate(width, len(heads), seed) if settings.gate else None
        count = len(self.score_names)
        self.register_buffer("score_mean", torch.zeros(count))
        self.register_buffer("score_std", torch.ones(count))
        self._place_heads()
        self.freeze_output_head()

    def _cut(self) -> None:
        config, count = self.text_config, self.text_config.num_hidden_layers
        if self.is_cut:
            leave_out_norm(self.decoder, config)
            return
        layer = layer_index(self.settings.layer, count)
        if layer == count:
            self.settings = self.settings.model_copy(update={"layer": -1})
            return
        self._check_deep_features(layer)
        cut_layers(self.decoder, config, layer)
        self.settings = self.settings.model_copy(update={"layer": layer})
        self.is_cut = True

    def _check_deep_features(self, layer: int) -> None:
        """Raise ``ModelError`` if features of media enter the model at ``layer`` or after it."""
        tower = self.base.config.to_dict().get("vision_config") or {}
        levels = len(tower.get("deepstack_visual_indexes") or ())
        if layer <= levels:
            raise ModelError(
                f"reward_model.layer = {layer}: features of pictures enter the first {levels} "
                f"layers of this model; take a layer after {levels}"
            )

    def _new_end_token(self, seed: int) -> LearnedVector:
        embeddings: Any = self.base.get_input_embeddings()
        width: int = embeddings.embedding_dim
        drawn = torch.randn(width, generator=torch_generator(derive_seed(seed, "end token")))
        return LearnedVector(drawn * QUERY_STD)

    def _place_heads(self) -> None:
        """Move what was built here to the model's device, and to float64 for a float64 model."""
        for name, module in self.named_children():
            if name == "model":
                continue
            # last, so that heads start from the same numbers as in float32
            if self.base.dtype == torch.float64:
                module.double()
            if self.device.type != "meta":
                module.to(self.device)
        kind = wide(self.base.dtype)
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        self.score_mean = self.score_mean.to(device, kind)
        self.score_std = self.score_std.to(device, kind)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        settings: RewardModelConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> RewardModel:
        """Load the model of ``config.path`` in evaluation mode, with the heads of its folder.

        Heads of other frameworks are read too, see ``read_other_form``.

        Args:
            config: Path and settings of the model.
            settings: Heads, gate, pooling and layer. ``None`` uses those of the folder.
            device: Device of the weights. On the meta device they have no memory until
                ``read_weights``.
            dtype: Dtype of the weights. ``None`` uses ``config.dtype``.
            seed: Seed of the initial weights of new heads.

        Raises:
            ModelError: As ``load_model``; or the folder holds a reward model of another form, or
                none and there are no settings.
        """
        form = read_form(config.path) or read_other_form(config, settings)
        if settings is None:
            if form is None:
                raise ModelError(
                    f"model.path = {config.path!r}: the folder holds no reward model "
                    "(reward_model.json, or a head of another framework); "
                    f"{merge_hint(config.path) or WITHOUT_HEAD}"
                )
            settings = form.settings
        # files of reward models often lack the output head, which is not used
        model, unread = build_model(config, device, dtype, output_head=False)
        reward = cls.around(model, config, settings, form, seed=seed)
        reward.unread = unread
        if config.gradient_checkpointing:
            reward.gradient_checkpointing_enable()
        return reward.eval()

    @classmethod
    def around(
        cls,
        model: nn.Module,
        config: ModelConfig,
        settings: RewardModelConfig,
        form: SavedForm | None,
        *,
        seed: int = 0,
    ) -> RewardModel:
        """Build a reward model around a loaded language model.

        Args:
            model: The model of ``config.path``.
            config: Path and settings of the model.
            settings: Heads, gate, pooling and layer.
            form: Heads that the folder holds. ``None`` for none.
            seed: Seed of the initial weights of new heads.

        Raises:
            ModelError: ``form`` is not what ``settings`` ask for.
        """
        if form is None:
            return cls(model, config, settings, seed=seed)
        if settings.positions is None:
            settings = settings.model_copy(update={"positions": form.settings.positions})
        if form.is_cut:
            # an index from the end is known only with all layers
            check_form(settings, form.settings, config.path)
        reward = cls(model, config, settings, seed=seed, is_cut=form.is_cut)
        check_form(reward.settings, form.settings, config.path)
        reward.load_heads(form.tensors)
        return reward

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> RewardModel:
        """Load a saved reward model in evaluation mode. Raises ``ModelError`` as ``load``.

        Args:
            path: Folder that ``save`` wrote, or a published model with a head.
            device: Device of the weights.
            dtype: Dtype of the weights. ``None`` keeps that of the files.
        """
        return cls.load(ModelConfig(path=str(path)), device=device, dtype=dtype)

    def save(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        path: str | Path,
        processor: Saved | None = None,
        *,
        merge: bool = True,
    ) -> None:
        """Write a folder that ``load`` and ``open`` read back.

        With an inner layer, the folder holds only the layers that are computed.

        Args:
            tokenizer: Written too, unless ``None``.
            path: The folder.
            processor: Written too, unless ``None``.
            merge: Add adapters into the written weights. If ``False``, write only the adapters.

        Raises:
            ModelError: Adapters alone are written of a model whose later layers are removed.
        """
        if self.is_cut and not merge and is_adapted(self.model):
            raise ModelError(
                f"reward_model.layer = {self.settings.layer}: the adapters fit no model with all "
                "layers; merge them (merge = True)"
            )
        save_model(self, tokenizer, path, processor=processor, merge=merge)
        write_form(SavedForm(self.settings, self.is_cut, self.own_tensors()), path)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return weights of heads and pooling, and the normalisation, by name."""
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.startswith("model.")
        }

    def load_heads(self, tensors: Mapping[str, Tensor]) -> None:
        """Set weights of heads and pooling, and the normalisation, by name.

        Raises ``ModelError`` for a missing, unknown or misshapen tensor.
        """
        own = self.own_tensors()
        wrong = own.keys() ^ tensors.keys()
        wrong |= {name for name in own.keys() & tensors if own[name].shape != tensors[name].shape}
        if wrong:
            raise ModelError(
                f"model.path = {self.config.path!r}: {len(wrong)} tensors of its heads are "
                f"missing, unknown or misshapen, e.g. {sorted(wrong)[0]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def set_normalization(self, means: Mapping[str, float], stds: Mapping[str, float]) -> None:
        """Normalise scores in evaluation mode: subtract a mean, then divide by a deviation.

        Args:
            means: Mean of each score. A name that is missing keeps its mean.
            stds: Standard deviation of each score. A name that is missing keeps its deviation.

        Raises:
            ModelError: A number is not finite, or a deviation is not positive.
        """
        for name, value in (*means.items(), *stds.items()):
            if name not in self.score_names or not math.isfinite(value):
                known = ", ".join(self.score_names)
                raise ModelError(f"scores of {name!r} have mean or std {value}; scores: {known}")
        for name, value in stds.items():
            if value <= 0:
                raise ModelError(
                    f"scores of {name!r} have standard deviation {value}, so they cannot be "
                    "scaled; set reward_model.normalize=center"
                )
        for name, value in means.items():
            self.score_mean[self.score_names.index(name)] = value
        for name, value in stds.items():
            self.score_std[self.score_names.index(name)] = value

    @property
    def reward_name(self) -> str:
        """Name of the score that is the reward: the mixture, or that of the first head."""
        return MIXTURE if self.settings.gate else self.head_names[0]

    def score(self, batch: Batch) -> dict[str, HeadOutputs]:
        """Return outputs ``[B, C]`` and scores ``[B]`` of the responses, by name of the score.

        The outputs of ``mixture`` are the weights ``[B, heads]``.
        """
        # through the module's call, whose hooks gather shards and cast inputs
        return self(batch)

    def forward(self, batch: Batch) -> dict[str, HeadOutputs]:
        """Return ``score``.

        It is ``forward``, so that wrappers that act on a module's call see it.
        """
        batch = self.ended(batch.to(self.device))
        is_whole = self.settings.pooling in ("mean", "attention")
        states, packed = self.compute(batch, final=True, whole=is_whole)
        return self.outputs_of(states, packed, batch)

    def ended(self, batch: Batch) -> Batch:
        """Return ``batch`` with a place for the learned token after each response, if any."""
        if self.end_token is None:
            return batch
        return with_end_tokens(batch, free_token(self.base, self.family))

    def outputs_of(self, states: Tensor, packed: Packed, batch: Batch) -> dict[str, HeadOutputs]:
        """Return outputs and scores from the states of a call.

        Args:
            states: ``[n, H]`` states of ``compute``.
            packed: The call of ``compute``.
            batch: Prompts and responses of the call, as ``ended`` returns them.
        """
        raw: dict[str, HeadOutputs] = {}
        for name, pooled in self._pooled(states, packed, batch).items():
            raw[name] = _joined(self.heads[name](pooled.states), pooled.part)
        if self.gate is not None:
            read = self.read_at(states, packed, prompt_ends(packed, batch))
            weights = read.part.whole(self.gate(read.states).softmax(-1)).clone()
            raw[MIXTURE] = HeadOutputs(weights, self._mixed(weights, raw))
        return raw if self.training else self._normalized(raw)

    def _mixed(self, weights: Tensor, raw: Mapping[str, HeadOutputs]) -> Tensor:
        """Return the weighted sum ``[B]`` of scores before learned scales and normalisation."""
        plain = []
        for head in self.settings.heads:
            plain.append(HEADS[head.kind].score(raw[head.name].outputs))
        return (weights * torch.stack(plain, -1)).sum(-1)

    def _pooled(self, states: Tensor, packed: Packed, batch: Batch) -> dict[str, HiddenStates]:
        """Return the pooled states of the rows that this rank scores, by head."""
        assert packed.final is not None
        if self.settings.pooling in ("last", "token"):
            return dict.fromkeys(self.head_names, self.read_at(states, packed, packed.final))
        places, lengths = row_places(packed, batch)
        read = self.read_at(states, packed, places)
        rows = SequencePart.rows(self.model_parallel_group, len(batch), self.device)
        if self.settings.pooling == "mean":
            pooled = mean_pooling(read, lengths)
            return dict.fromkeys(self.head_names, HiddenStates(rows.of(pooled), rows))
        found = {}
        for name in self.head_names:
            found[name] = HiddenStates(rows.of(self.pools[name](read, lengths)), rows)
        return found

    def _normalized(self, raw: Mapping[str, HeadOutputs]) -> dict[str, HeadOutputs]:
        made = {}
        for i, name in enumerate(self.score_names):
            outputs, scores = raw[name]
            made[name] = HeadOutputs(outputs, (scores - self.score_mean[i]) / self.score_std[i])
        return made

    def states(self, packed: Packed, seen: MergedInputs | None = None) -> Tensor:
        """Return the states of ``Backbone.states``, with the learned token in its places."""
        context: Any = nullcontext()
        if self.end_token is not None:
            assert packed.final is not None
            # the end token is the last token of each response
            places = torch.zeros_like(packed.source).index_fill_(0, packed.final, 1)
            if self.model_parallel_group.size > 1:
                places = Row(self.model_parallel_group, packed.input_ids.numel()).own(places)
            context = replaced_embeddings(self.base, self.end_token(), places.bool())
        with context:
            return super().states(packed, seen)


def _check_names(names: list[str]) -> None:
    """Raise ``ModelError`` for a name that no module of a dictionary can have, or a taken one."""
    for name in names:
        if "." in name or hasattr(nn.ModuleDict, name) or name == MIXTURE:
            raise ModelError(
                f"reward_model.heads: the name {name!r} has a dot or is taken; "
                "give another, such as 'preference'"
            )


def _joined(own: HeadOutputs, part: SequencePart) -> HeadOutputs:
    # clone: hooks that wrap the output (FSDP) must not get a view
    return HeadOutputs(part.whole(own.outputs).clone(), part.whole(own.scores).clone())


def _gate(width: int, heads: int, seed: int) -> nn.Sequential:
    """Build the network that weights heads by the prompt, as in ArmoRM (arXiv 2406.12845)."""
    with seeded_weights(seed):  # leaves the process's generator as it is
        layers = WideLinear(width, width, bias=False), WideLinear(width, heads, bias=False)
    for i, layer in enumerate(layers):
        draw_value_weights(layer.weight, derive_seed(seed, "gate", i))
    return nn.Sequential(layers[0], nn.SiLU(), layers[1])


def with_end_tokens(batch: Batch, token: int) -> Batch:
    """Return prompts and responses of ``batch``, with ``token`` after each response."""
    rows = batch.responses.tokens.split(batch.responses.sizes)
    end = batch.responses.tokens.new_full((1,), token)
    pieces = []
    for row in rows:
        pieces += [row, end]
    tokens = torch.cat(pieces) if pieces else batch.responses.tokens
    responses = Segments(tokens, batch.lengths + 1, batch.responses.media)
    return Batch(
        batch.prompts,
        responses,
        batch.prompt_of,
        noise_seeds=batch.noise_seeds,
        noise_alpha=batch.noise_alpha,
    )


def free_token(model: PreTrainedModel, family: Family) -> int:
    """Return a token id that stands for no media. Its embedding is replaced."""
    towers = () if family.reader is None else family.reader.towers
    taken = {tower.token_id(model.config) for tower in towers}
    return next(token for token in range(len(taken) + 1) if token not in taken)


@contextmanager
def replaced_embeddings(model: PreTrainedModel, vector: Tensor, places: Tensor) -> Generator[None]:
    """Replace token embeddings by ``vector [H]`` inside the context.

    Args:
        model: The transformers model.
        vector: The embedding.
        places: ``[S * T]`` bool: tokens of the call whose embedding is replaced.
    """

    def put(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return torch.where(places.view(*out.shape[:-1], 1), vector.to(out.dtype), out)

    hook = model.get_input_embeddings().register_forward_hook(put)
    try:
        yield
    finally:
        hook.remove()
