"""Settings as one frozen tree, from YAML files merged left to right, then ``a.b=value``."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeGuard, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lightrft.config.misread_values import is_text, misread, nearest
from lightrft.config.other_names.lookup import NO_COUNTERPART, answer, is_of_others, meant
from lightrft.config.read_by import ReadBy, read_by
from lightrft.config.setting_paths import branch_of, changes_items, read_beside
from lightrft.config.texts.field_descriptions import descriptions_in
from lightrft.config.texts.python_form import in_python
from lightrft.utils.atomic_files import nearest_name
from lightrft.utils.errors import ConfigError, SettingsError
from lightrft.utils.yaml_text import (
    inline_yaml,
    parse_argument,
    parse_yaml,
    tree_to_yaml,
    yaml_problem,
)
from lightrft.verbs import all_settings

if typing.TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

Tree = dict[str, Any]
"""A branch as in YAML: plain values and further branches by key."""


def is_branch(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return True if ``value`` has keys, and is not a leaf of the tree."""
    return isinstance(value, Mapping)


S = TypeVar("S", bound="Settings")


class _OwnErrors(type(BaseModel)):
    """The class of ``Settings``: an object takes what a table takes, and has its errors.

    Pydantic builds the sections of a tree without this call, and collects their errors itself.
    """

    def __call__(cls: type[S], *values: object, **given: Any) -> S:
        name = cls.__name__
        if values:
            raise SettingsError(
                f"{name}({values[0]!r}): settings have names; write {name}("
                f"{cls.shorthand or next(iter(cls.model_fields), '')}=...)"
            )
        try:
            return super().__call__(**expand_shorthand(cls, given))
        except ValidationError as error:
            found = [_explain(cls, one, {}) for one in _causes(error.errors())]
            lines = (f"{name}: {one.removeprefix('config: ')}" for one in found)
            raise SettingsError(in_python("\n".join(lines))) from None


class Settings(BaseModel, metaclass=_OwnErrors):
    """A branch of the tree: a frozen model that refuses unknown keys."""

    model_config = ConfigDict(
        # Configs share the default branches, which are instances in the classes.
        frozen=True,
        extra="forbid",
        # Defaults of a field may differ from those of its class, and can contradict each other.
        validate_default=True,
        # Pydantic reserves names with ``model_``, which ``launch.ray.model_devices`` has.
        protected_namespaces=(),
        # NaN passes every bound, and no setting has a use for infinity. Options of functions may.
        allow_inf_nan=False,
        # By default infinity is written as null, and read back as another value.
        ser_json_inf_nan="constants",
    )
    shorthand: ClassVar[str | None] = None
    """Name of the field that a bare string, number or list in place of the branch sets."""
    paths: ClassVar[tuple[str, ...]] = ()
    """Fields that hold paths to read; see ``lightrft.config.setting_paths``."""
    functions: ClassVar[tuple[str, ...]] = ()
    """Fields that name functions; see ``lightrft.config.setting_paths``."""
    texts: ClassVar[tuple[str, ...]] = ()
    """Fields that may be null or empty, as text that the model reads may."""
    section: ClassVar[str] = ""
    """Key of the section, for messages."""
    selector: ClassVar[str] = "kind"
    """Field that chooses the kind of the section, where others are marked by ``ReadBy``."""

    if not typing.TYPE_CHECKING:  # A type checker knows that the objects are frozen.

        def __setattr__(self, name: str, value: object) -> None:
            new = f"{type(self).__name__}({name}={value!r})"
            raise SettingsError(f"{name} cannot be set: settings are frozen; build others, {new}")

    @property
    def kind_in_force(self) -> str:
        """The kind that ``ReadBy`` is asked about."""
        return str(getattr(self, self.selector))

    @model_validator(mode="before")
    @classmethod
    def _refuse_misread(cls, tree: object) -> object:
        """Refuse values that pydantic or a user of the field would read as another value."""
        for name, value in tree.items() if is_branch(tree) else ():
            if name in cls.model_fields and (
                problem := misread(cls.model_fields[name], value, name in cls.texts)
            ):
                raise ValueError(f"{name} = {inline_yaml(value)}: {problem}")
        return tree

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults_of_branches(cls, tree: object) -> object:
        """Merge a given branch over the default of its field.

        That default may differ from the defaults of the branch's class, e.g. ``optimizer`` of SFT.
        """
        # An instance, which pydantic passes here too, has its defaults already.
        if not is_branch(tree):
            return tree
        full = dict(tree)
        for name, field_info in cls.model_fields.items():
            default = field_info.default
            given = full.get(name)
            if isinstance(default, Settings) and is_branch(given):
                # Unset fields stay out, so that a preset below can still fill them in.
                own = default.model_dump(exclude_unset=True)
                full[name] = deep_merge(own, given)
        return full

    @model_validator(mode="after")
    def _refuse_of_other_kinds(self) -> Self:
        """Refuse settings that the kind of this section does not read."""
        marks = read_by(type(self))
        for name in changed_fields(self) if marks else ():
            if name in marks and not marks[name].has(self.kind_in_force):
                selector = f"{self.section}.{self.selector}"
                value = inline_yaml(self.model_dump(mode="json", include={name})[name])
                raise ValueError(
                    f"{self.section}.{name} = {value} needs {selector} {marks[name]}, which is "
                    f"{self.kind_in_force}; set {selector}={marks[name].kinds[-1]}, or leave it out"
                )
        return self


class NamedFunction(Settings):
    """A branch whose ``name`` is a registered name, ``package.module:function`` or
    ``file.py:function``."""

    shorthand: ClassVar[str | None] = "name"
    """The setting that a bare string or number stands for."""
    functions: ClassVar[tuple[str, ...]] = ("name",)
    """The settings of this section that name functions."""


@dataclass(frozen=True, slots=True)
class Loaded(typing.Generic[S]):
    """Settings, with the source of each given key."""

    settings: S
    """The resolved tree."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The dotted key of each given setting to the file or argument that set it last."""


def load_settings(
    cls: type[S],
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    trees: Sequence[Mapping[str, object]] = (),
) -> Loaded[S]:
    """Read ``files`` in order, then ``key=value`` overrides, then ``trees``, into a ``cls``.

    Args:
        cls: Settings class of the whole tree.
        files: YAML files, merged left to right. Paths in a file are relative to it.
        overrides: ``a.b=value`` arguments, merged over the files. Values are YAML.
        trees: Plain values by key, merged over all these. A key may be dotted.

    Returns:
        The settings, and the file or argument that set each given key last.

    Raises:
        ConfigError: Lists every problem at once, e.g. unknown keys with the nearest name, wrong
            types, missing files.
    """
    tree: Tree = {}
    sources: dict[str, str] = {}
    # Collected, not raised: a user should see every problem of a long config in one go.
    problems: list[str] = []
    read: dict[str, Tree] = {}
    for file in files:
        try:
            branch = expand_shorthand(cls, _read_yaml(Path(file)))
        except ConfigError as error:
            problems.append(str(error))
            continue
        # Before the merge, which forgets the file that the paths are relative to.
        branch = read[str(file)] = read_beside(cls, branch, Path(file), problems)
        _merge(tree, branch, str(file), sources)
    for override in overrides:
        try:
            branch = _parse_override(cls, override)
        except ConfigError as error:
            problems.append(str(error))
            continue
        _merge(tree, expand_shorthand(cls, branch), "command line", sources)
    for given in trees:
        for key, value in given.items():
            _merge(tree, expand_shorthand(cls, below(key, value)), "Python", sources)
    try:
        return Loaded(build(cls, tree, sources, problems), sources)
    except ConfigError as error:
        hints = [
            f"{file} is a config of another framework; translate it by: lightrft import-config {file}"
            for file, own in read.items()
            if is_of_others(dict(dotted(own)), functools.partial(has_setting, cls))
        ]
        raise ConfigError("\n".join([str(error), *hints])) from None


def build(
    cls: type[S],
    tree: Tree,
    sources: Mapping[str, str] = types.MappingProxyType({}),
    problems: Sequence[str] = (),
) -> S:
    """Build a ``cls`` from ``tree``.

    Args:
        cls: Settings class of the tree.
        tree: Plain values by key.
        sources: The source of each dotted key, named in errors.
        problems: Problems found earlier, which are raised with those of the tree.

    Raises:
        ConfigError: Lists ``problems`` and every problem of the tree.
    """
    found = list(problems)
    try:
        settings = cls.model_validate(tree)
    except ValidationError as error:
        found += [_explain(cls, problem, sources) for problem in _causes(error.errors())]
    if found:
        raise ConfigError("\n".join(found))
    return settings


def to_yaml(settings: Settings) -> str:
    """Return the resolved tree as YAML that ``load_settings`` reads back equal."""
    return tree_to_yaml(settings.model_dump(mode="json"))


def dotted(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of a tree as ``("a.b", value)``. An empty branch is a leaf."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if is_branch(value) and value:
            yield from dotted(value, f"{name}.")
        else:
            yield name, value


def deep_merge(base: Mapping[str, object], over: Mapping[str, object]) -> Tree:
    """Return ``base`` with the leaves of ``over`` on top.

    A list replaces a list. A branch whose keys are numbers, as in ``a.0.b=1``, changes its items.

    Raises ``ConfigError`` if the list has no item of this number.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, list) and changes_items(value):
            items: Tree = {str(index): item for index, item in enumerate(old)}
            if beyond := value.keys() - items.keys():
                raise ConfigError(
                    f"{key}.{min(beyond)}: the list {key} has {len(old)} items, from 0"
                )
            merged[key] = list(deep_merge(items, value).values())
        else:
            is_shared = is_branch(old) and is_branch(value)
            merged[key] = deep_merge(old, value) if is_shared else value
    return merged


def changed_fields(settings: Settings) -> list[str]:
    """Return the names of the fields of ``settings`` that differ from their defaults, in order."""
    changed = []
    for name, field_info in type(settings).model_fields.items():
        default = field_info.get_default(call_default_factory=True)
        if getattr(settings, name) != default:
            changed.append(name)
    return changed


def descriptions(cls: type[Settings]) -> dict[str, str]:
    """Return the description of each field of ``cls`` by name, inherited fields included.

    A description is the string below a field, and the kinds of ``ReadBy``. A field without one is
    left out. Code in it is marked by single backticks, as in Markdown.
    """
    found: dict[str, str] = {}
    # Base classes first, so that a class can replace an inherited description.
    for base in reversed(cls.__mro__):
        if issubclass(base, Settings):
            found |= descriptions_in(base.__module__).get(base.__name__, {})
    for name, mark in read_by(cls).items():
        kinds = ReadBy(*(f"`{kind}`" for kind in mark.kinds))
        found[name] = f"{found.get(name, '')} For {kinds}.".strip()
    return {name: found[name] for name in cls.model_fields if name in found}


def description_of(cls: type[Settings], key: str) -> str:
    """Return the description of the setting ``key``, such as ``a.b``, in the tree of ``cls``.

    A key of a table has the description of the table. Empty if there is none.
    """
    owner, found = cls, ""
    for part in key.split("."):
        if part in owner.model_fields:
            found = descriptions(owner).get(part, "")
        below = branch_of(owner, part)
        # The rest of the key is inside a table, whose entries have no descriptions.
        if below is owner:
            break
        owner = below
    return found


def expand_shorthand(cls: type[Settings], tree: Mapping[str, object]) -> Tree:
    """Return ``tree`` with dotted keys as branches, and bare values as ``shorthand`` fields.

    Raises ``ConfigError`` for a setting that is given twice, by a dotted key and in its branch.
    """
    full: Tree = {}
    for key, value in tree.items():
        first = key.partition(".")[0] if isinstance(key, str) else key
        more = {key: value}
        if first != key and first in cls.model_fields:
            more = expand_shorthand(cls, below(key, value))
        elif (entry := _entry(cls, key, value)) is not None:
            more = {key: _entries(entry, value)}
        elif (branch := _branch(cls, key)) is not None:
            more = {key: _expanded(branch, value)}
        if first in full:
            given = {name for name, _ in dotted(full)}
            for twice in (name for name, _ in dotted(more) if name in given):
                raise ConfigError(f"{twice} is given twice; leave one of them out")
        full = deep_merge(full, more)
    return full


def _expanded(branch: type[Settings], value: object) -> object:
    """Return ``value`` of a branch of class ``branch``, with its bare values expanded."""
    # The exact types: ``bool`` is a subclass of ``int``, and true stands for no branch.
    if branch.shorthand and type(value) in (str, int, float, *_lists(branch, branch.shorthand)):
        value = {branch.shorthand: value}
    return expand_shorthand(branch, value) if is_branch(value) else value


def _lists(cls: type[Settings], name: str) -> tuple[type, ...]:
    """Return the types of a list of values, if the field ``name`` takes one."""
    is_list = typing.get_origin(cls.model_fields[name].annotation) is tuple
    return (list, tuple) if is_list else ()


def _entry(cls: type[Settings], key: str, value: object) -> type[Settings] | None:
    """Return the class of the entries of ``value``, if each is one branch of settings.

    ``value`` is that of the table or list ``key``.
    """
    field = cls.model_fields.get(key)
    origin = None if field is None else typing.get_origin(field.annotation)
    is_list = isinstance(value, list | tuple) or changes_items(value)
    if field is None or not (is_branch(value) if origin is dict else origin is tuple and is_list):
        return None
    kind = typing.get_args(field.annotation)[1 if origin is dict else 0]
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _entries(entry: type[Settings], value: object) -> object:
    """Return ``value``, a table or list of branches of class ``entry``, with each one expanded."""
    if is_branch(value):
        return {name: _expanded(entry, own) for name, own in value.items()}
    return [_expanded(entry, own) for own in typing.cast("Sequence[object]", value)]


def _branch(cls: type[Settings], key: str) -> type[Settings] | None:
    """Return the ``Settings`` class of field ``key``, or None if it is no branch."""
    if key not in cls.model_fields:
        return None
    kind = cls.model_fields[key].annotation
    # With ``| None`` a single type is a union too. A list of branches is none of its options.
    for option in typing.get_args(kind | None):  # ty: ignore[unsupported-operator]
        if isinstance(option, type) and issubclass(option, Settings):
            return option
    return None


def _merge(tree: Tree, over: Tree, source: str, sources: dict[str, str]) -> None:
    """Merge ``over`` into ``tree`` in place, and note ``source`` for each of its leaves."""
    merged = deep_merge(tree, over)
    tree.clear()
    tree.update(merged)
    sources.update((key, source) for key, _ in dotted(over))


def _read_yaml(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError(f"there is no config file {path}{nearest_name(path, '*.yaml')}")
    text = path.read_bytes()
    try:
        # An empty file, or one with comments alone, is read as None.
        tree = parse_yaml(text.decode()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {yaml_problem(error, text)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys and values, not {type(tree).__name__}")
    return tree


def _parse_override(cls: type[Settings], text: str) -> Tree:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is neither a .yaml file nor key=value")
    try:
        leaf = parse_argument(key, value, is_text=is_text(_field(cls, key.split("."))))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return below(key, leaf)


def below(key: str, leaf: object) -> Tree:
    """Return the tree with ``leaf`` at the dotted ``key``."""
    first, *below = key.split(".")
    for part in reversed(below):
        leaf = {part: leaf}
    return {first: leaf}


def has_setting(cls: type[Settings], name: str) -> bool:
    """Return True if the tree of ``cls`` has the section or setting ``name``, such as ``a.b``."""
    owner: type[Settings] | None = cls
    for part in name.split("."):
        if owner is None or part not in owner.model_fields:
            return False
        below = branch_of(owner, part)
        owner = None if below is owner else below
    return True


def section_defaults(cls: type[Settings], name: str) -> dict[str, object]:
    """Return the defaults of the settings below ``name``, or of itself, by full name."""
    *above, last = name.split(".")
    owner = functools.reduce(branch_of, above, cls)
    below = branch_of(owner, last)
    if below is owner:
        return {name: owner.model_fields[last].get_default(call_default_factory=True)}
    return {
        f"{name}.{key}": info.get_default(call_default_factory=True)
        for key, info in below.model_fields.items()
    }


def _verbs_with(name: str) -> str:
    """Return the verbs that have the setting ``name``, as text."""
    verbs = [verb for verb, cls in all_settings().items() if has_setting(cls, name)]
    # The methods of a verb have the settings of other verbs, which say enough.
    verbs = [verb for verb in verbs if " " not in verb] or verbs
    order = ("rl", "dpo", "sft", "rm")
    verbs.sort(key=lambda verb: (order.index(verb) if verb in order else len(order), verb))
    return f"lightrft {' and '.join(verbs[:2])}" if verbs else _NO_VERB


_NO_VERB = "another verb"


def _causes(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return ``errors`` without those of lists that are too short for their malformed items."""
    inner = {error["loc"][:-k] for error in errors for k in range(1, len(error["loc"]))}
    return [e for e in errors if e["type"] != "too_short" or e["loc"] not in inner]


def _explain(cls: type[Settings], error: ErrorDetails, sources: Mapping[str, str]) -> str:
    """Return the sentence about one ``error`` of pydantic, with the source of the setting."""
    place = _place(cls, error)
    path = list(map(str, place))
    name = ".".join(path)
    where = _origin(name, sources)
    if error["type"] == "extra_forbidden":
        return unknown_setting(cls, name, error["input"], where)
    given = f" = {error['input']!r}"
    # A message of our own names the value. An environment may hold secrets.
    if error["type"] in {"missing", "value_error"} or "environment" in path:
        given = ""
    return f"{name or 'config'}{given}{where}: {_reason(cls, error, place)}{meant(name, error)}"


def _place(cls: type[Settings], error: ErrorDetails) -> list[int | str]:
    """Return the keys and indices of the setting that ``error`` is about.

    Pydantic also lists the member of a union that it tried, such as a type or a class.
    """
    kept: list[int | str] = []
    owner, is_entry = cls, False
    for part in error["loc"]:
        if isinstance(part, int) or is_entry:
            kept.append(part)
            is_entry = is_entry and isinstance(part, int)
        elif part in owner.model_fields:
            kept.append(part)
            is_entry = "dict[" in str(owner.model_fields[part].annotation)
            owner = branch_of(owner, part)
    is_key = error["type"] in ("extra_forbidden", "missing")
    if is_key and kept[-1:] != list(error["loc"][-1:]):
        kept.append(error["loc"][-1])
    return kept


def _reason(cls: type[Settings], error: ErrorDetails, place: Sequence[int | str]) -> str:
    """Return what is wrong with the value at ``place``, and what fits there."""
    kind, value = error["type"], error["input"]
    if callable(value):
        return "an object of settings holds names; give the function to the call, or in a table"
    if kind in _NO_BRANCH:
        return _section(cls, place)
    if (
        kind == "string_type"
        and place[-1] in functools.reduce(branch_of, map(str, place[:-1]), cls).functions
    ):
        return "it is no function; give the name of one, or the function itself and not its result"
    message = _IN_WORDS.get(kind, error["msg"].removeprefix("Value error, "))
    if kind == "string_type" and isinstance(value, bool):  # text that may be null turns it on
        message += f", not {str(value).lower()}" + _described(cls, place)
        setting = _field(cls, list(map(str, place)))
        if setting is not None and types.NoneType in typing.get_args(setting.annotation):
            return message
    if kind == "string_type" and isinstance(value, int | float):
        message += f"; to give it as text, put quotes inside the quotes: {_as_text(place)}"
    if kind.startswith(_NUMBERS):
        message += _described(cls, place)
    return message


def _described(cls: type[Settings], place: Sequence[int | str]) -> str:
    """Return the first sentence about the setting at ``place``, for the end of a message."""
    text = description_of(cls, ".".join(one for one in place if isinstance(one, str)))
    return f"; {text.split('. ')[0].removesuffix('.')}" if text else ""


def _field(cls: type[Settings], path: Sequence[str]) -> FieldInfo | None:
    *above, last = path
    return functools.reduce(branch_of, above, cls).model_fields.get(last)


_NO_BRANCH = frozenset(("model_type", "model_attributes_type", "dataclass_type"))
"""Errors of pydantic about a value in place of a section. Their text names classes."""

_NUMBERS = ("greater_", "less_", "finite_", "float_", "int_")
"""Beginnings of errors of pydantic about a number. Its description names the unit, the usual
values, and the values that mean something else, such as 0 for no limit."""

_IN_WORDS = {
    **dict.fromkeys(("tuple_type", "list_type"), "Input should be a list, as in [a, b]"),
    "dict_type": "Input should be a table, as in {a: 1}",
    "bool_parsing": "Input should be true or false",
}
"""Errors of pydantic that name types of Python, in words of YAML."""


def _section(cls: type[Settings], place: Sequence[int | str]) -> str:
    """Return the settings of the section at ``place``, which got a value in its place."""
    path = [part for part in place if isinstance(part, str)]
    known = list(functools.reduce(branch_of, path, cls).model_fields)
    shown = [".".join([*path, key]) for key in known]
    is_entry = len(path) < len(place)  # of a list
    example = f"{{{known[0]}: ...}}" if is_entry else f"{shown[0]}=..."
    return f"it is a section; set the settings below it, as in {example}: {', '.join(shown)}"


def unknown_setting(cls: type[Settings], name: str, given: object, where: str = "") -> str:
    """Return the sentence about a setting that does not exist.

    Args:
        cls: Settings class of the whole tree.
        name: The dotted key.
        given: The value of the setting.
        where: Its source, as `` (from ...)``.
    """
    found = answer(name, given, functools.partial(has_setting, cls), _verbs_with)
    if NO_COUNTERPART in found and (others := _verbs_with(name)) != _NO_VERB:
        elsewhere = f"as a name of another framework, {found}"
        return f"{name} is a setting of {others}, and not of this verb{where}; {elsewhere}"
    if found.startswith(f"{name} "):
        return f"{found}{where}"
    if found.startswith(f"{name}."):
        return f"{name}{where}: {found}"
    return f"unknown setting {name}{where}; {found or _meant_by(cls, name.split('.'), given)}"


def _meant_by(cls: type[Settings], path: Sequence[str], given: object) -> str:
    """Return what the unknown ``path`` with the value ``given`` may mean, or the known names."""
    if near := nearest(cls, path):
        return f"did you mean {near}?"
    if (others := _verbs_with(".".join(path))) != _NO_VERB:
        return f"it is a setting of {others}, and not of this verb"
    # A name of another framework in a section of this one, as in ``train.learning_rate``.
    if alone := answer(path[-1], given, functools.partial(has_setting, cls), _verbs_with):
        return alone
    return f"known here: {', '.join(functools.reduce(branch_of, path[:-1], cls).model_fields)}"


def _as_text(place: Sequence[int | str]) -> str:
    """Return an argument that gives the value at ``place`` as text.

    Args:
        place: Keys and indices. An item has no key of its own, so its whole list is given.
    """
    at = next((k for k, part in enumerate(place) if isinstance(part, int)), len(place))
    value = '"...", "..."' if isinstance(place[-1], int) else '"..."'
    for part in reversed(place[at:]):
        value = f"[{value}]" if isinstance(part, int) else f"{{{part}: {value}}}"
    return f"{'.'.join(map(str, place[:at]))}='{value}'"


def _origin(name: str, sources: Mapping[str, str]) -> str:
    """Return the file or argument that set ``name``, as `` (from ...)``, or "" if none did."""
    # The last one: an item of a list may be changed after the list was given.
    for key, source in reversed(list(sources.items())):
        # A problem of a branch comes from one of its leaves, and one of an item from its list.
        outer, inner = sorted((f"{key}.", f"{name}."), key=len)
        if inner.startswith(outer):
            return f" (from {source})"
    return ""


class ComponentConfig(NamedFunction):
    """A registered function, or ``package.module:function``, with its keyword arguments."""

    name: str
    """Registered name, ``package.module:function`` or ``file.py:function``."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def strings_as(key: str) -> BeforeValidator:
    """Return a validator of a tuple of branches, which accepts ``a`` for ``[{key: a}]``.

    An item of the tuple may be a bare name too, and a single branch needs no list around it.
    """
    return BeforeValidator(functools.partial(full_branches, key))


def full_branches(key: str, parts: object) -> object:
    """Return ``parts`` as a list of branches, with ``{key: a}`` for a bare name ``a``.

    Anything else is returned as it is, for the validation of the field to report.
    """
    if isinstance(parts, str | dict | Settings):
        parts = [parts]
    if not isinstance(parts, list | tuple):
        return parts
    return [{key: part} if isinstance(part, str) else part for part in parts]


Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)
]
"""Names. A single one needs no list around it."""

Components = Annotated[tuple[ComponentConfig, ...], strings_as("name")]
"""Functions with their options, applied in order."""
