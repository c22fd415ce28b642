"""One frozen tree of settings from YAML files merged left to right, then ``a.b=value``."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from lightrft.utils.errors import ConfigError

Tree = dict[str, Any]


class Settings(BaseModel):
    """A branch of the tree. ``shorthand`` names the field that a bare string or number stands for."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())
    shorthand: ClassVar[str | None] = None


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Loaded(typing.Generic[S]):
    """Settings and, for each dotted key that was given, the file or argument that it came from last."""

    settings: S
    sources: Mapping[str, str] = field(default_factory=dict)


def load_settings(cls: type[S], files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Loaded[S]:
    """Read ``files`` in order, then ``key=value`` overrides, into a ``cls``.

    Raises ``ConfigError`` that lists every problem at once: unknown keys with the nearest name, wrong types, missing files.
    """
    tree: Tree = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    for file in files:
        _merge(tree, expand_shorthand(cls, _read_yaml(Path(file))), str(file), sources)
    for override in overrides:
        try:
            branch = _parse_override(override)
        except ConfigError as error:
            problems.append(str(error))
            continue
        _merge(tree, expand_shorthand(cls, branch), "command line", sources)
    settings = build(cls, tree, sources, problems)
    return Loaded(settings, sources)


def build(cls: type[S], tree: Tree, sources: Mapping[str, str] | None = None, problems: Sequence[str] = ()) -> S:
    """``tree`` as a ``cls``. Raises ``ConfigError`` with ``problems`` and every problem of the tree itself."""
    found = list(problems)
    try:
        settings = cls.model_validate(tree)
    except ValidationError as error:
        found += [_explain(cls, dict(e), sources or {}) for e in error.errors()]
    if found:
        raise ConfigError("\n".join(found))
    return settings


def to_yaml(settings: Settings) -> str:
    """The resolved tree as YAML that ``load_settings`` reads back equal."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a tree as ``("a.b", value)``."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{name}.")
        else:
            yield name, value


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """``base`` with the leaves of ``over`` on top; lists are replaced, not joined."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def expand_shorthand(cls: type[Settings], tree: Tree) -> Tree:
    """``tree`` with a bare value in place of a branch written out as that branch's ``shorthand`` field."""
    full: Tree = {}
    for key, value in tree.items():
        branch = _branch(cls, key)
        if branch is not None and branch.shorthand and isinstance(value, str | int | float) and not isinstance(value, bool):
            value = {branch.shorthand: value}
        full[key] = expand_shorthand(branch, value) if branch is not None and isinstance(value, dict) else value
    return full


def _branch(cls: type[Settings], key: str) -> type[Settings] | None:
    """The ``Settings`` class of field ``key``, if it is a branch (optional ones included)."""
    if key not in cls.model_fields:
        return None
    kind = cls.model_fields[key].annotation
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else (kind,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, Settings)), None)


def _merge(tree: Tree, over: Tree, source: str, sources: dict[str, str]) -> None:
    merged = deep_merge(tree, over)
    tree.clear()
    tree.update(merged)
    sources.update((key, source) for key, _ in dotted(over))


def _read_yaml(path: Path) -> Tree:
    if not path.is_file():
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
            if path.parent.is_dir()
            else []
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"there is no config file {path}{hint}")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys and values, not {type(tree).__name__}")
    return tree


def _parse_override(text: str) -> Tree:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is neither a .yaml file nor key=value")
    try:
        branch: Any = yaml.safe_load(value) if value else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is not a YAML value: {error}") from None
    if isinstance(branch, str):
        branch = _number(branch)
    for part in reversed(key.split(".")):
        branch = {part: branch}
    return branch


def _number(text: str) -> str | float:
    """YAML 1.1 reads ``1e-6`` as text; people mean the number."""
    try:
        return float(text) if text.lower().lstrip("+-")[:1].isdigit() else text
    except ValueError:
        return text


def _explain(cls: type[Settings], error: dict[str, Any], sources: Mapping[str, str]) -> str:
    path = [str(p) for p in error["loc"]]
    name = ".".join(path)
    origin = next((s for key, s in sources.items() if key == name or key.startswith(f"{name}.")), "")
    where = f" (from {origin})" if origin else ""
    if error["type"] == "extra_forbidden":
        owner: type[Settings] | None = cls
        for part in path[:-1]:
            owner = _branch(owner, part) if owner else None
        names = list(owner.model_fields) if owner else []
        near = difflib.get_close_matches(path[-1], names, n=1)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"known here: {', '.join(names)}"
        return f"unknown setting {name}{where}; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    given = "" if error["type"] in {"missing", "value_error"} else f" = {error['input']!r}"
    return f"{name or 'config'}{given}{where}: {message}"
