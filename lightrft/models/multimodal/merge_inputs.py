"""Merge media into a model call: features, their tokens, and their positions.

The media of a batch go through their tower in one call, once per prompt, in every layout. Rows that
repeat a prompt read the same features again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import blockwise_overlay, create_causal_mask, sliding_window_overlay

from lightrft.distributed.collectives import EqualCalls
from lightrft.models.attention.layouts import Packed
from lightrft.models.attention.segment_plan import AttentionSpans
from lightrft.models.families import Family
from lightrft.models.multimodal.blanks import blank_like, check_calls, is_sharded
from lightrft.models.multimodal.towers import (
    Features,
    KeptFeatures,
    ModalityEncoder,
    Tower,
    TowerOutputs,
    in_dtype,
)
from lightrft.types import Batch, Media, Ragged, Segments
from lightrft.utils.errors import ModelError


@dataclass(slots=True)
class MergedInputs:
    """Features of media, and their places among N tokens.

    Attributes:
        row: ``[N]`` index of the feature that replaces each token's embedding, -1 for text.
        features: ``[K, H]``, see ``Features.values``.
        deep: ``[K, H]`` each, see ``Features.deep``.
        positions: ``[axes, N]``. ``None`` if a token's position is its index in the sequence.
        blocks: ``[N]`` number of the span with attention in both directions, -1 outside. ``None``
            if there are none.
        windowed: The spans hold only in layers with a sliding window.
        expert_tokens: Tokens that go to the experts of media. ``None`` if the model has none.
        idle: A zero that depends on towers that ran on a blank, so that zero gradients reach them.
            ``None`` if none did.
        layers: See ``Features.layers``.
    """

    row: Tensor
    features: Tensor
    deep: tuple[Tensor, ...]
    positions: Tensor | None
    blocks: Tensor | None = None
    windowed: bool = False
    expert_tokens: Tensor | None = None
    idle: Tensor | None = None
    layers: tuple[int, ...] = ()

    def inputs(self, model: PreTrainedModel, ids: Tensor, source: Tensor) -> dict[str, object]:
        """Return the decoder's keywords for tokens.

        Args:
            model: Gives the token embeddings.
            ids: ``[S, T]`` token ids.
            source: ``[S * T]`` index of each token among the N, -1 for padding.
        """
        # Padding has the index -1, which is that of the appended entry. A rank without rows has
        # padding alone.
        row = torch.cat([self.row, self.row.new_full((1,), -1)])[source]
        places = (row >= 0).nonzero()[:, 0]
        embeddings = model.get_input_embeddings()(ids)
        flat, taken = embeddings.flatten(0, 1), row[places]
        # not in place: autograd may need the embeddings as they were
        flat = flat.index_copy(0, places, self.features[taken].to(flat.dtype))
        if self.idle is not None:
            flat = flat + self.idle.to(flat.dtype)
        made: dict[str, object] = {"inputs_embeds": flat.view_as(embeddings)}
        made |= _per_layer(model, ids, (row >= 0).view(ids.shape))
        made |= _expert_types(self.expert_tokens, ids)
        if self.layers:
            made["vision_mask"] = (row >= 0).view(*ids.shape, 1)
            levels = (level[taken].to(flat.dtype) for level in self.deep)
            made["deepstack_features"] = dict(zip(self.layers, levels))
        elif self.deep:
            made["visual_pos_masks"] = (row >= 0).view(ids.shape)
            made["deepstack_visual_embeds"] = [d[taken].to(flat.dtype) for d in self.deep]
        return made

    def spans(self, source: Tensor) -> AttentionSpans | None:
        """Return the copies of blocks in a row of tokens.

        ``source [T]`` are the indices of the row's tokens.
        """
        if self.blocks is None:
            return None
        block = self._block_of(source)
        follows = (block[1:] == block[:-1]) & (source[1:] == source[:-1] + 1)
        edge = torch.ones(1, dtype=torch.bool, device=source.device)
        starts = torch.cat([edge, ~follows]).nonzero()[:, 0]
        lengths = torch.diff(starts, append=starts.new_tensor([len(source)]))
        runs = list(zip(starts.tolist(), lengths.tolist()))
        found = [run for run, number in zip(runs, block[starts].tolist()) if number >= 0]
        return AttentionSpans(found, self.windowed)

    def masks(
        self,
        config: PreTrainedConfig,
        embeddings: Tensor,
        source: Tensor,
        real: Tensor | None,
    ) -> dict[str, object]:
        """Return the decoder's mask keywords for the ``padded`` layout.

        They are for the model's own attention.

        Args:
            config: Config of the decoder.
            embeddings: ``[S, T, H]``.
            source: ``[S * T]`` index of each token among the N, -1 for padding.
            real: ``[S, T]``, 0 for padding. ``None`` if no token attends to padding.
        """
        if self.blocks is None:
            return {}
        block = self._block_of(source).view(embeddings.shape[:2])
        masks: dict[str, object] = {}
        # a config without kinds of layers has one mask
        for kind in set(vars(config).get("layer_types") or ("",)):
            # the blocks are added to the causal mask by ``or``, so a window must be applied again
            # by ``and``
            near, ahead = None, blockwise_overlay(block)
            if kind == "sliding_attention":
                near = sliding_window_overlay(config.sliding_window)
            elif self.windowed:
                ahead = None
            masks[kind] = create_causal_mask(
                config,
                embeddings,
                real,
                None,
                or_mask_function=ahead,
                and_mask_function=near,
            )
        return {"attention_mask": masks.get("", masks)}

    def _block_of(self, source: Tensor) -> Tensor:
        assert self.blocks is not None
        # Padding has the index -1, which is that of the appended entry.
        return torch.cat([self.blocks, self.blocks.new_full((1,), -1)])[source]


def _per_layer(model: PreTrainedModel, ids: Tensor, is_media: Tensor) -> dict[str, object]:
    """Return the embeddings that each layer adds, for models that have such (Gemma 3n and 4).

    Args:
        model: The transformers model.
        ids: ``[S, T]`` token ids.
        is_media: ``[S, T]``, ``True`` for placeholders, which are read as padding.
    """
    text: Any = model.config.get_text_config(decoder=True)
    if not getattr(text, "hidden_size_per_layer_input", 0):
        return {}
    ids = torch.where(is_media, text.pad_token_id, ids)
    decoder: Any = model.get_decoder()
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids)}


def _expert_tokens(model: PreTrainedModel, reader: ModalityEncoder) -> Tensor | None:
    """Return the tokens that go to the experts of media, or ``None`` for a model without such."""
    if _EXPERT_TYPES not in inspect.signature(model.forward).parameters:
        return None
    return torch.tensor(_tokens_of(model.config, reader), device=model.device)


def _expert_types(tokens: Tensor | None, ids: Tensor) -> dict[str, object]:
    """Return the type ids ``[S, T]`` by which experts are chosen: 1 for ``tokens``."""
    return {} if tokens is None else {_EXPERT_TYPES: torch.isin(ids, tokens).long()}


_EXPERT_TYPES = "moe_mm_token_type_ids"


def merge_multimodal_inputs(
    model: PreTrainedModel,
    family: Family,
    prompts: Segments,
    responses: Segments | None = None,
    prompt_of: Tensor | None = None,
    begun: Sequence[int] = (),
    every_tower: bool = False,
    kept: KeptFeatures | None = None,
    equal: EqualCalls | None = None,
) -> MergedInputs | None:
    """Encode the media of ``prompts`` and ``responses``.

    Return their places among the concatenated tokens; ``None`` without media.

    Args:
        model: The transformers model.
        family: Row of the model's family.
        prompts: Prompts with media.
        responses: Responses, which may have media. ``None`` for none.
        prompt_of: ``[B]`` index of each response's prompt. ``None`` without responses.
        begun: For each prompt, the number of last tokens that are a resumed response. No
            placeholder among them stands for media.
        every_tower: Run towers without media on a blank, so that all processes of a job make the
            same calls.
        kept: Outputs of the same towers, read and extended. ``None`` runs the towers.
        equal: Makes the calls of towers equal on ranks that shard weights. ``None`` does not.

    Raises:
        ModelError: The family cannot read the media, or placeholders and features differ in number.
    """
    responses = Segments.of([]) if responses is None else responses
    reader = family.reader
    any_media = has_media(prompts) or has_media(responses)
    if not any_media and not family.is_prefix_lm and (reader is None or not every_tower):
        return None
    reader = check_readable(model, reader, (prompts, responses))
    # one tower call for prompts and responses; the batch may have no responses
    both = prompts
    if len(responses):
        both = Segments.cat([prompts, responses.to(prompts.tokens.device)])
    row = torch.full_like(both.tokens, -1)
    # a key covers the media of prompts only
    key = None if has_media(responses) else prompts.media_key
    outputs = None if kept is None else kept.get(key)
    if outputs is None:
        outputs = _run_towers(model, reader, both.media, every_tower, equal or EqualCalls())
        if kept is not None:
            kept.put(key, outputs)
    found: list[Features] = []
    values: list[Tensor] = []
    placed = 0
    inside = unsampled(both.lengths, begun)
    for tower in reader.towers:
        if tower.kind not in outputs.features:
            continue
        features = outputs.features[tower.kind]
        places = _places(model, tower, both, inside)
        count = len(features.values)
        if len(places) != count:
            kind = tower.kind
            problem = f"{len(places)} {kind} tokens in the batch, but {count} {kind} features"
            raise ModelError(f"{problem}: prompts must hold one token for each feature")
        row[places] = torch.arange(count, device=row.device) + placed
        placed += count
        found.append(features)
        values.append(features.values)
        if features.marks is not None:
            for token, mark in zip(getattr(model.config, tower.marks), features.marks, strict=True):
                row[_places(model, tower, both, inside, token)] = placed
                values.append(mark[None])
                placed += 1
    levels = max((len(features.deep) for features in found), default=0)
    # A kind without features for deeper layers adds nothing to them.
    each = [f.deep or (torch.zeros_like(f.values),) * levels for f in found]
    deep = tuple(torch.cat(level) for level in zip(*each, strict=True))
    positions = None
    if reader.positions is not None and found:
        positions = _positions(model, reader, prompts, responses, prompt_of, begun)
    blocks = None
    if family.is_prefix_lm:
        blocks = _of_prompts(model, both.lengths, len(prompts), inside)
    elif reader.both_ways and found:
        blocks = _blocks(row, both.lengths)
    embeddings: Any = model.get_input_embeddings()
    # without features, an empty tensor of the right width, dtype and device
    merged = torch.cat(values) if values else embeddings.weight[:0]
    windowed = reader.both_ways == "windowed media"
    experts = _expert_tokens(model, reader)
    layers = found[0].layers if found else ()
    return MergedInputs(
        row, merged, deep, positions, blocks, windowed, experts, outputs.idle, layers
    )


def _run_towers(
    model: PreTrainedModel,
    reader: ModalityEncoder,
    media: Media,
    every_tower: bool,
    equal: EqualCalls,
) -> TowerOutputs:
    """Compute the features of ``media``, and run towers without media if ``every_tower``."""
    features: dict[str, Features] = {}
    idle: list[Tensor] = []
    blanks: dict[str, list[dict[str, Tensor]]] = {}
    if every_tower and not reader.has_blanks:
        check_calls(model, equal)
        blanks = equal.missing(_blank_calls(reader, media))
        if torch.is_grad_enabled():
            idle.append(zero_of_parameters(model, reader))
        every_tower = False
    for tower in reader.towers:
        if inputs := given(tower, media):
            features[tower.kind] = tower.features(model, inputs)
        elif every_tower and tower.blank is not None:
            blanks[tower.kind] = [tower.blank(model, tower.inputs)]
        for blank in blanks.get(tower.kind, ()):
            idle.append(_nothing(model, tower, blank))
    return TowerOutputs(features, torch.stack(idle).sum() if idle else None)


def _blank_calls(reader: ModalityEncoder, media: Media) -> dict[str, tuple[int, dict[str, Tensor]]]:
    """Return the number of calls of each kind of tower, and blank media of one."""
    calls = {}
    for tower in reader.towers:
        if inputs := given(tower, media):
            parts = tower.calls(inputs)
            blank = {name: blank_like(name, values) for name, values in parts[0].items()}
            calls[tower.kind] = len(parts), blank
    return calls


def check_readable(
    model: PreTrainedModel,
    reader: ModalityEncoder | None,
    runs: Sequence[Segments],
) -> ModalityEncoder:
    """Return ``reader``.

    Args:
        model: The transformers model.
        reader: The family's towers, or ``None``.
        runs: Runs with media.

    Raises:
        ModelError: The family does not read all media of ``runs``.
    """
    names = set()
    for segments in runs:
        names |= {name for name, rows in segments.media.items() if rows.values.numel()}
    towers = () if reader is None else reader.towers
    for tower in towers:
        names -= {*tower.inputs, *tower.hints}
    if reader is None or names:
        kind = f"model type {model.config.model_type!r}"
        raise ModelError(f"{kind} cannot read media ({', '.join(sorted(names))})")
    return reader


def has_media(segments: Segments) -> bool:
    """Return ``True`` if some run has media."""
    return any(rows.values.shape[0] for rows in segments.media.values())


def media_token_ids(config: PreTrainedConfig, family: Family) -> tuple[int, ...]:
    """Return the tokens that the model reads as media: placeholders, and marks of media.

    A response must not contain them, since they stand for no media there. Sampling bans them.

    Args:
        config: Config of the model.
        family: Row of the model's family.
    """
    if family.reader is None:
        return ()
    # A placeholder beyond the vocabulary has no logit.
    size = config.get_text_config(decoder=True).vocab_size
    read = dict.fromkeys(_tokens_of(config, family.reader))
    return tuple(token for token in read if token < size)


def _tokens_of(config: PreTrainedConfig, reader: ModalityEncoder) -> list[int]:
    """Return the placeholders and the marks of media."""
    read = [tower.token_id(config) for tower in reader.towers]
    for tower in reader.towers:
        read += getattr(config, tower.marks) if tower.marks else ()
    return read + [getattr(config, name) for name in reader.marks]


def misread(model: PreTrainedModel, family: Family, batch: Batch) -> Tensor:
    """Return ``[B]`` bool: responses in which a placeholder or a mark of media was sampled.

    If the prompts have media, the model's own forward would take such a token for one of theirs.

    Args:
        model: The transformers model.
        family: Row of the model's family.
        batch: Prompts and responses.
    """
    if family.reader is None or not has_media(batch.prompts):
        return torch.zeros_like(batch.prompt_of, dtype=torch.bool)
    ids = torch.tensor(media_token_ids(model.config, family), device=batch.prompt_of.device)
    sampled = torch.isin(batch.responses.tokens, ids)
    # a resumed response may have media of its own, whose placeholders are right
    media_count = torch.zeros_like(batch.lengths)
    for rows in batch.responses.media.values():
        media_count = media_count + rows.lengths
    sampled_count = torch.zeros_like(media_count).index_add_(0, batch.row_of, sampled.long())
    return sampled_count.gt(0) & (media_count == 0)


def given(tower: Tower, media: Media, hints: bool = False) -> dict[str, Tensor]:
    """Return the inputs of ``tower`` in ``media``; empty if it has none.

    Args:
        tower: The tower.
        media: Media by input name.
        hints: Also return the inputs that only positions depend on.
    """
    if not any(media[name].values.shape[0] for name in tower.inputs if name in media):
        return {}
    names = (*tower.inputs, *tower.hints) if hints else tower.inputs
    return {name: media[name].values for name in names if name in media}


def _nothing(model: PreTrainedModel, tower: Tower, blank: dict[str, Tensor]) -> Tensor:
    """Return 0, computed from everything that the tower computes on ``blank``, so that its
    parameters get zero gradients."""
    blank = {name: value.to(model.device) for name, value in blank.items()}
    features = tower.features(model, blank)
    levels = [features.values, *features.deep]
    if features.marks is not None:
        levels.append(features.marks)
    # times 0, not detached: the parameters must get a gradient, of 0
    return torch.stack([0 * level.sum() for level in levels]).sum()


_MEDIA_EXPERTS = (".vision_moe.", ".moe_statics.")
"""Parts of the names of parameters of experts that text alone gives no gradient."""


def zero_of_parameters(model: PreTrainedModel, reader: ModalityEncoder) -> Tensor:
    """Return 0, computed from every trained parameter that text alone does not reach.

    Each gets a gradient then: those of the towers, those of experts of media, and all where the
    model's forward reads media, since it may leave out layers. Sharded ones get it by calls on
    blanks.

    Raises ``ModelError`` for sharded experts of media, which no blank reaches.
    """
    prefixes = tuple(prefix for part in reader.parts.values() for prefix in part)
    any_name = reader.own_forward is not None
    zero = torch.zeros((), device=model.device)
    for name, parameter in model.named_parameters():
        of_tower = name.startswith(prefixes)
        of_experts = any(part in name for part in _MEDIA_EXPERTS)
        is_left_out = of_tower or any_name or of_experts
        if not parameter.requires_grad or not is_left_out:
            continue
        if not is_sharded(parameter):
            # not detached: the parameter must get a gradient, of 0
            zero = zero + 0 * parameter.sum()
        elif of_experts:
            raise ModelError(
                f"model type {model.config.model_type!r}: its experts of media are trained with "
                "sharded weights in several processes, of which some may have no media; train it "
                "in one process"
            )
    return zero


def unsampled(lengths: Tensor, begun: Sequence[int]) -> Tensor:
    """Return ``[N]`` bool: tokens that are not part of a resumed response."""
    runs = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    step = torch.arange(len(runs), device=lengths.device) - (lengths.cumsum(0) - lengths)[runs]
    held = torch.zeros_like(lengths)
    held[: len(begun)] = torch.tensor(list(begun), dtype=torch.long, device=lengths.device)
    return step < (lengths - held)[runs]


def _places(
    model: PreTrainedModel,
    tower: Tower,
    both: Segments,
    inside: Tensor,
    token: int | None = None,
) -> Tensor:
    """Return the placeholders of ``tower`` in the runs with its media. In other runs such a token
    was sampled, or is plain text.

    Args:
        model: The transformers model.
        tower: The tower.
        both: All runs.
        inside: ``[N]``, ``False`` for a response that is resumed.
        token: Another token than the placeholder.
    """
    token = tower.token_id(model.config) if token is None else token
    # An input may have one row for the items of several runs.
    rows = [both.media[name].lengths for name in tower.inputs if name in both.media]
    with_media = torch.repeat_interleave(torch.stack(rows).amax(0) > 0, both.lengths)
    return ((both.tokens == token) & with_media & inside).nonzero()[:, 0]


def _blocks(row: Tensor, lengths: Tensor) -> Tensor:
    """Number the blocks: consecutive placeholders of one run are one block."""
    run = torch.repeat_interleave(torch.arange(len(lengths), device=row.device), lengths)
    real = row >= 0
    follows = torch.zeros_like(real)
    follows[1:] = real[:-1] & (run[1:] == run[:-1])
    return torch.where(real, (real & ~follows).cumsum(0) - 1, -1)


def _of_prompts(model: PreTrainedModel, lengths: Tensor, count: int, inside: Tensor) -> Tensor:
    """Return the blocks ``[N]`` of a model that reads each prompt in both directions.

    Args:
        model: The transformers model.
        lengths: ``[R]`` tokens of each run.
        count: Number of first runs, which are prompts.
        inside: ``[N]``, ``False`` for a response that is resumed.

    Raises:
        ModelError: A prompt exceeds the sliding window, which no layout supports.
    """
    run = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    blocks = torch.where((run < count) & inside, run, -1)
    text: Any = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    longest = int(torch.bincount(blocks[blocks >= 0], minlength=1).max())
    if window is not None and longest > window:
        raise ModelError(
            f"model type {model.config.model_type!r} reads a prompt in both directions, also beyond "
            f"its sliding window of {window} tokens, which is not supported: a prompt has {longest} "
            "tokens; set data.max_prompt_tokens"
        )
    return blocks


def _positions(
    model: PreTrainedModel,
    reader: ModalityEncoder,
    prompts: Segments,
    responses: Segments,
    prompt_of: Tensor | None,
    begun: Sequence[int],
) -> Tensor:
    """Return ``[axes, N]`` positions of the prompts' tokens, then the responses', which continue
    their prompt's as text does."""
    inside = unsampled(prompts.lengths, begun)
    rows = _rope(model, reader, prompts, inside)
    if prompt_of is None or not len(responses):
        return torch.cat(rows, dim=1)
    groups = prompt_of.tolist()
    after = []
    for p, n in zip(groups, responses.lengths.tolist()):
        steps = torch.arange(n, device=prompts.tokens.device)
        # text after media continues from the largest position of all axes
        after.append(rows[p][:, -1].max() + 1 + steps.expand(len(rows[p]), -1))
    # responses with media of their own: the positions depend on prompt and response together
    rich = []
    for b in range(len(groups)):
        if any(int(rows_of.lengths[b]) for rows_of in responses.media.values()):
            rich.append(b)
    if rich:
        index = torch.tensor(rich, device=prompt_of.device)
        whole = _joined(prompts.select(prompt_of[rich]), responses.select(index))
        everywhere = torch.ones_like(whole.tokens, dtype=torch.bool)
        for b, row in zip(rich, _rope(model, reader, whole, everywhere)):
            after[b] = row[:, int(prompts.lengths[groups[b]]) :]
    return torch.cat([*rows, *after], dim=1)


def _joined(first: Segments, second: Segments) -> Segments:
    """Return run b of ``first`` followed by run b of ``second``, as one run."""
    count = len(first)
    # 0, B, 1, B + 1, ...: each run of ``first`` followed by its partner
    order = torch.arange(2 * count, device=first.tokens.device).view(2, -1).t().reshape(-1)
    both = Segments.cat([first, second]).select(order)
    media = {name: Ragged(r.values, r.lengths.view(-1, 2).sum(1)) for name, r in both.media.items()}
    return Segments(both.tokens, both.lengths.view(-1, 2).sum(1), media)


def _rope(
    model: PreTrainedModel, reader: ModalityEncoder, runs: Segments, inside: Tensor
) -> list[Tensor]:
    """Return the positions ``[axes, n]`` of each run."""
    assert reader.positions is not None
    lengths = runs.lengths.tolist()
    if reader.alone and len(runs) > 1 and has_media(runs):
        return _rope_one_by_one(model, reader, runs, inside)
    types = torch.zeros_like(runs.tokens)
    for tower in reader.towers:
        if any(name in runs.media for name in tower.inputs):
            types[_places(model, tower, runs, inside)] = tower.type_id

    def pad(flat: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(lengths)), batch_first=True)

    mask = pad(torch.ones_like(runs.tokens))
    media: dict[str, Tensor] = {}
    for tower in reader.towers:
        media |= given(tower, runs.media, hints=True)
    found = reader.positions(model, pad(runs.tokens), pad(types), mask, media)
    return [row[:, :n] for row, n in zip(found.unbind(1), lengths)]


def _rope_one_by_one(
    model: PreTrainedModel, reader: ModalityEncoder, runs: Segments, inside: Tensor
) -> list[Tensor]:
    """Return the positions ``[axes, n]`` of each run, as its row alone has them.

    HunYuan-VL counts the pictures of all rows of a call.
    """
    found: list[Tensor | None] = []
    for number, own in enumerate(inside.split(runs.lengths.tolist())):
        run = runs.select(torch.tensor([number], device=runs.tokens.device))
        found.append(_rope(model, reader, run, own)[0] if has_media(run) else None)
    axes = next(len(positions) for positions in found if positions is not None)
    steps = torch.arange(int(runs.lengths.max()), device=runs.tokens.device).expand(axes, -1)
    return [steps[:, :n] if row is None else row for row, n in zip(found, runs.lengths.tolist())]


def own_inputs(
    model: PreTrainedModel,
    family: Family,
    batch: Batch,
    packed: Packed,
) -> dict[str, object]:
    """Return the keywords of the model's own forward for ``packed`` rows with media.

    It is slower, and the reference for the layouts.

    Args:
        model: The transformers model.
        family: Row of the model's family.
        batch: Prompts and responses.
        packed: The batch in the ``padded`` layout.
    """
    reader = family.reader
    any_media = has_media(batch.prompts) or has_media(batch.responses)
    own_forward = None if reader is None else reader.own_forward
    if not any_media and not family.is_prefix_lm and own_forward is None:
        return packed.inputs
    if reader is None:
        raise ModelError(f"model type {model.config.model_type!r} cannot read media")
    # without ``final``, the layout leaves out rows without response tokens
    rows = [b for b, n in enumerate(batch.lengths.tolist()) if n or packed.final is not None]
    assert len(rows) == len(packed.input_ids)
    index = torch.tensor(rows, device=batch.prompt_of.device)
    whole = _joined(batch.prompts.select(batch.prompt_of[index]), batch.responses.select(index))
    source = packed.source.view(packed.input_ids.shape)
    made: dict[str, object] = {
        "input_ids": packed.input_ids,
        "attention_mask": (source >= 0).long(),
    }
    made |= own_keywords(model, reader, packed.input_ids, whole.media)
    if family.is_prefix_lm:
        # 0 for the prompt, 1 for the response
        made["token_type_ids"] = (source >= len(batch.prompts.tokens)).long()
    return made


def own_keywords(
    model: PreTrainedModel,
    reader: ModalityEncoder,
    ids: Tensor,
    media: Media,
) -> dict[str, object]:
    """Return the keywords of the model's own forward for the media of some rows.

    Args:
        model: The transformers model.
        reader: The family's towers.
        ids: ``[S, T]`` token ids.
        media: Media by input name.
    """
    made: dict[str, object] = {}
    types = torch.zeros_like(ids)
    for tower in reader.towers:
        if inputs := given(tower, media, hints=True):
            # Not every model casts its inputs.
            made |= in_dtype(tower.adapt(model.config, inputs), tower.inputs, model.dtype)
            types[ids == tower.token_id(model.config)] = tower.type_id
    # families name the same keyword differently
    accepted = set(inspect.signature(model.forward).parameters)
    names = {"mm_token_type_ids", "token_type_ids"} & accepted
    made |= _expert_types(_expert_tokens(model, reader), ids)
    if reader.own_forward is not None:
        made |= reader.own_forward.keywords(model.config, ids, made)
    return dict.fromkeys(names, types) | made
