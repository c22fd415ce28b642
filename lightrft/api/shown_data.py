"""The rows of a config as a run reads them, as text, as a table and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.api.run import Page, frame
from lightrft.api.start import import_function
from lightrft.config.config_tools import ShowConfig
from lightrft.config.verbs import TrainingConfig
from lightrft.observability.data_record import ShownSection, as_utf8
from lightrft.utils.atomic_files import disk_errors, write_atomic
from lightrft.utils.errors import DataError

if TYPE_CHECKING:
    import pandas

HEIGHT = 900
"""Height of the page in a notebook, in pixels."""
MARKS = ("[[", "]]")
"""Texts before and after trained tokens, without colors."""


class ShownData:
    """The first rows of a config as a run reads them, and figures of all rows that were read.

    A notebook shows it as a page.

    Args:
        sections: The record of each section of data.
    """

    def __init__(self, sections: Sequence[ShownSection]) -> None:
        self._sections = sections

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The shown rows: section, name, text, trained texts, tokens, facts such as the label."""
        rows = (
            {
                "section": section.key,
                "name": row.name,
                "text": "".join(span.text for span in row.spans),
                "trained": [span.text for span in row.spans if span.trained],
                "tokens": row.tokens,
                **row.facts,
            }
            for section in self._sections
            for row in section.rows
        )
        return [
            {key: as_utf8(value) if isinstance(value, str) else value for key, value in row.items()}
            for row in rows
        ]

    @property
    def table(self) -> pandas.DataFrame:
        """The shown rows as a frame."""
        import pandas

        return pandas.DataFrame(self.rows)

    @property
    def figures(self) -> pandas.DataFrame:
        """The figures of each section: rows, lengths, duplicates, overlap and unread columns.

        ``lengths`` has the tokens of each prompt and response. ``duplicates`` and ``overlap`` have
        ids of rows, each with the id of the earlier row.
        """
        import pandas

        figures = [
            {
                "section": section.key,
                "rows": section.read,
                "lengths": {each.kind: list(each.tokens) for each in section.lengths},
                "duplicates": section.repeats,
                "overlap": section.shared,
                "unread": section.unread,
            }
            for section in self._sections
        ]
        return pandas.DataFrame(figures).set_index("section")

    def save(self, path: str | Path) -> Page:
        """Write the rows and figures as an HTML page, and return it.

        Args:
            path: The file, which is replaced.

        Raises:
            ResourceError: The file cannot be written.
        """
        file = Path(path).expanduser()
        with disk_errors(file, "choose another file"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, self._html())
        return Page(file, HEIGHT)

    def text(self, marks: tuple[str, str] = MARKS) -> str:
        """Return the rows and figures as text.

        Args:
            marks: Texts before and after trained tokens.
        """
        return "".join("\n".join(each.lines(marks)) + "\n\n" for each in self._sections)

    def __repr__(self) -> str:
        return self.text().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the page as an element of a notebook's page."""
        return frame(self._html(), HEIGHT)

    def _html(self) -> str:
        from lightrft.viewer.data_page import data_page

        return data_page(self._sections)


def shown_data(config: TrainingConfig, options: ShowConfig) -> ShownData:
    """Return the rows of a config, and write ``options.page`` if it is set.

    Args:
        config: The settings of a run.
        options: The settings of ``lightrft data``.

    Raises:
        DataError: A row cannot be read. The message names the verb, if it was not given.
    """
    function = "lightrft.diagnostics.prompts.shown_rows:shown_sections"
    try:
        found = ShownData(import_function(function, config.run.threads)(config, options))
    except DataError as error:
        if options.verb != "auto":
            raise
        raise DataError(
            f"{error}. The rows are read as those of lightrft {config.verb}; set show.verb=rl, or "
            "another verb, to read them otherwise"
        ) from error
    if options.page is not None:
        found.save(options.page)
    return found
