"""Settings of constrained and of speculative decoding."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lightrft.config.base import Settings
from lightrft.config.read_by import ReadBy


class ConstraintConfig(Settings):
    """The form that every response must have. Exactly one of the settings is given."""

    json_schema: dict[str, Any] | None = None
    """JSON Schema of the response, as a table or as text."""
    regex: str | None = None
    """Regular expression that the whole response matches, in the syntax of the Rust crate
    ``regex``."""
    choices: tuple[str, ...] | None = None
    """Texts that the response is one of."""
    column: str | None = None
    """Column of the data that holds the constraint of each row: a table with one of the settings
    above. A row without one is free."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _parse(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        try:
            return json.loads(given)
        except ValueError as error:
            raise ValueError(f"json_schema is not JSON: {error}") from error

    @model_validator(mode="after")
    def _is_one(self) -> ConstraintConfig:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(
                f"give exactly one of json_schema, regex, choices and column, not {found}"
            )
        if self.choices is not None and not all(self.choices):
            raise ValueError(f"choices = {list(self.choices)} must not have an empty text")
        if self.choices == ():
            raise ValueError("choices = [] allows no response; name at least one text")
        return self


class SpeculativeConfig(Settings):
    """Speculative decoding of the native engine. The responses are those of plain decoding."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that hold paths."""
    section: ClassVar[str] = "engine.speculative"
    """Key of the section, for messages."""

    kind: Literal["ngram", "draft"] = "ngram"
    """Source of the drafts. ``ngram`` copies what followed the last tokens of the response where
    they occurred before. ``draft`` samples from a small model."""
    tokens: int = Field(4, ge=1, le=64)
    """Most drafted tokens of a response in a step. Raise it where most of them are accepted (see
    ``rollout/draft_acceptance``)."""
    longest_match: Annotated[int, ReadBy("ngram")] = Field(3, ge=1)
    """Longest run of last tokens that is looked up. Shorter ones are tried too, from 2 tokens."""
    path: Annotated[str, ReadBy("draft")] = ""
    """Draft model, a folder or a name. It has the vocabulary of the policy."""

    @model_validator(mode="after")
    def _has_draft_model(self) -> SpeculativeConfig:
        if self.kind == "draft" and not self.path:
            raise ValueError(
                "engine.speculative.kind = draft needs a model; set engine.speculative.path, or "
                "engine.speculative.kind=ngram"
            )
        return self
