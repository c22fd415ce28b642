"""Any family, by its own transformers processor.

The processor writes the placeholders of an item and computes the tensors. It is tried on items of
several sizes, alone and together, which shows how the tensors of several items are joined.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import (
    get_class_from_dynamic_module,
    get_relative_import_files,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchaudio_available, is_torchvision_available

from lightrft.config.model import ModelConfig
from lightrft.models.families import family_of
from lightrft.models.loading.processor_files import PROCESSOR_FILES, processor_texts
from lightrft.models.multimodal.derived import AXIS, SHAPE, padded, places_name
from lightrft.models.multimodal.towers import OwnForward, Tower
from lightrft.models.processors.base import (
    Bounds,
    ModalityProcessor,
    bounded,
    newer,
    token_text,
    within,
)
from lightrft.models.processors.frames import EvenFrames
from lightrft.types import Extent
from lightrft.utils.errors import DataError, first_line

_TRIED = {
    "image": ((40, 60, 3), (24, 72, 3), (72, 24, 3)),
    "video": ((2, 24, 36, 3), (2, 36, 24, 3)),
    "audio": ((7000,), (12000,), (3000,)),
}
"""Shapes of the items by which the rules of a processor are found."""

_CLIP_FRAMES = ("LlavaNextVideoProcessor", "VideoLlavaProcessor")
"""Processors whose processor of clips resizes, crops and normalizes frames as that of CLIP's
pictures does."""


def build(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the parts of the family's own processor.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholders and marks.

    Raises:
        ValueError: The processor cannot be built, or does something that is not known here.
    """
    reader = family_of(settings).reader
    assert reader is not None
    processor, files = _load(config, settings, tokenizer)
    readable = {
        "image": hasattr(processor, "image_processor"),
        "video": isinstance(getattr(processor, "video_processor", None), _Frames),
        "audio": _sounds(processor) is not None,
    }
    parts: dict[str, ModalityProcessor] = {}
    own_forward = reader.own_forward or OwnForward()
    for tower in reader.towers:
        # A family's own models may lack a tower.
        section = "vision_config" if tower.kind == "image" else f"{tower.kind}_config"
        if readable.get(tower.kind) and vars(settings).get(section, 0) is not None:
            token = token_text(tokenizer, tower.token_id(settings))
            parts[tower.kind] = _part(processor, tower, token, files, own_forward)
    if not parts:
        raise ValueError(f"{type(processor).__name__} reads no kind of media that is known here")
    return parts


def _sounds(processor: Any) -> Any:
    """Return the part that processes sounds, or ``None``."""
    own = getattr(processor, "feature_extractor", None)
    return getattr(processor, "audio_processor", None) if own is None else own


def _load(
    config: ModelConfig, settings: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, dict[str, str]]:
    """Return the processor, and the texts of its files by name."""
    files = processor_texts(config)
    fields = json.loads(files.get(PROCESSOR_FILES[2], "{}"))
    name = fields.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(settings.model_type)
    known: Any = getattr(transformers, name, None) if name else None
    if known is None:
        known, code = _by_code(config, settings, files)
        files |= code
    if known is None:
        raise ValueError(f"transformers {transformers.__version__} has no processor {name!r}")
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(settings.model_type, {"pil": None})
    # Where there are two, the processor without torchvision gives the numbers of the tests.
    backend = "pil" if "pil" in names else "torchvision"
    needs_torchvision = backend == "torchvision" or not issubclass(known, ProcessorMixin)
    if needs_torchvision and not is_torchvision_available():
        raise ValueError(_lacks(known.__name__, "torchvision"))
    revision = config.revision or "main"
    given: list[Any] = []
    for part in known.get_attributes():
        if part == "tokenizer":
            # Some processors add tokens.
            given.append(copy.deepcopy(tokenizer))
        elif part == "image_processor":
            options = {"backend": backend, "revision": revision}
            given.append(AutoImageProcessor.from_pretrained(config.path, **options))
        elif part in ("feature_extractor", "audio_processor"):
            given.append(_extractor(config.path, revision, known, settings))
        else:
            given.append(_Absent() if part == "video_processor" else None)
    # Parts may be missing, and transformers' own processors of clips need torchvision.
    changes: dict[str, Any] = {"check_argument_for_proper_class": _lenient}
    own = family_of(settings).own
    if own is not None and own.chat_template:
        # The template writes what the processor would write around the words.
        changes["prepare_inputs_layout"] = ProcessorMixin.prepare_inputs_layout
    lenient: Any = type(known.__name__, (known,), changes)
    processor = lenient.from_args_and_dict(given, fields)
    if own is not None and own.writes_start:
        processor.bos_token = ""
    if name in _CLIP_FRAMES:
        own = fields.get("video_processor") or json.loads(files.get(PROCESSOR_FILES[1], "{}"))
        processor.video_processor = _Frames(own)
    return processor, files


def _by_code(
    config: ModelConfig, settings: PreTrainedConfig, files: Mapping[str, str]
) -> tuple[Any, dict[str, str]]:
    """Return the class of a processor in the code of the model folder, and the files of this code.

    The class is ``None`` if no file names one, or the user has not allowed the code.
    """
    maps = [json.loads(text).get("auto_map") for text in files.values()]
    maps.append(vars(settings).get("auto_map"))
    named = [found["AutoProcessor"] for found in maps if found and "AutoProcessor" in found]
    if not named or not config.trust_remote_code:
        return None, {}
    found = get_class_from_dynamic_module(named[0], config.path, revision=config.revision)
    first = Path(inspect.getfile(found))
    code = [first, *map(Path, get_relative_import_files(first))]
    return found, {file.name: file.read_text(encoding="utf-8") for file in code}


def _lacks(name: str, package: str) -> str:
    """Return the error of a processor that needs ``package``, whose release must fit torch."""
    return (
        f"{name} needs {package}, which is not installed; install the release that fits "
        f"torch {torch.__version__}: pip install {package}"
    )


def _extractor(path: str, revision: str, known: Any, settings: PreTrainedConfig) -> Any:
    """Return the processor of sounds, or ``None`` if a model that reads pictures has none."""
    try:
        # A folder of adapters has no config, which names the class where no file does.
        return AutoFeatureExtractor.from_pretrained(path, revision=revision, config=settings)
    except ImportError as error:
        if is_torchaudio_available():
            raise
        raise ValueError(_lacks(known.__name__, "torchaudio")) from error
    except (OSError, ValueError):
        if "image_processor" in known.get_attributes():
            return None
        raise


class _Absent(dict):
    """Stands for transformers' own processor of clips. It has no settings: each is ``None``."""

    model_input_names = ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _lenient(self: Any, name: str, argument: Any) -> Any:
    """Accept a part that is missing."""
    if argument is None or isinstance(argument, _Absent):
        return type(argument)
    return ProcessorMixin.check_argument_for_proper_class(self, name, argument)


class _Frames:
    """Stands for a processor of clips, and processes frames as pictures.

    Args:
        fields: Settings of the processor of clips. Those that are missing have CLIP's values.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        known = CLIPImageProcessorPil().to_dict()
        own = {name: value for name, value in fields.items() if name in known}
        self.frames = CLIPImageProcessorPil.from_dict(own)

    def __call__(self, videos: Any, **options: Any) -> dict[str, Any]:
        clips = []
        for clip in videos:
            pictures = [Image.fromarray(frame) for frame in clip]
            clips.append(self.frames(images=pictures, return_tensors="pt")["pixel_values"])
        return {"pixel_values_videos": torch.stack(clips)}

    @property
    def model_input_names(self) -> list[str]:
        return ["pixel_values_videos"]


class _Recorder:
    """Stands for a tokenizer, and keeps the text that it was called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any = None, **options: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def item_keywords(kind: str, items: Sequence[np.ndarray], rate: int) -> dict[str, Any]:
    """Return the keywords by which a processor of transformers takes the items of one prompt.

    Args:
        kind: ``image``, ``video`` or ``audio``.
        items: The items.
        rate: Samples per second of sounds.
    """
    if kind == "audio":
        return {"audio": list(items), "sampling_rate": rate}
    if kind == "video":
        return {"videos": list(items)}
    return {"images": [[Image.fromarray(item) for item in items]]}


def _call(
    processor: Any, kind: str, text: str, items: Sequence[np.ndarray]
) -> tuple[str, dict[str, Any]]:
    """Return the text with placeholders, and the outputs for one prompt."""
    own = copy.copy(processor)
    own.tokenizer = _Recorder(processor.tokenizer)
    rate = _sounds(processor).sampling_rate if kind == "audio" else 0
    made = own(
        **item_keywords(kind, items, rate),
        text=[text],
        return_tensors="pt",
        text_kwargs={"add_special_tokens": False},
    )
    # A start that the processor adds is in the template, see ``fit_template``.
    start = processor.tokenizer.bos_token or processor.tokenizer.eos_token or ""
    written = own.tokenizer.text
    return written if text.startswith(start) else written.removeprefix(start), dict(made)


def _part(
    processor: Any,
    tower: Tower,
    token: str,
    files: Mapping[str, str],
    own_forward: OwnForward,
) -> OwnPart:
    kind = tower.kind
    names = tuple(name for name in tower.inputs if not name.endswith((SHAPE, AXIS)))[:-1]
    tried = [_blank(kind, shape) for shape in _TRIED[kind]]
    written, apart = _written(processor, kind, token, tried[0])
    alone = [_call(processor, kind, written, [item]) for item in tried]
    joint = _joint_outputs(processor, kind, written, tried)
    apart = apart and (joint is None or joint[0] == "".join(text for text, _ in alone))
    rules = _rules(processor, names, [made for _, made in alone], joint)
    if kind != "image" and "flat" in rules.values():
        # Features are computed item by item, and an item may have several rows: store its shape.
        rules = {name: "flat" if rule == "rows" else rule for name, rule in rules.items()}
    part = OwnPart(
        processor,
        kind,
        written,
        token,
        rules,
        files,
        several=_reads_several(alone, joint, rules, token, own_forward),
        apart=apart,
        fixed=len({text.count(token) for text, _ in alone}) == 1,
        around=_around(processor.tokenizer, kind, written),
        rate=_sounds(processor).sampling_rate if kind == "audio" else 0,
        longest=_longest(_sounds(processor)) if kind == "audio" else math.inf,
    )
    if not apart:
        _check_neighbours(part)
    return part


def _longest(extractor: Any) -> float:
    """Return the number of samples after which an extractor cuts a sound."""
    options = inspect.signature(type(extractor).__call__).parameters
    names = ("max_length", "truncation")
    most, cuts = (options[name].default if name in options else None for name in names)
    return most if cuts and isinstance(most, int) else math.inf


def _check_neighbours(part: OwnPart) -> None:
    """Raise ``ValueError`` if the text of items depends on more than what ``in_text`` tries."""
    shapes = _TRIED[part.kind][: 3 if part.several else 1]
    for pieces in (("Look: ", "", " or\nthis", " ?"), ("see", "and", "\n", "what is it?")):
        whole = [pieces[0]]
        for after in pieces[1 : len(shapes) + 1]:
            whole += [part.written, after]
        items = [_blank(part.kind, shape) for shape in shapes]
        expected, _ = _call(part.processor, part.kind, "".join(whole), items)
        if part.in_text(whole[::2], shapes) != expected:
            raise ValueError(
                f"{type(part.processor).__name__}: the text of one {part.kind} depends on more "
                "than the characters next to it and the items before it"
            )


def _blank(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an item of this shape. Its content does not matter."""
    if kind == "audio":
        return np.full(shape, 0.1, np.float32)
    return np.full(shape, 100, np.uint8)


_MARKS = ("{}_token", "boi_token", "{}_placeholder_token", "start_of_{}_token")
"""Attributes of processors with the text that may stand for an item of a kind."""


def _written(processor: Any, kind: str, token: str, item: np.ndarray) -> tuple[str, bool]:
    """Return the text that the processor replaces by placeholders.

    The second value is ``False`` if what it writes depends on the words around it.
    """
    names = [name.format(kind) for name in (*_MARKS, "{}_start_token", "{}_end_token")]
    *marks, start, end = (str(getattr(processor, name, None) or "") for name in names)
    reason = "no attribute names it"
    for text in dict.fromkeys([*marks, start + marks[0] + end]):
        if not text:
            continue
        try:
            whole, _ = _call(processor, kind, f"a{text}b", [item])
            spaced, _ = _call(processor, kind, f"a {text}\nb", [item])
        except Exception as error:  # processors raise arbitrary errors
            reason = first_line(error)
            continue
        if token in whole and whole.startswith("a") and whole.endswith("b"):
            return text, whole[1:-1] == spaced[2:-2]
        reason = f"it writes {whole[:60]!r} for {text!r}"
    name = type(processor).__name__
    raise ValueError(f"{name}: the text that stands for one {kind} was not found ({reason})")


def _around(tokenizer: Any, kind: str, written: str) -> tuple[str, str]:
    """Return the text around ``written`` in the chat template."""
    usual = ("", "\n")
    if not tokenizer.chat_template:
        return usual
    word = {"type": "text", "text": "(word)"}
    texts = []
    for content in ([{"type": kind}, word], [word]):
        message: Any = {"role": "user", "content": content}
        try:
            text = tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # templates raise arbitrary errors
            return usual
        texts.append(str(text))
    before, found, after = texts[0].partition(written)
    start = texts[1].partition("(word)")[0]
    if not found or not before.startswith(start):
        return usual
    return before.removeprefix(start), after.partition("(word)")[0]


_TEXT = (
    *("labels", "input_ids", "attention_mask", "token_type_ids"),
    *("mm_token_type_ids", "moe_mm_token_type_ids", "cross_attention_mask"),
)


Outputs = tuple[str, Mapping[str, Any]]
"""The text with placeholders and the tensors of one prompt."""


def _joint_outputs(
    processor: Any, kind: str, written: str, items: Sequence[np.ndarray]
) -> Outputs | None:
    """Return the outputs for ``items`` of one prompt; ``None`` for a family of one item."""
    try:
        return _call(processor, kind, written * len(items), items)
    except Exception:  # processors raise arbitrary errors
        return None


def _rules(
    processor: Any,
    names: tuple[str, ...],
    alone: Sequence[Mapping[str, Any]],
    joint: Outputs | None,
) -> dict[str, str | int]:
    """Return the rule of each tensor, from the outputs for some items alone and together.

    The first axis of ``rows`` joins items, or the axis of that number. Items of a ``flat`` input
    differ in shape and are padded.
    """
    rules: dict[str, str | int] = {}
    found = {name: [_tensor(made[name]) for made in alone if name in made] for name in names}
    # Tiles and frames: their number depends on the item, and may be equal by chance.
    tiles = [
        [t.shape[:2] for t in each] for each in found.values() if any(t.ndim > 4 for t in each)
    ]
    for name, tensors in found.items():
        if tensors:
            many = tensors[0].ndim > 3 and [t.shape[:2] for t in tensors] in tiles
            same = len({t.shape[1:] for t in tensors}) == 1 and not many
            rules[name] = "rows" if same else "flat"
            if same:
                continue
            if joint is None and many and len({(len(t), *t.shape[2:]) for t in tensors}) == 1:
                # The processor pads no tiles.
                rules[name] = 1
            elif joint is not None:
                whole = _tensor(joint[1][name])
                for axis in range(1, whole.ndim):
                    if _joins(tensors, whole, axis):
                        rules[name] = axis
    others = {name for made in alone for name in made} - {*names, *_TEXT}
    # A mask of nothing but padding says nothing about one item.
    unread = sorted(
        name for name in others if not all(bool(_tensor(made[name]).all()) for made in alone)
    )
    if unread:
        raise ValueError(f"{type(processor).__name__} makes {', '.join(unread)}, which are unread")
    return rules


def _reads_several(
    alone: Sequence[Outputs],
    joint: Outputs | None,
    rules: Mapping[str, str | int],
    token: str,
    own_forward: OwnForward,
) -> bool:
    """Return ``True`` if the processor reads items of one prompt as it reads them ``alone``."""
    if joint is None or joint[0].count(token) != sum(text.count(token) for text, _ in alone):
        return False
    for name, rule in rules.items():
        parts = [_tensor(made[name]) for _, made in alone]
        whole = _tensor(joint[1][name])
        if name in own_forward.indices and len(whole) == sum(map(len, parts)):
            whole = torch.cat([_from_zero(part) for part in whole.split([len(p) for p in parts])])
        if not _joins(parts, whole, rule, own_forward.fills.get(name, 0)):
            return False
    return True


def _from_zero(indices: Tensor) -> Tensor:
    """Return indices that count from the smallest one. Negative ones stay."""
    return torch.where(indices < 0, indices, indices - indices[indices >= 0].min())


def _joins(parts: list[Tensor], whole: Tensor, rule: str | int, fill: float = 0) -> bool:
    """Return ``True`` if ``whole`` is made of ``parts`` as the model's inputs are."""
    if isinstance(rule, int):
        rest = {(*part.shape[:rule], *part.shape[rule + 1 :]) for part in parts}
        alike = len(rest) == 1 and parts[0].ndim == whole.ndim
        return alike and torch.equal(torch.cat(parts, rule), whole)
    if rule == "rows":
        joined = torch.cat(parts)
        return whole.numel() == joined.numel() and torch.equal(joined, whole.reshape(joined.shape))
    if any(part.ndim != whole.ndim for part in parts):
        return False
    if len(whole) == 1 < len(parts) and whole.ndim > 1:
        # The first axis is that of prompts.
        parts, whole = [part.flatten(0, 1) for part in parts], whole[0]
    # The processor may pad beyond the largest part.
    return torch.equal(padded([*parts, whole[:0]], fill), whole)


def _tensor(value: Any) -> Tensor:
    """Return an output of a processor as one tensor."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        value = torch.cat([each if each.ndim else each[None] for each in value])
    return torch.as_tensor(value)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Items of one kind, by the family's processor.

    Attributes:
        processor: The processor.
        kind: ``image``, ``video`` or ``audio``.
        written: Text that the processor replaces by placeholders.
        token: Text of a placeholder.
        rules: Rule of each tensor, see ``_rules``.
        files: Texts of the processor's files.
        several: Several items of one prompt are read as one by one.
        apart: The text of an item depends neither on the words around it nor on other items.
        fixed: Every picture or frame has as many placeholders.
        bounds: Limits of pixels.
        around: Text around ``written`` in the chat template.
        rate: Samples per second of sounds. 0 for other kinds.
        frames: Selects the frames of clips, as the processors of clips do that have no rule.
        longest: Number of samples after which the processor cuts a sound.
    """

    processor: Any
    kind: str
    written: str
    token: str
    rules: Mapping[str, str | int]
    files: Mapping[str, str]
    several: bool = True
    apart: bool = True
    fixed: bool = False
    bounds: Bounds = (None, None)
    around: tuple[str, str] = ("", "\n")
    rate: int = 0
    frames: EvenFrames = field(default_factory=EvenFrames)
    longest: float = math.inf
    _texts: dict[object, str] = field(default_factory=dict, compare=False)

    def placeholder_text(self, extent: Extent) -> str:
        return self._text(f"a{self.written}b", (self.read_shape(extent.shape),))[1:-1]

    def in_text(self, pieces: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
        """Return a text with several items, as the processor writes it.

        Args:
            pieces: The texts before, between and after the items.
            shapes: The shapes at which the items are read.
        """
        # The processor gets the characters next to items, so that it is called once for many texts.
        ends = [piece if len(piece) < 3 else piece[0] + _CUT + piece[-1] for piece in pieces]
        text = self._text(self.written.join(ends), tuple(shapes))
        inner = [piece[1:-1] for piece in pieces if len(piece) > 2]
        first, *rest = text.split(_CUT)
        return first + "".join(cut + part for cut, part in zip(inner, rest, strict=True))

    def _text(self, text: str, shapes: tuple[tuple[int, ...], ...]) -> str:
        """Return ``text`` with placeholders for items of these shapes."""
        key = (text, shapes)
        if key not in self._texts:
            items = [_blank(self.kind, shape) for shape in shapes]
            made, _ = _call(self.processor, self.kind, text, items)
            # A data set may have pictures of very many sizes.
            if len(self._texts) == _KEPT:
                self._texts.clear()
            self._texts[key] = made
        return self._texts[key]

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        shape = self.read_shape(value.shape)
        if shape != value.shape:
            resized = [
                np.asarray(Image.fromarray(frame).resize((shape[-2], shape[-3]), _BICUBIC))
                for frame in value.reshape(-1, *value.shape[-3:])
            ]
            value = np.stack(resized).reshape(shape)
        text, made = _call(self.processor, self.kind, self.written, [value])
        stored: dict[str, Tensor] = {}
        for name, rule in self.rules.items():
            tensor = _tensor(made[name])
            if rule == "flat":
                stored[name] = tensor.flatten()
                stored[name + SHAPE] = torch.tensor([list(tensor.shape)])
            elif isinstance(rule, int):
                stored[name] = tensor.movedim(rule, 0)
                stored[name + AXIS] = torch.tensor([[rule]])
            else:
                stored[name] = tensor
        stored[places_name(self.kind)] = torch.tensor([text.count(self.token)])
        return stored

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        places = inputs[places_name(self.kind)]
        if len(places) > 1 and not self.several:
            raise DataError(
                f"a prompt with {len(places)} items of kind {self.kind}: "
                f"{type(self.processor).__name__} reads several of one prompt in another way than "
                "one by one; give one"
            )
        return int(places.sum())

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> OwnPart:
        if self.kind == "audio":
            return self
        part = self.processor.image_processor
        size = getattr(part, "crop_size", None) or getattr(part, "size", None) or {}
        if self.fixed and "height" in size:
            within(size["height"] * size["width"], min_pixels, max_pixels)
        return replace(self, bounds=newer(self.bounds, min_pixels, max_pixels), _texts={})

    def save(self, path: Path) -> None:
        for name, text in self.files.items():
            (path / name).write_text(text, encoding="utf-8")

    def read_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape at which an item is read.

        Raises ``ValueError`` for a sound that the processor cuts.
        """
        if self.kind == "audio":
            # Resampling and codecs add a few samples.
            if shape[0] >= self.longest + self.rate // 100:
                raise ValueError(
                    f"a clip of {shape[0] / self.rate:.6g} s, and the model hears at most "
                    f"{self.longest / self.rate:.6g} s: cut it into shorter clips"
                )
            return shape
        return (*shape[:-3], *bounded(*shape[-3:-1], *self.bounds), 3)


_BICUBIC = Image.Resampling.BICUBIC
_KEPT = 1024
"""Number of texts with placeholders that a part keeps."""
_CUT = "\ufdd4"
"""Stands for the inside of a text between items."""
