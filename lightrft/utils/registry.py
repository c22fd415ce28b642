"""Registries of functions.

A built-in function has a short name. A user's function is named ``package.module:function`` or
``file.py:function``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from lightrft.utils.errors import ConfigError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class About:
    """The description of a registered function.

    Args:
        formula: the formula as plain text.
        latex: the formula in LaTeX.
        paper: where the formula was published.
        needs: what a batch must contain for this function.
        reads: settings that the function reads, among the settings that all functions of its kind
            share.
        kind: the form of the data, if functions of one registry differ in it.
        heads: the kinds of heads that a loss of reward models fits; ``None`` is all.
    """

    formula: str = ""
    latex: str = ""
    paper: str = ""
    needs: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    kind: str = ""
    heads: frozenset[str] | None = None


class Registry(Generic[T]):
    """A table from name to function."""

    def __init__(self, kind: str, hint: Callable[[str], str] = lambda _: "") -> None:
        """Make an empty table.

        Args:
            kind: the word for an entry in messages, e.g. ``"advantage"``.
            hint: returns ``; `` and a sentence about a name that is known elsewhere, or "".
        """
        self.kind = kind
        self._hint = hint
        self._entries: dict[str, T] = {}
        self._about: dict[str, About] = {}

    def register(
        self,
        name: str,
        *,
        formula: str = "",
        latex: str = "",
        paper: str = "",
        needs: Iterable[str] = (),
        reads: Iterable[str] = (),
        kind: str = "",
        heads: Iterable[str] | None = None,
    ) -> Callable[[T], T]:
        """Return a decorator that registers a function under ``name``.

        Args:
            name: the short name.
            formula: the formula as plain text.
            latex: the formula in LaTeX.
            paper: where the formula was published.
            needs: what a batch must contain for this function.
            reads: settings that the function reads, among the settings that all functions of its
                kind share.
            kind: the form of the data, if functions of this registry differ in it.
            heads: the kinds of heads that a loss of reward models fits; ``None`` is all.

        Raises:
            ValueError: another function is registered under ``name``.
        """

        def add(function: T) -> T:
            if self._entries.get(name, function) is not function:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = function
            fitting = None if heads is None else frozenset(heads)
            self._about[name] = About(
                formula, latex, paper, frozenset(needs), frozenset(reads), kind, fitting
            )
            return function

        return add

    def about(self, name: str) -> About:
        """Return the description of ``name``.

        The description of a user's function is its name, the first line of its docstring, and its
        attributes ``needs``, ``kind`` and ``heads``.
        """
        if name in self._about:
            return self._about[name]
        function = self[name]
        docstring = (function.__doc__ or "").strip() or "no docstring"
        heads = getattr(function, "heads", None)
        return About(
            f"{name}: {docstring.splitlines()[0]}",
            needs=frozenset(getattr(function, "needs", ())),
            kind=getattr(function, "kind", ""),
            heads=None if heads is None else frozenset(heads),
        )

    def __getitem__(self, name: str) -> T:
        """Return the function called ``name``.

        Raises ``ConfigError`` with the nearest name if there is none.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return resolve(name, self.kind)
        if name.endswith(".py"):
            raise ConfigError(
                f"{self.kind} {name!r} is a file, of which a function must be named: "
                f"{_functions_of(name)}"
            )
        hint = self._hint(name) or did_you_mean(name, self._entries) or "."
        raise ConfigError(
            f"unknown {self.kind} {name!r}{hint} Known: {', '.join(sorted(self._entries))}; or "
            "package.module:function"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


def resolve(name: str, kind: str = "function") -> Any:
    """Return the object that ``package.module:attribute`` or ``path/to/file.py:attribute`` names.

    Args:
        name: the name to resolve.
        kind: the word for the object in messages.

    Raises:
        ConfigError: the module, file or attribute does not exist, or importing the module raises.
    """
    # From the right: a path may have a colon itself.
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(
            f"{kind} {name!r} is not of the form package.module:function or file.py:function"
        )
    if where.endswith(".py"):
        module = _from_file(Path(where), name, kind)
    else:
        module = _from_package(where, name, kind)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(attribute, public)
        raise ConfigError(f"{kind} {name!r}: {where} has no {attribute!r}{hint}") from None


def _functions_of(name: str) -> str:
    """Return advice for a ``name`` that is a file without a function."""
    path = Path(name).expanduser()
    if not path.is_file():
        return f"write {name}:function (and there is no file {path.resolve()})"
    # Parsed and not imported: a file that is named by mistake must not run.
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return f"write {name}:function"
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [node.name for node in functions if not node.name.startswith("_")]
    return f"write {name}:" + f" or {name}:".join(public or ["function"])


def _from_file(path: Path, name: str, kind: str) -> ModuleType:
    path = path.expanduser().resolve()
    # The hash, since two files may have the same name. The stem keeps tracebacks readable.
    key = f"lightrft_user_{path.stem}_{abs(hash(str(path))):x}"
    if key in sys.modules:
        return sys.modules[key]
    if not path.is_file():
        raise ConfigError(f"{kind} {name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{kind} {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # before execution, as the import system does: dataclasses look up their module by name
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Otherwise the next look-up would return the half-executed module.
        del sys.modules[key]
        raise ConfigError(
            f"{kind} {name!r}: importing {path} raised {type(error).__name__}: {error}"
            f"{_missing(error)}"
        ) from error
    return module


def _missing(error: Exception) -> str:
    """Return what to do about a module that an import lacks, or ""."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return f"; install the package of {error.name} in the environment of lightrft"


def _from_package(where: str, name: str, kind: str) -> ModuleType:
    here = str(Path.cwd())
    # Last: a module in the working directory must not hide an installed one.
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(where)
    except ImportError as error:
        raise ConfigError(f"{kind} {name!r}: cannot import {where}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{kind} {name!r}: importing {where} raised {type(error).__name__}: {error}"
        ) from error


def other_names(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return the ``hint`` of a registry: the name here of one of another framework."""
    return lambda name: f"; did you mean {names[name]!r}?" if name in names else ""
