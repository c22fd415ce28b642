"""Decoding of sound to one channel ``[N]`` float32 at a model's sampling rate.

Raises ``ValueError`` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lightrft.datasets.media.fetch import Content, Samples, stream
from lightrft.datasets.media.video import opened
from lightrft.utils.atomic_files import human_bytes
from lightrft.utils.errors import DataError, install_extra

HIGHEST_RATE = 1_000_000
SAMPLE_BYTES = 12
"""Memory of one sample during decoding or resampling, in bytes: one float32 and one float64."""
_BLOCK = 1 << 18
"""Number of values decoded per step."""
_BANK = 1 << 19
"""Largest number of values of a cached filter bank. Larger filter banks are computed in parts."""
_EXACT = ("WAV", "WAVEX", "FLAC", "AIFF", "RF64", "W64", "AU", "CAF")
"""Formats whose headers have the exact number of samples."""
_CROSSINGS, _BETA = 24, 9.0
"""Zero crossings of the resampling filter on each side, and the beta of its Kaiser window."""


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """Settings for decoding sound.

    Args:
        rate: sampling rate of the model in Hz.
        resample: if True, sound of another rate is resampled. Otherwise it is refused.
        max_seconds: longest duration in seconds. None means no limit.
        most_bytes: largest memory for decoding, in bytes.
        declared: sampling rate that the row states, in Hz. None means no such rate.
    """

    rate: int
    resample: bool
    max_seconds: float | None
    most_bytes: float = math.inf
    declared: int | None = None

    def check(self, samples: int, rate: int) -> None:
        """Raise ``ValueError`` if the sampling rate or the number of ``samples`` is refused."""
        if not 1 <= rate <= HIGHEST_RATE:
            raise ValueError(f"the sound has a rate of {rate}")
        if self.declared not in (None, rate):
            problem = f"sampling_rate is {self.declared}, and the sound has {rate} samples a second"
            raise ValueError(f"{problem}; leave it out, or convert the file")
        if rate != self.rate and not self.resample:
            problem = f"the sound has {rate} samples a second, the model takes {self.rate}"
            raise ValueError(f"{problem}; set data.media.resample: true")
        if self.max_seconds is not None and samples > self.max_seconds * rate:
            reason = f"the sound lasts {samples / rate:.1f} s"
            raise ValueError(f"{reason}, more than data.media.max_seconds = {self.max_seconds:g}")
        # the decoded samples and the resampled ones are in memory together
        size = SAMPLE_BYTES * (samples + samples * self.rate / rate)
        if size > self.most_bytes:
            taken = f"to decode {samples / rate:.1f} s of sound takes {human_bytes(size)}"
            limit = f"data.media.max_decoded_mb = {self.most_bytes / 2**20:g}"
            raise ValueError(f"{taken}, more than {limit}")


def sound_length(content: Content, hearing: AudioSettings) -> int:
    """Return the number of samples after resampling, N.

    It is read from the header if that is exact, else by decoding.
    """
    if isinstance(content, Path | bytes):
        info = _header(content)
        if info is not None:
            return _length(info.frames, info.samplerate, hearing)
    rate, blocks = _blocks(content, hearing)
    return _length(sum(map(len, blocks)), rate, hearing)


def read_sound(content: Content, hearing: AudioSettings) -> np.ndarray:
    """Return the mean of all channels, resampled to ``hearing.rate``, ``[N]`` float32."""
    rate, blocks = _blocks(content, hearing)
    # the empty block is for a sound without any, which _length() refuses
    values = np.concatenate([np.empty(0, np.float32), *blocks])
    length = _length(len(values), rate, hearing)
    if not np.isfinite(values).all():
        raise ValueError("the sound holds values that are not finite")
    return resampled(values, rate, hearing.rate)[:length]


def resampled(values: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Resample ``values [N]`` with a windowed-sinc polyphase filter.

    Args:
        values: samples ``[N]``.
        rate: sampling rate of ``values``.
        wanted: sampling rate of the result.

    Returns:
        Samples ``[ceil(N * wanted / rate)]`` float32.
    """
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    if up == down:
        return values.astype(np.float32)
    reach = math.ceil(_CROSSINGS / min(1.0, up / down))
    taps = 2 * reach + 1
    length = -(-len(values) * up // down)
    # In float64: a sum has hundreds of terms, and is rounded to float32 once, at the end.
    padded = np.pad(values.astype(np.float64), (reach, reach + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    out = np.empty(length)
    fits = up * taps <= _BANK
    part = max(1, _BANK // taps)
    for base in range(0, min(up, length), part):
        firsts = range(base, min(base + part, up, length))
        phases = [first * down % up for first in firsts]
        bank = _whole_bank(up, down)[phases] if fits else _filters(up, down, np.array(phases))
        for first, row in zip(firsts, bank):  # outputs first, first + up, ... have the same phase
            count = -(-(length - first) // up)
            out[first::up] = windows[first * down // up :: down][:count] @ row
    return out.astype(np.float32)


@lru_cache(maxsize=4)
def _whole_bank(up: int, down: int) -> np.ndarray:
    return _filters(up, down, np.arange(up))


def _filters(up: int, down: int, phases: np.ndarray) -> np.ndarray:
    """Return filters ``[phases, taps]``: one low-pass filter of sum 1 for each of ``phases``.

    A phase is a position between two samples, in units of ``1 / up``.
    """
    cutoff = min(1.0, up / down)
    reach = math.ceil(_CROSSINGS / cutoff)
    taps = np.arange(-reach, reach + 1)[None, :] - phases[:, None] / up
    window = np.i0(_BETA * np.sqrt(np.clip(1 - (taps / (reach + 1)) ** 2, 0, None))) / np.i0(_BETA)
    bank = cutoff * np.sinc(cutoff * taps) * window
    return bank / bank.sum(axis=1, keepdims=True)


def _length(samples: int, rate: int, hearing: AudioSettings) -> int:
    if samples < 1:
        raise ValueError("the sound is empty")
    hearing.check(samples, rate)
    return -(-samples * hearing.rate // rate)


def _blocks(content: Content, hearing: AudioSettings) -> tuple[int, Iterator[np.ndarray]]:
    """Return the rate, and the mean of the channels in blocks ``[n]`` in [-1, 1].

    Decoding stops when there are too many samples.
    """
    if isinstance(content, Samples):
        hearing.check(max(content.values.shape, default=0), content.rate)
        return content.rate, iter([_mono(_scaled(content.values))])
    if not isinstance(content, Path | bytes):
        problem = f"{type(content).__name__} has no sampling rate"
        raise ValueError(f"{problem}; write {{'array': ..., 'sampling_rate': ...}}")
    library = _soundfile()
    try:
        file = library.SoundFile(stream(content))
    except library.LibsndfileError as error:
        return _of_container(content, str(error), hearing)
    return int(file.samplerate), _checked(_read(file, library), int(file.samplerate), hearing)


def _checked(
    blocks: Iterable[np.ndarray], rate: int, hearing: AudioSettings
) -> Iterator[np.ndarray]:
    count = 0
    hearing.check(count, rate)
    for block in blocks:
        count += len(block)
        hearing.check(count, rate)
        yield block


def _read(file: Any, library: ModuleType) -> Iterator[np.ndarray]:
    with file:
        count = max(1, _BLOCK // file.channels)
        try:
            while len(block := file.read(count, dtype="float32", always_2d=True)):
                yield block.mean(axis=1)
        except library.LibsndfileError as error:
            raise ValueError(f"the sound is damaged: {error}") from None


def _header(content: Path | bytes) -> Any:
    """Return the header, or None for a format whose header may be inexact."""
    library = _soundfile()
    try:
        info = library.info(stream(content))
    except library.LibsndfileError:
        return None
    return info if info.format in _EXACT else None


def _of_container(
    content: Path | bytes, problem: str, hearing: AudioSettings
) -> tuple[int, Iterator[np.ndarray]]:
    """Return rate and blocks of sound that only FFmpeg can read, such as AAC."""
    try:
        import av
    except ImportError:
        raise ValueError(
            f"{problem} (with {install_extra('video')} more formats can be read)"
        ) from None
    found: list[np.ndarray] = []
    try:
        with opened(av, content) as container:
            if not container.streams.audio:
                raise ValueError("no sound in the file")
            source = container.streams.audio[0]
            # Keeps the channels: FFmpeg's mix from stereo to mono is louder than their mean.
            convert = av.AudioResampler(format="fltp", rate=source.rate)
            # None makes the resampler return the samples that it still has
            given = chain(container.decode(source), [None])
            frames = chain.from_iterable(map(convert.resample, given))
            blocks = (frame.to_ndarray().mean(axis=0) for frame in frames)
            found += _checked(blocks, int(source.rate), hearing)
            return int(source.rate), iter(found)
    except av.FFmpegError as error:
        raise ValueError(f"the sound cannot be read: {problem}; {error.strerror}") from None


def _soundfile() -> ModuleType:
    try:
        import soundfile
    except ImportError:
        raise DataError(f"reading sound needs soundfile: {install_extra('audio')}") from None
    return soundfile


def _scaled(values: np.ndarray) -> np.ndarray:
    # WAV files of 8 bits have no sign, and their silence is 128.
    if values.dtype == np.uint8:
        return (values.astype(np.float32) - 128) / 128
    if values.dtype.kind == "i" and values.dtype.itemsize <= 4:
        return values.astype(np.float32) / (1 << (8 * values.dtype.itemsize - 1))
    if values.dtype.kind != "f":
        raise ValueError(
            f"sound must be floating-point numbers in [-1, 1] or int16, not {values.dtype}"
        )
    return values.astype(np.float32)


def _mono(values: np.ndarray) -> np.ndarray:
    if values.ndim == 1:
        return values
    if values.ndim != 2:
        problem = f"an array of shape {values.shape} is no sound"
        raise ValueError(f"{problem}; it must be [samples] or [channels, samples]")
    # there are fewer channels than samples
    return values.mean(axis=int(np.argmin(values.shape)))
