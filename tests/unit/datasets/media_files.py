"""Real pictures, sounds and clips written for a test, and models that read them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from lightrft.config.data import DataConfig, MediaConfig


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth, so that lossy formats keep it."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR))


def picture(
    path: Path, height: int = 20, width: int = 30, seed: int = 0, **options: Any
) -> np.ndarray:
    array = pixels(height, width, seed)
    Image.fromarray(array).save(path, **options)
    return array


def encoded(array: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, form, **options)
    return file.getvalue()


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(
        np.float32
    )


def sound(path: Path, seconds: float = 0.5, rate: int = 16000, **options: Any) -> np.ndarray:
    values = tone(seconds, rate)
    soundfile.write(path, values, rate, **options)
    return values


def clip(
    path: Path,
    frames: int = 12,
    rate: int = 8,
    height: int = 32,
    width: int = 48,
    codec: str = "mpeg4",
    hidden: Iterable[int] = (),
) -> None:
    """Frame k is the grey 20 * k, up to 240. Those of ``hidden`` are sent but not shown, as VP8 does with frames to refer to."""
    import av

    def sent(packet: Any, number: int) -> Any:
        data = bytearray(bytes(packet))
        data[0] &= ~0x10  # show_frame of RFC 6386, 9.1
        twin = av.Packet(bytes(data))
        for name in ("pts", "dts", "time_base", "stream", "is_keyframe"):
            setattr(twin, name, getattr(packet, name))
        return twin if number in hidden else packet

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4_000_000
        greys = (np.full((height, width, 3), min(20 * k, 240), np.uint8) for k in range(frames))
        packets = [
            p
            for grey in greys
            for p in stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24"))
        ]
        for number, packet in enumerate((*packets, *stream.encode())):
            container.mux(sent(packet, number))


def written(folder: Path, rows: Iterable[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config_of(source: Any, *, media: dict[str, Any] | None = None, **settings: Any) -> DataConfig:
    return DataConfig(
        sources=(source,) if isinstance(source, str) else source,
        media=MediaConfig(**(media or {})),
        **settings,
    )
