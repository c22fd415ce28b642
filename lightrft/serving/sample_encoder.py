"""Encode texts, token ids and conversations of requests as prompts and responses."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lightrft.config.data import MediaConfig
from lightrft.datasets.conversations.conversation_encoder import ConversationEncoder, Sample
from lightrft.datasets.media.items import Item
from lightrft.datasets.row_tables import MalformedRow
from lightrft.models.processors import Processor
from lightrft.models.processors.base import token_text
from lightrft.types import Prompt
from lightrft.utils.errors import DataError
from lightrft.workers.scoring.reward_wire import checked_ids


def _items(images: object, where: str) -> list[Item]:
    """Return the images of a text.

    Args:
        images: An image or a list of images, each as base64, as a data URL or as an address.
        where: Name of the field, for messages of errors.

    Raises:
        DataError: An image is no text.
    """
    found = []
    for one in images if isinstance(images, list) else [] if images is None else [images]:
        if not isinstance(one, str):
            raise DataError(f"{where}: an image is {reprlib.repr(one)}, not a text of base64")
        is_address = one.startswith(("data:", "http://", "https://"))
        value: object = one if is_address else {"base64": one}
        found.append(Item("image", value, where, Path()))
    return found


class SampleEncoder(ConversationEncoder):
    """Encodes the items of requests. Every method may be called from several threads.

    Args:
        tokenizer: Tokenizer of the model.
        processor: Media processor of the model. ``None`` for a model that reads text alone.
        media: Settings of media: what requests may name, and limits.
        vocabulary: Number of token ids that the model knows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Processor | None,
        media: MediaConfig,
        vocabulary: int,
    ) -> None:
        super().__init__(tokenizer, processor, media)
        self.vocabulary = vocabulary
        self._ends = frozenset((self.encoder.eos, *tokenizer.all_special_ids))

    def item(self, value: object, where: str) -> Sample:
        """Return the sample of a text, of token ids, or of messages that end with the assistant.

        A text is encoded as it is: its spellings of special tokens are special tokens.

        Args:
            value: Text, token ids or messages.
            where: Name of the item, for messages of errors.

        Raises:
            DataError: It is none of them, or cannot be read.
        """
        if isinstance(value, str):
            return self._cut(self._ids(value), where)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return self.sample(value, where)
        return self._cut(checked_ids(value, self.vocabulary, where), where)

    def query(self, text: object, prompt: object, number: int, images: object = None) -> Sample:
        """Return the sample of a rendered conversation, as OpenRLHF and LightRFT send it.

        Padding before and after the text is left out. In the text, an image is the placeholder of
        the chat template, or the placeholders of its patches.

        Args:
            text: Prompt and response. An end token is added where no special token ends it.
            prompt: The beginning of ``text`` that is the prompt; ``None`` or empty if unknown.
            number: Number of the item, for messages of errors.
            images: An image as base64 or a URL, or a list of images. ``None`` for none.

        Raises:
            DataError: One of them is no text, or ``text`` does not begin with ``prompt``. Or an
                image cannot be read, or has no placeholder in ``text``.
        """
        where = f"query.{number}"
        if prompt is not None and not isinstance(prompt, str):
            raise DataError(f"prompts.{number} is {prompt!r}, not a text")
        if not isinstance(text, str) or not text:
            raise DataError(f"{where} must be a text of prompt and response")
        items = _items(images, f"images.{number}")
        ids = self._unpadded(self._ids(self._with_places(text, items, where)))
        if ids[-1] not in self._ends:
            ids = [*ids, self.encoder.eos]
        if not prompt:
            found = self._cut(ids, where)
        else:
            asked = self._unpadded(self._ids(self._with_places(prompt, items, where)))
            if ids[: len(asked)] != asked or len(asked) == len(ids):
                raise DataError(
                    f"{where} does not begin with the tokens of its prompt; leave it out"
                )
            found = Sample(Prompt("", asked), ids[len(asked) :])
        if not items:
            return found
        assert self.encoder.media is not None
        parts = (found.prompt.token_ids, found.response)
        found.prompt.media, media = self.encoder.media.split(items, parts, where)
        return Sample(found.prompt, found.response, media)

    def pair(self, asked: object, answer: object, where: str) -> Sample:
        """Return the sample of a question and an answer.

        Args:
            asked: Text, content parts, or an object with ``content``.
            answer: As ``asked``.
            where: Name of the pair, for messages of errors.

        Raises:
            DataError: One of them cannot be read.
        """
        for value in (asked, answer):
            if isinstance(value, Mapping) and value.get("content") is None:
                have = ", ".join(map(str, value)) or "nothing"
                raise DataError(f"{where}: an object without content; it has: {have}")
        content = [v.get("content") if isinstance(v, Mapping) else v for v in (asked, answer)]
        roles = ("user", "assistant")
        messages = [{"role": r, "content": c} for r, c in zip(roles, content, strict=True)]
        return self.sample(messages, where)

    def _ids(self, text: str) -> list[int]:
        with self.lock:
            encoded = self.encoder.tokenizer(text, add_special_tokens=False, verbose=False)
            start = self.encoder.start
        ids = encoded["input_ids"]
        return ids if ids[: len(start)] == start else [*start, *ids]

    def _unpadded(self, ids: list[int]) -> list[int]:
        """Return ``ids`` without padding. Where the end token pads, the first one stays."""
        tokenizer = self.encoder.tokenizer
        pad, last = tokenizer.pad_token_id, len(ids)
        while last > 1 and ids[last - 1] == pad:
            last -= 1
        if pad == self.encoder.eos:
            last = min(last + 1, len(ids))
        start = self.encoder.start
        first = len(start)
        while first < last - 1 and ids[first] == pad:
            first += 1
        kept = ids[first:last]
        # The text may spell the start token after its padding.
        return kept if start and kept[: len(start)] == start else [*start, *kept]

    def _with_places(self, text: str, items: Sequence[Item], where: str) -> str:
        """Return ``text`` with a placeholder for each feature of ``items``.

        Args:
            text: A text with a placeholder for each image, or for each of its features.
            items: The images.
            where: Name of the text, for messages of errors.
        """
        if not items:
            return text
        media = self.encoder.media
        if media is None or "image" not in media.processor.parts:
            raise DataError(f"{where} has images, and the model reads none; leave them out")
        part = media.processor.parts["image"]
        written = part.written
        token = token_text(self.encoder.tokenizer, media.processor.tokens["image"])
        known = []
        for item, extent in zip(items, media.measured(items), strict=True):
            if isinstance(extent, MalformedRow):
                raise extent
            known.append((media.expand(item, extent), extent))
        if not getattr(part, "apart", True):
            # What stands for an image depends on the text around it.
            pieces = text.split(written)
            if len(pieces) != len(items) + 1:
                raise DataError(
                    f"{where} has {len(items)} images, and {len(pieces) - 1} texts {written!r}; "
                    "write one for each image, whose placeholders are made here"
                )
            pairs = [(media.parts["image"], extent) for _, extent in known]
            return media.processor.expanded(pieces, pairs)
        found, at = [], 0
        for shown, _ in known:
            # The client may have sized the image in another way, so a run of any length is one.
            forms = [f"(?:{re.escape(token)})+"] if written == token else []
            forms += [re.escape(shown), re.escape(written)]
            place = re.compile("|".join(forms)).search(text, at)
            if place is None:
                raise DataError(
                    f"{where} has {len(items)} images, and fewer placeholders {written!r}"
                )
            found += [text[at : place.start()], shown]
            at = place.end()
        return "".join(found) + text[at:]

    def _cut(self, ids: list[int], where: str) -> Sample:
        """Return a sample whose response is the last token."""
        if len(ids) < 2:
            raise DataError(f"{where} has {len(ids)} tokens; a prompt and a response need two")
        return Sample(Prompt("", ids[:-1]), ids[-1:])
