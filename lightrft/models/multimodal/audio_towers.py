"""Audio towers: log-mel frames in, one feature for every few frames out.

The frames of all clips are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from lightrft.models.multimodal.towers import (
    IMAGE,
    TIMED_VIDEO,
    Blank,
    Features,
    ModalityEncoder,
    Tower,
)

# frames after a clip's last that the two convolutions of a Whisper encoder (width 3 each) read
_AROUND = 2
# frames after a clip's last whose window of samples, up to four hops wide, reaches back into it
_SPILL = 2


def frames_around(frames: int, window: int) -> int:
    """Return the number of frames that a clip's features depend on.

    The tower masks the rest of its ``window``, so only its convolutions read past the clip.
    """
    return min(frames + _AROUND, window)


def frames_alone(frames: int, window: int = 0) -> int:
    """Return the number of frames that a clip's features depend on.

    The tower adds no padding, so these are the clip's frames.
    """
    return frames


def frames_to_silence(frames: int, window: int) -> int:
    """Return the number of frames that a clip's features depend on.

    The tower reads silence up to the end of the last window, whose frames are all equal. So the
    count ends with one frame of silence, unless the window ends before.
    """
    return min(frames + _SPILL + 1, -(-frames // window) * window)


def qwen2_audio_features(frames: int) -> int:
    """Return the number of features of a clip of ``frames``.

    They come from a convolution of stride 2, then means of two.
    """
    return ((frames - 1) // 2 + 1) // 2


def omni3_features(frames: int, window: int) -> int:
    """Return the number of features of a clip of ``frames``.

    Three convolutions of stride 2 read pieces of ``2 * window`` frames each.

    Args:
        frames: Frames of the clip.
        window: Half of the frames of a piece, of the tower's config.
    """
    whole, rest = divmod(frames, 2 * window)
    # The length of a whole piece is written as a number in the model's class.
    return 13 * whole + -(-rest // 8)


def _clips(
    inputs: dict[str, Tensor],
    window: int,
    kept: Callable[[int, int], int],
) -> tuple[list[Tensor], Tensor]:
    """Return the frames ``[k, mels]`` of each clip, and the number of them that belong to the clip
    itself."""
    own = inputs["feature_lengths"]
    lengths = [kept(n, window) for n in own.tolist()]
    return list(inputs["input_features"].split(lengths)), own


def _window(config: PreTrainedConfig) -> int:
    """Return the frames of the tower's window."""
    # the tower's second convolution halves the frames
    return 2 * config.audio_config.max_source_positions


def voxtral_features(frames: int, window: int, stacked: int) -> int:
    """Return the number of features of a clip, whose last window is padded to full length.

    Args:
        frames: Frames of the clip.
        window: Frames of a window.
        stacked: Encoder states that make one feature.
    """
    return -(-frames // window) * (window // 2) // stacked


def _qwen2_audio(model: Any, inputs: dict[str, Tensor]) -> Features:
    """Run ``audio_tower`` and projector as the model's own forward does, but only on the given
    frames.

    The model's own forward pads every clip to its window of 30 seconds and masks the padding. The
    numbers are the same.
    """
    tower = model.model.audio_tower
    clips, own = _clips(inputs, _window(model.config), frames_around)
    weight = tower.conv1.weight
    # padded to the longest clip of the call only
    mels = pad_sequence(clips, batch_first=True).to(weight.device, weight.dtype).transpose(1, 2)
    states = gelu(tower.conv2(gelu(tower.conv1(mels)))).transpose(1, 2)
    states = states + tower.embed_positions.weight[: states.shape[1]]
    states = torch.nn.functional.dropout(states, p=tower.dropout, training=tower.training)
    steps = torch.arange(states.shape[1], device=states.device)
    seen = (steps < ((own.to(states.device) - 1) // 2 + 1)[:, None]).long()
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=states, attention_mask=seen)
    for layer in tower.layers:
        # Stochastic depth, with the same random numbers as in the tower's own forward.
        if not (tower.training and tower.layerdrop > 0 and torch.rand([]) < tower.layerdrop):
            states = layer(states, mask)
    states = tower.layer_norm(tower.avg_pooler(states.transpose(1, 2)).transpose(1, 2))
    features = model.model.multi_modal_projector(states)
    counts = [qwen2_audio_features(n) for n in own.tolist()]
    return Features(torch.cat([row[:n] for row, n in zip(features, counts, strict=True)]))


def _own_frames(
    clips: Sequence[Tensor],
    lengths: Sequence[int] | None,
    places: Sequence[int] | None,
) -> list[int]:
    """Return the number of valid frames of each clip ``[mels, T]``.

    Without ``lengths`` all frames are valid, unless they would make more features than the clip has
    placeholders. Then as many are valid as make that number of features.
    """
    if lengths is not None:
        return list(lengths)
    own = [clip.shape[1] for clip in clips]
    if places is None:
        return own
    for i, (frames, features) in enumerate(zip(own, places, strict=True)):
        if qwen2_audio_features(frames) > features:
            # four frames make one feature
            own[i] = 4 * features
    return own


def _concatenated(
    clips: Sequence[Tensor], kept: Sequence[int], own: list[int]
) -> dict[str, Tensor]:
    """Return the media of ``clips [mels, T]``: the first ``kept`` frames of each, padded with
    zeros, of which ``own`` belong to the clip."""
    frames = []
    for clip, n in zip(clips, kept, strict=True):
        frames.append(torch.nn.functional.pad(clip[:, :n], (0, max(0, n - clip.shape[1]))))
    return {
        "input_features": torch.cat(frames, dim=1).t().contiguous(),
        "feature_lengths": torch.tensor(own),
    }


def _qwen2_audio_arranged(
    model: PreTrainedModel,
    clips: Sequence[Tensor],
    lengths: Sequence[int] | None,
    places: Sequence[int] | None,
) -> dict[str, Tensor]:
    window = _window(model.config)
    own = _own_frames([clip[:, :window] for clip in clips], lengths, places)
    return _concatenated(clips, [frames_around(n, window) for n in own], own)


def _qwen2_audio_own(config: PreTrainedConfig, inputs: dict[str, Tensor]) -> dict[str, object]:
    window = _window(config)
    clips, own = _clips(inputs, window, frames_around)
    # the model's own forward takes clips of the full window alone
    full = [torch.nn.functional.pad(clip, (0, 0, 0, window - len(clip))) for clip in clips]
    mels = torch.stack(full)
    mask = torch.arange(window, device=own.device) < own[:, None]
    return {"input_features": mels.transpose(1, 2), "feature_attention_mask": mask.long()}


def _voxtral(config: PreTrainedConfig, inputs: dict[str, Tensor]) -> dict[str, object]:
    """Return full windows ``[W, mels, window]``, since the tower also reads the silence after a
    clip."""
    window = _window(config)
    clips, _ = _clips(inputs, window, frames_to_silence)
    # the last kept frame is silence, which fills the window
    whole = [torch.cat([c, c[-1:].expand(-len(c) % window, -1)]) for c in clips]
    return {"input_features": torch.cat(whole).unflatten(0, (-1, window)).transpose(1, 2)}


def _voxtral_arranged(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    lengths: Sequence[int] | None,
    places: Sequence[int] | None,
) -> dict[str, Tensor]:
    """Return the media of ``windows [mels, T]`` each, all of whose frames are valid."""
    own = [_window(model.config)] * len(windows)
    return _concatenated(windows, own, own)


def _omni_own(config: PreTrainedConfig, inputs: dict[str, Tensor]) -> dict[str, object]:
    """Return the keywords of the tower, which cuts clips into separate pieces without padding. It
    needs only a clip's frames."""
    clips, own = _clips(inputs, 0, frames_alone)
    mels = pad_sequence(clips, batch_first=True)
    mask = torch.arange(mels.shape[1], device=own.device) < own[:, None]
    return {"input_features": mels.transpose(1, 2), "feature_attention_mask": mask.long()}


def _omni(model: Any, inputs: dict[str, Tensor]) -> Features:
    output = model.get_audio_features(**_omni_own(model.config, inputs), return_dict=True)
    return Features(output.last_hidden_state)


def _omni_arranged(
    model: PreTrainedModel,
    clips: Sequence[Tensor],
    lengths: Sequence[int] | None,
    places: Sequence[int] | None,
) -> dict[str, Tensor]:
    own = _own_frames(clips, lengths, places)
    return _concatenated(clips, own, own)


def _omni3_arranged(
    model: PreTrainedModel,
    clips: Sequence[Tensor],
    lengths: Sequence[int] | None,
    places: Sequence[int] | None,
) -> dict[str, Tensor]:
    own = list(lengths or [clip.shape[1] for clip in clips])
    window = model.config.audio_config.n_window
    for i, features in enumerate(places or ()):
        # Without lengths, a clip has no more frames than make its number of features.
        while omni3_features(own[i], window) > features:
            own[i] -= 1
    return _concatenated(clips, own, own)


def _omni_video(config: PreTrainedConfig, inputs: dict[str, Tensor]) -> dict[str, object]:
    # Qwen2.5-Omni names this input differently than Qwen2.5-VL
    names = {"second_per_grid_ts": "video_second_per_grid"}
    return {names.get(name, name): values for name, values in inputs.items()}


def _omni_positions(
    model: Any,
    ids: Tensor,
    types: Tensor,
    mask: Tensor,
    media: dict[str, Tensor],
) -> Tensor:
    """Return positions by the model's own ``get_rope_index``, which reads the tokens of media and
    the marks before them.

    Both are hidden from it where they stand for no media.
    """
    real = types > 0
    # The token before each run of placeholders: its mark.
    first = torch.nn.functional.pad(real[:, 1:], (0, 1)) & ~real
    return model.get_rope_index(
        # -1 is no token id, so get_rope_index finds no media there
        torch.where(real | first, ids, -1),
        media.get("image_grid_thw"),
        media.get("video_grid_thw"),
        mask,
        audio_seqlens=media.get("feature_lengths"),
        second_per_grids=media.get("second_per_grid_ts"),
    )[0]


def _clip_blank(kept: Callable[[int, int], int]) -> Blank:
    """Build a blank of one clip of eight frames, with the frames after it that the tower needs."""

    def blank(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, Tensor]:
        audio = model.config.audio_config
        frames = kept(8, 2 * audio.max_source_positions)
        return {names[0]: torch.zeros(frames, audio.num_mel_bins), names[1]: torch.tensor([8])}

    return blank


_INPUTS = ("input_features", "feature_lengths")
_PARTS = {"tower": ("model.audio_tower.",), "projector": ("model.multi_modal_projector.",)}
_QWEN2_AUDIO = Tower(
    "audio",
    _INPUTS,
    "audio_token_index",
    adapt=_qwen2_audio_own,
    compute=_qwen2_audio,
    arrange=_qwen2_audio_arranged,
    blank=_clip_blank(frames_around),
)
_VOXTRAL = Tower(
    "audio",
    _INPUTS,
    "audio_token_id",
    "get_audio_features",
    _voxtral,
    arrange=_voxtral_arranged,
    blank=_clip_blank(frames_to_silence),
)
QWEN2_AUDIO = ModalityEncoder((_QWEN2_AUDIO,), parts=_PARTS)
VOXTRAL = ModalityEncoder((_VOXTRAL,), parts=_PARTS)
_OMNI = (
    IMAGE,
    replace(TIMED_VIDEO, adapt=_omni_video),
    Tower(
        "audio",
        _INPUTS,
        "audio_token_id",
        adapt=_omni_own,
        compute=_omni,
        type_id=3,
        arrange=_omni_arranged,
        blank=_clip_blank(frames_alone),
    ),
)
_OMNI_PARTS = {  # with and without a prefix: older releases of transformers have none
    "tower": ("model.audio_tower.", "model.visual.", "audio_tower.", "visual."),
    "projector": (
        "model.audio_tower.proj.",
        "model.visual.merger.",
        "audio_tower.proj.",
        "visual.merger.",
    ),
}
_OMNI_UNREAD = ("model.audio_tower.audio_bos_eos_token.", "audio_tower.audio_bos_eos_token.")
_OMNI_MARKS = ("audio_start_token_id", "vision_start_token_id")
OMNI = ModalityEncoder(_OMNI, _omni_positions, _OMNI_PARTS, unread=_OMNI_UNREAD, marks=_OMNI_MARKS)
_OMNI3_PARTS = {
    "tower": ("model.audio_tower.", "model.visual."),
    "projector": (
        *("model.audio_tower.proj1.", "model.audio_tower.proj2."),
        *("model.visual.merger.", "model.visual.merger_list."),
    ),
}
OMNI3 = ModalityEncoder(
    (*_OMNI[:2], replace(_OMNI[2], arrange=_omni3_arranged)),
    _omni_positions,
    _OMNI3_PARTS,
    marks=_OMNI_MARKS,
)
