"""Reading of message parts and media items, whose keys are closed.

Each key is the content of an item, its description, or a setting of how the model gets it. Other
keys are refused, so that nothing in a row is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightrft.datasets.media.fetch import RAW, is_missing
from lightrft.datasets.row_tables import MalformedRow
from lightrft.utils.errors import did_you_mean

KINDS = ("image", "video", "audio")
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of text parts: those of chat completions, and of OpenAI's responses."""
_NAMED = ("path", "file", "url", "source")
_ABOUT = ("format", "media_type", "mime_type")
"""Keys that name the format of a file. The format is read from the file itself."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting of an item.

    Attributes:
        field: name of the field of ``Item``.
        kinds: media kinds that have it.
        read: converts the value. Raises ``ValueError`` with the reason.
    """

    field: str
    kinds: tuple[str, ...]
    read: Callable[[object], Any]


def _whole(value: object, unit: str) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # inf % 1 and nan % 1 are nan, so both are refused
    if not is_number or value % 1 != 0 or value < 1:
        raise ValueError(f"not a number of {unit}")
    return int(value)


_pixels = partial(_whole, unit="pixels")
_frames = partial(_whole, unit="frames")
_hertz = partial(_whole, unit="samples a second")


def _rate(value: object) -> float:
    rate = _number(value)
    # nan fails every comparison
    if not 0 < rate < math.inf:
        raise ValueError("not a number of frames a second above 0")
    return rate


def _second(value: object) -> float:
    second = _number(value)
    if not 0 <= second < math.inf:
        raise ValueError("not a number of seconds from 0")
    return second


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


_SEEN = ("image", "video")
SETTINGS: Mapping[str, _Setting] = {
    "min_pixels": _Setting("min_pixels", _SEEN, _pixels),
    "max_pixels": _Setting("max_pixels", _SEEN, _pixels),
    "total_pixels": _Setting("total_pixels", ("video",), _pixels),
    "resized_height": _Setting("height", _SEEN, _pixels),
    "resized_width": _Setting("width", _SEEN, _pixels),
    "fps": _Setting("fps", ("video",), _rate),
    "sample_fps": _Setting("fps", ("video",), _rate),
    "nframes": _Setting("nframes", ("video",), _frames),
    "num_frames": _Setting("nframes", ("video",), _frames),
    "min_frames": _Setting("min_frames", ("video",), _frames),
    "max_frames": _Setting("max_frames", ("video",), _frames),
    "video_start": _Setting("start", ("video",), _second),
    "video_end": _Setting("end", ("video",), _second),
    "sampling_rate": _Setting("sampling_rate", ("audio",), _hertz),
}
"""Settings of an item, by the names of ``qwen-vl-utils`` and of transformers' processors."""
KEYS: Mapping[str, str] = {one.field: key for key, one in reversed(SETTINGS.items())}
"""The first key of each field of ``Item``."""


def kind_of(part: Mapping[str, object]) -> str | None:
    """Return the media kind of a content part, or None for text and unknown types.

    A part without a type is of the kind whose content it has.
    """
    if is_missing(part.get("type")):
        given = [kind for kind in KINDS if any(key in part for key in _contents(kind)[:3])]
        return given[0] if len(given) == 1 and "text" not in part else None
    name = str(part["type"]).removeprefix("input_").removesuffix("_url")
    return name if name in KINDS else None


def text_of(part: Mapping[str, object], where: str) -> str | None:
    """Return the text of a text part, or None for a part of another type.

    Raises ``MalformedRow`` for a text that is none, or an unknown key.
    """
    if part.get("type", "text") not in TEXT_TYPES:
        return None
    text = part.get("text")
    if not isinstance(text, str):
        raise MalformedRow(f"{where}: text of a content part is {text!r}, not a text")
    for key, value in part.items():
        if key not in ("type", "text") and not is_missing(value):
            raise _unknown(key, ("type", "text"), "part of type 'text'", where)
    return text


def read_part(part: Mapping[str, object], kind: str, where: str) -> tuple[object, dict[str, Any]]:
    """Return the content of a media part or item, and its settings as fields of ``Item``.

    The content is None for a part that only marks a position.

    Args:
        part: the part of a message, or the mapping that stands for an item.
        kind: its media kind.
        where: location of the part, for messages.

    Raises:
        MalformedRow: a key is unknown, a value is not of its type, two keys name different
            contents, or two settings exclude each other.
    """
    settings: dict[str, Any] = {}
    content = _read(part, kind, where, settings)
    _check_settings(settings, where)
    return content, settings


def _read(part: Mapping[str, object], kind: str, where: str, settings: dict[str, Any]) -> object:
    """Return the content of ``part``, and add its settings to ``settings``."""
    known = _contents(kind)
    contents: dict[str, object] = {}
    for key, value in part.items():
        if value is None or key == "type" or key in _ABOUT:
            continue
        setting = SETTINGS.get(key)
        if setting is not None and kind in setting.kinds:
            _set(settings, key, value, where)
        elif is_missing(value):
            continue
        elif key in known:
            contents[key] = value
        elif key == "detail" and kind == "image":
            # OpenAI's word for fewer pixels
            if value not in ("auto", "high"):
                problem = f"detail is {value!r}, and this model takes images at its own resolution"
                raise MalformedRow(f"{where}: {problem}; set max_pixels for a smaller one")
        else:
            names = (*known, *(name for name, of in SETTINGS.items() if kind in of.kinds))
            raise _unknown(key, names, f"part of type {kind!r}", where)
    if "array" in contents and "sampling_rate" in settings:
        contents["sampling_rate"] = settings["sampling_rate"]
    return _content(contents, kind, where, settings)


def _content(
    contents: dict[str, object], kind: str, where: str, settings: dict[str, Any]
) -> object:
    """Return the only content of ``contents``."""
    raw = [key for key in contents if key in RAW]
    # files of the hub have the content and the path that it had elsewhere
    names = raw or [key for key in contents if key != "sampling_rate"]
    if not names:
        return None
    if len(names) > 1:
        both = " and ".join(map(repr, names))
        raise MalformedRow(f"{where}: {both} name the content of one {kind}; keep one of them")
    if raw:
        return contents
    value = contents[names[0]]
    if isinstance(value, Mapping):
        return _read(value, kind, where, settings)
    return value


def _contents(kind: str) -> tuple[str, ...]:
    """Return the keys that can hold the content of ``kind``."""
    return (kind, f"{kind}_url", f"input_{kind}", *_NAMED, *RAW)


def _set(settings: dict[str, Any], key: str, value: object, where: str) -> None:
    setting = SETTINGS[key]
    if setting.field in settings:
        raise MalformedRow(f"{where}: {key} is set twice, also by another name; keep one of them")
    try:
        settings[setting.field] = setting.read(value)
    except ValueError as error:
        raise MalformedRow(f"{where}: {key} is {value!r}, {error}") from None


def _check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise ``MalformedRow`` for settings that exclude each other."""
    problem = ""
    if "fps" in settings and "nframes" in settings:
        problem = "both fps and nframes; they exclude each other"
    elif ("height" in settings) != ("width" in settings):
        problem = "resized_height and resized_width belong together; set both"
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        if settings.get(low, 0) > settings.get(high, math.inf):
            problem = f"{low} is {settings[low]}, more than {high} = {settings[high]}"
    if settings.get("start", 0) > settings.get("end", math.inf):
        problem = f"video_start is {settings['start']:g}, after video_end = {settings['end']:g}"
    if problem:
        raise MalformedRow(f"{where}: {problem}")


def _unknown(key: object, known: tuple[str, ...], what: str, where: str) -> MalformedRow:
    hint = did_you_mean(str(key), known) or f"; known: {', '.join(known)}"
    return MalformedRow(f"{where}: unknown key {key!r} of a {what}{hint}")
