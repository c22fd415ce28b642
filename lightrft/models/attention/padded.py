"""Rectangles ``[B, L]`` and packed rows ``[1, sum L]``, with their media, as one model call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.models import utils
from lightrft.models.actor import Backbone
from lightrft.models.attention.layouts import Packed
from lightrft.models.attention.segment_plan import SegmentPlan
from lightrft.models.multimodal.merge_inputs import (
    MergedInputs,
    check_readable,
    merge_multimodal_inputs,
    own_keywords,
    unsampled,
)
from lightrft.models.multimodal.own_forward import states_of_call
from lightrft.models.multimodal.towers import Tower
from lightrft.types import Media, Ragged, Segments
from lightrft.utils.errors import ModelError

Given = Mapping[str, Tensor | None]
"""Media by input name, concatenated over all samples; ``None`` for no media."""


@dataclass(slots=True)
class PaddedRows:
    """A caller's rows of tokens.

    Attributes:
        tokens: ``[B, L]``, or ``[1, sum L]`` for packed samples.
        mask: ``[B, L]``, 0 for padding. A packed row holds 1..n for its samples, 0 after the last.
        lengths: Lengths of the samples of a packed row. ``None`` if each row is one sample.
        num_actions: Sampled tokens at the end of each sample: a column count, or one number per
            sample.
    """

    tokens: Tensor
    mask: Tensor
    lengths: Sequence[int] | None
    num_actions: int | Sequence[int] | None

    @staticmethod
    def of(
        tokens: Tensor,
        mask: Tensor | None,
        num_actions: int | Sequence[int] | None,
        lengths: Sequence[int] | None,
        packing: bool,
    ) -> PaddedRows:
        """Build rows.

        Args:
            tokens: ``[B, L]``, or ``[1, sum L]`` for packed samples.
            mask: As in ``PaddedRows``. ``None`` means no padding.
            num_actions: As in ``PaddedRows``.
            lengths: Lengths of the packed samples.
            packing: The rows hold several samples.

        Raises:
            ValueError: Packed rows come without lengths or mask, or do not fit them.
        """
        if not packing:
            mask = torch.ones_like(tokens) if mask is None else mask.long()
            return PaddedRows(tokens, mask, None, num_actions)
        if lengths is None or mask is None:
            raise ValueError(
                "packing_samples is on, so packed_seq_lens and attention_mask must be given"
            )
        if tokens.shape[0] != 1 or sum(lengths) > tokens.shape[1]:
            given = f"sequences {tuple(tokens.shape)}"
            raise ValueError(f"{given} is not one row that holds packed_seq_lens = {list(lengths)}")
        return PaddedRows(tokens, mask, lengths, num_actions)

    @property
    def places(self) -> Tensor:
        """Indices, in the flattened rows, of the states that predict actions.

        They are ``[B, num_actions]``, or ``[1, sum]`` if packed.
        """
        count, width = self.tokens.shape
        device = self.tokens.device
        actions = self.num_actions
        if isinstance(actions, int):
            if not 0 <= actions < width:
                raise ValueError(f"num_actions = {actions} must be below the row length {width}")
            # the state before a token predicts it
            steps = torch.arange(width - actions - 1, width - 1, device=device)
            return torch.arange(count, device=device)[:, None] * width + steps
        if self.lengths is None or actions is None or len(self.lengths) != len(actions):
            problem = "num_actions has one number per sample"
            raise ValueError(f"{problem}, so packed_seq_lens must have as many")
        pieces = []
        end = 0
        for length, some in zip(self.lengths, actions):
            end += length
            pieces.append(torch.arange(max(0, end - some - 1), end - 1, device=device))
        return torch.cat(pieces)[None]

    def states(self, backbone: Backbone, media: Given) -> Tensor:
        """Return the last hidden states ``[B, L, H]``.

        Raises ``ModelError`` for media that do not fit the model or the placeholders.
        """
        if self.lengths is None and bool(
            ((self.mask == 0).diff(dim=1) & (self.mask[:, 1:] != 0)).any()
        ):
            # Some families, such as Llama 4, count chunks from the first column.
            order = (self.mask == 0).long().argsort(dim=1, stable=True)
            moved = PaddedRows(
                self.tokens.gather(1, order), self.mask.gather(1, order), None, self._sampled()
            )
            states = moved.states(backbone, media)
            return states.gather(1, order.argsort(1)[..., None].expand_as(states))
        if self.lengths is not None:
            packed, lengths = self._packed(backbone)
        else:
            real = self.mask != 0
            lengths = real.sum(1).tolist()
            # padding gets position 1: it must be a valid one, and is not read
            positions = (real.long().cumsum(-1) - 1).masked_fill(~real, 1)
            if backbone.family.own_forward is not None:
                backbone.use_attention("padded")
                ids = {"input_ids": self.tokens, "attention_mask": real.long()}
                made = {**ids, "position_ids": positions, **self.keywords(backbone, media)}
                return states_of_call(backbone.base, made)
            source = torch.where(real.flatten(), real.flatten().long().cumsum(0) - 1, -1)
            none = source.new_zeros(0)
            packed = Packed(self.tokens, positions, None, none, None, source, real.long())
        present = {name: values for name, values in media.items() if values is not None}
        seen = self._see(backbone, lengths, present)
        if seen is not None and seen.positions is not None and not backbone.counts_tokens:
            positions = seen.positions[:, packed.source.clamp(min=0)]
            packed.position_ids = positions.unflatten(1, self.tokens.shape)
        return backbone.states(packed, seen)

    def keywords(self, backbone: Backbone, media: Given) -> dict[str, object]:
        """Return the keyword arguments of the model's own forward and generation for ``media``.

        Raises as ``states``.
        """
        rows = {}
        for name, values in media.items():
            if values is not None:
                # as one row: the model's own forward takes the media of all samples together
                rows[name] = Ragged(values, torch.tensor([len(values)]))
        own = backbone.family.own_forward
        if not rows and own is None:
            return {}
        further = {}
        if own is not None:
            # The caller's indices are counted over all rows already.
            taken = set(inspect.signature(backbone.base.forward).parameters)
            read = {name for names in own.inputs.values() for name in names} - set(own.indices)
            further = {name: rows[name].values for name in rows.keys() & taken - read}
        run = Segments(
            self.tokens.flatten(),
            torch.tensor([self.tokens.numel()]),
            {name: values for name, values in rows.items() if name not in further},
        )
        reader = check_readable(backbone.base, backbone.family.reader, (run,))
        return own_keywords(backbone.base, reader, self.tokens, rows) | further

    def _packed(self, backbone: Backbone) -> tuple[Packed, list[int]]:
        """Build one flat row of samples that do not attend to each other. Positions after the last
        sample belong to none."""
        if backbone.family.layout == "padded":
            raise ModelError(
                f"packing_samples: model type {backbone.base.config.model_type!r} cannot be packed"
            )
        assert self.lengths is not None
        width = self.tokens.shape[1]
        # the rest of the row is one more run, to which no sample attends
        lengths = [n for n in [*self.lengths, width - sum(self.lengths)] if n]
        runs = [(end - n, n) for end, n in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths)]
        positions = utils.reset_position_ids(self.mask)
        plan = SegmentPlan(runs, [], positions[0])
        source = torch.arange(width, device=self.tokens.device)
        return Packed(self.tokens, positions, plan, source[:0], None, source), lengths

    def _see(
        self, backbone: Backbone, lengths: list[int], media: dict[str, Tensor]
    ) -> MergedInputs | None:
        is_prefix_lm = backbone.family.is_prefix_lm
        if not media and not is_prefix_lm:
            return None
        # without padding, so that placeholders and features are in the same order
        tokens = self.tokens[self.mask != 0] if self.lengths is None else self.tokens[0]
        sizes = torch.tensor(lengths, device=tokens.device)

        def merged(begun: Sequence[int]) -> MergedInputs | None:
            runs = rows_with_media(backbone, tokens, sizes, media, begun)
            return merge_multimodal_inputs(backbone.base, backbone.family, runs, begun=begun)

        try:
            return merged(self._sampled() if is_prefix_lm else ())
        except ModelError:
            # Placeholders and features differ in number: some placeholder was sampled, which stands
            # for no media. Without the actions the numbers may agree.
            return merged(self._sampled())

    def _sampled(self) -> list[int]:
        """Return the number of actions at the end of each sample."""
        if self.num_actions is None:
            return []
        if isinstance(self.num_actions, int):
            actions = self.mask[:, self.mask.shape[1] - self.num_actions :]
            return actions.sum(1).tolist()
        if self.lengths is None:
            return list(self.num_actions)
        # samples of length 0 are no runs
        return [some for some, length in zip(self.num_actions, self.lengths) if length]


def rows_with_media(
    backbone: Backbone,
    tokens: Tensor,
    lengths: Tensor,
    media: dict[str, Tensor],
    begun: Sequence[int] = (),
) -> Segments:
    """Return samples with their media.

    Args:
        backbone: The model.
        tokens: ``[N]`` tokens of all samples, without padding.
        lengths: ``[B]``.
        media: Media by input name, concatenated over all samples.
        begun: Last tokens of each sample in which no placeholder stands for media.

    Media tensors do not say which rows belong to which sample. But they are in order,
    and exactly the samples with placeholders have media. The placeholders of an item are a run, or
    are as many as its grid lets expect.
    """
    of = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths)
    real = unsampled(lengths, begun)
    reader = backbone.family.reader
    ragged = {}
    for name, values in media.items():
        ragged[name] = Ragged(values.to(tokens.device), torch.zeros_like(lengths))
    for tower in () if reader is None else reader.towers:
        places = ((tokens == tower.token_id(backbone.base.config)) & real).nonzero()[:, 0]
        if len(places):
            for name, share in _shares(tower, places, of, len(lengths), ragged).items():
                ragged[name].lengths = share
    for rows in ragged.values():
        rows.lengths[0] += len(rows.values) - int(rows.lengths.sum())
    return Segments(tokens, lengths, ragged)


def _shares(
    tower: Tower, places: Tensor, of: Tensor, count: int, media: Media
) -> dict[str, Tensor]:
    """Return the number of rows ``[B]`` of each input of ``tower`` that each sample has.

    Args:
        tower: The tower.
        places: ``[P]`` the placeholders, in order.
        of: ``[N]`` the sample of each token.
        count: Number of samples.
        media: Media by input name.
    """
    shares = {}
    grids = [media[name].values for name in tower.inputs if name in media and name.endswith(GRIDS)]
    placed = of[places]
    begins = torch.ones_like(places, dtype=torch.bool)
    begins[1:] = (places.diff() > 1) | (placed.diff() > 0)
    owner = placed[begins]
    sizes = grids[0].prod(-1) if grids else placed[:0]
    if len(sizes) not in (0, len(owner)):
        middles = sizes.cumsum(0) - sizes // 2
        owner = placed[middles * len(placed) // int(sizes.sum())]
    # one row for each sample with a placeholder, as far as they go; the last gets the rest
    having = placed.unique()
    for name in tower.inputs:
        if name not in media:
            continue
        rows = len(media[name].values)
        owners, patches = having[:rows], torch.ones_like(having[:rows])
        if len(sizes) and rows in (len(sizes), int(sizes.sum())):
            owners, patches = owner, sizes if rows > len(sizes) else torch.ones_like(sizes)
        elif rows:
            patches[-1] += rows - len(owners)
        none = torch.zeros(count, dtype=torch.long, device=placed.device)
        shares[name] = none.index_add_(0, owners, patches)
    return shares


GRIDS = ("_grid_thw", "target_sizes")
"""Endings of the names of the patches ``[items, axes]`` along each axis of an item."""
