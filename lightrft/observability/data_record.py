"""The record of ``lightrft data``: the first rows of each section of data, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

BINS = 10
"""Largest number of bins of a histogram."""
SAFE = {number: f"\\x{number:02x}" for number in (*range(32), 127) if chr(number) not in "\n\t"}
"""Control characters, which a terminal might obey, to their escapes."""


@dataclass(frozen=True, slots=True)
class Span:
    """A text of some tokens of a row.

    Args:
        text: the text, with special tokens. The placeholders of media are replaced by a name.
        trained: True if the tokens carry loss.
    """

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One sequence of a row.

    Args:
        name: id of the row, with the name of the response where a row has several.
        spans: the texts of its tokens, in order.
        tokens: number of tokens.
        facts: further values, such as the label.
        media: previews of its media, each the content of a file by its name.
    """

    name: str
    spans: list[Span]
    tokens: int
    facts: dict[str, object]
    media: dict[str, bytes] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """The number of tokens and the facts, on one line."""
        facts = "".join(f", {name} {value!r}" for name, value in self.facts.items())
        return f"{self.tokens} tokens{facts}"


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Numbers of tokens.

    Args:
        kind: ``prompt`` or ``response``.
        tokens: the number of tokens of each, at least one.
    """

    kind: str
    tokens: Sequence[int]

    @property
    def bins(self) -> list[tuple[int, int, int]]:
        """The smallest and the largest length of each bin, and its count. Bins have equal width."""
        low, high = min(self.tokens), max(self.tokens)
        width = -(-(high - low + 1) // BINS)
        counts = [0] * ((high - low) // width + 1)
        for tokens in self.tokens:
            counts[(tokens - low) // width] += 1
        starts = range(low, high + 1, width)
        return [(at, min(at + width - 1, high), n) for at, n in zip(starts, counts, strict=True)]

    @property
    def range(self) -> str:
        """The smallest, the largest and the median length."""
        middle = median(self.tokens)
        return f"{min(self.tokens)} to {max(self.tokens)} tokens, median {middle:g}"

    @property
    def histogram(self) -> str:
        """The bins on one line: the lengths of each bin, and its count."""
        return ", ".join(f"{low}-{high}: {count}" for low, high, count in self.bins)


Pairs = list[tuple[str, str]]
"""Ids of rows, each with the id of an earlier row that has the same prompt."""


@dataclass(frozen=True, slots=True)
class ShownSection:
    """The rows of one section of data.

    Args:
        key: key of the section, such as ``eval.data``.
        rows: the first rows.
        read: number of rows that were read.
        unread: a sentence for each source with columns that nothing reads.
        lengths: tokens of all prompts that were read, and of all responses if rows have them.
        compared: number of prompts of text. Prompts with media are not compared.
        repeats: prompts that are equal to an earlier one of the section.
        shared: prompts that are equal to one of ``data``; None for ``data`` itself.
    """

    key: str
    rows: list[ShownRow]
    read: int
    unread: list[str]
    lengths: list[TokenLengths]
    compared: int
    repeats: Pairs
    shared: Pairs | None

    @property
    def title(self) -> str:
        """The key, and the number of rows that were read."""
        return f"{self.key}: the first of {self.read} rows that were read"

    def notes(self) -> Iterator[str]:
        """Yield sentences about unread columns, duplicates and overlap."""
        yield from self.unread or ["every column with text, lists or media is read"]
        yield _compared("duplicates", self.repeats, self.compared, "an earlier prompt")
        if self.shared is not None:
            yield _compared("overlap", self.shared, self.compared, "a prompt of data")
        total = next((len(each.tokens) for each in self.lengths if each.kind == "prompt"), 0)
        if total > self.compared:
            yield f"prompts with media, which are not compared: {total - self.compared}"

    def lines(self, marks: tuple[str, str]) -> Iterator[str]:
        """Yield the section as lines of text. Control characters are escaped.

        Args:
            marks: texts before and after trained tokens.
        """
        yield f"== {self.title}"
        for row in self.rows:
            yield f"-- {safe(row.name)}: {safe(row.about)}"
            texts = ((safe(span.text), span.trained) for span in row.spans)
            yield "".join(marks[0] + text + marks[1] if on else text for text, on in texts)
        for each in self.lengths:
            yield f"-- {each.kind}s: {each.range}; {each.histogram}"
        for note in self.notes():
            yield f"-- {safe(note)}"


def safe(text: str) -> str:
    """Return ``text`` with its control characters and halves of surrogate pairs escaped."""
    return as_utf8(text.translate(SAFE))


def as_utf8(text: str) -> str:
    """Return ``text`` with halves of surrogate pairs escaped, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _compared(what: str, pairs: Pairs, compared: int, other: str) -> str:
    """Return the sentence about prompts that are equal to others.

    Args:
        what: the name of the figure.
        pairs: the equal prompts.
        compared: number of prompts that were compared.
        other: the prompts that they are equal to.
    """
    first = f"; the first is {pairs[0][0]}, equal to {pairs[0][1]}" if pairs else ""
    return f"{what}: {len(pairs)} of {compared} prompts equal {other}{first}"
