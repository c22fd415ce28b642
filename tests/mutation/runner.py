"""A pytest plugin: the collected tests once as they are, then those that matter for each mutant, in a fork each."""

from __future__ import annotations

import ast
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hypothesis
import pytest

from tests.mutation.mutants import Mutant

EXAMPLES = 15
"""Of hypothesis for each property."""

hypothesis.settings.register_profile(
    "mutation", max_examples=EXAMPLES, deadline=None, database=None, derandomize=True
)
hypothesis.settings.load_profile("mutation")


class Runner:
    """``write(mutant, outcome, seconds)`` is told of each of ``todo``: ``survived``, ``killed`` or ``endless``."""

    def __init__(
        self,
        name: str,
        file: Path,
        todo: Sequence[Mutant],
        write: Callable[[Mutant, str, float], None],
        seconds: int,
    ) -> None:
        self.name, self.file, self.todo, self.write, self.seconds = name, file, todo, write, seconds
        self.spans = spans_of(file.read_text(encoding="utf-8"))
        self.failed = False
        self.entered: dict[str, set[str]] = defaultdict(set)  # function: tests
        self.took: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        self.observe(items)
        if self.failed:
            session.testsfailed = 1
            return True
        print(
            f"\n{self.name}: {len(items)} tests, {sum(self.took.values()):.0f} s; "
            f"{len(self.todo)} mutants",
            flush=True,
        )
        for mutant in self.todo:
            wanted = self.tests_for(mutant, items)
            self.write(mutant, *self.fork(mutant, wanted))
        return True

    def observe(self, items: Sequence[pytest.Item]) -> None:
        """Run ``items`` and note which functions of the module each of them enters."""
        module, source = sys.modules[self.name], self.file.read_text(encoding="utf-8")
        names: set[str] = set()
        vars(module)[ENTERED] = names.add
        put_in_place(module, telling(source))
        for item in items:
            names.clear()
            began = time.perf_counter()
            run(item)
            self.took[item.nodeid] = time.perf_counter() - began
            for name in names:
                self.entered[name].add(item.nodeid)
        put_in_place(module, source)

    def span_of(self, line: int) -> str:
        return next((name for name, first, last in self.spans if first <= line <= last), "")

    def tests_for(self, mutant: Mutant, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Tests that enter the function that ``mutant`` changes, the quick ones first; all where it changes what is between them."""
        span = self.span_of(mutant.line)
        chosen = (
            [i for i in items if i.nodeid in self.entered[span]]
            if span and not mutant.outside
            else list(items)
        )
        return sorted(chosen, key=lambda i: self.took[i.nodeid])

    def fork(self, mutant: Mutant, items: Sequence[pytest.Item]) -> tuple[str, float]:
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                used = int(time.process_time())
                resource.setrlimit(resource.RLIMIT_CPU, (used + self.seconds, used + self.seconds))
                status = self.survives(mutant, items)
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        outcome = "endless" if os.WIFSIGNALED(status) else "killed" if status else "survived"
        return outcome, time.perf_counter() - began

    def survives(self, mutant: Mutant, items: Sequence[pytest.Item]) -> int:
        """In the fork: 0 when no test fails."""
        put_in_place(sys.modules[self.name], mutant.code)
        for item in items:
            run(item)
            if self.failed:
                return 1
        return 0


def run(item: pytest.Item) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def spans_of(source: str) -> list[tuple[str, int, int]]:
    """Name, first and last line of each function and class of a module, decorators included."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.append((node.name, first, node.end_lineno or node.lineno))
    return found


ENTERED = "entered_by_a_test"


def telling(source: str) -> str:
    """``source`` whose functions say when they are entered; a method says the name of its class."""
    tree = ast.parse(source)
    for top in tree.body:
        if isinstance(top, ast.FunctionDef | ast.ClassDef):
            for node in ast.walk(top):
                if isinstance(node, ast.FunctionDef):
                    node.body.insert(0, ast.parse(f"{ENTERED}({top.name!r})").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def put_in_place(module: ModuleType, code: str) -> None:
    """Give the functions of ``module``, which others hold already, the code of a mutant. Raises what its import raises."""
    fresh = ModuleType(module.__name__)
    fresh.__file__ = module.__file__
    registered = taken_out(module, code)
    exec(compile(code, "<mutant>", "exec"), fresh.__dict__)
    for registry, name, old in registered:
        if name in registry._entries:
            registry._entries[name] = merged(module, old, registry._entries[name])
    for name, old in list(vars(module).items()):
        if name.startswith("__") or name == ENTERED:
            continue
        if name not in vars(fresh):
            delattr(module, name)
        elif vars(fresh)[name] is not old:
            setattr(module, name, merged(module, old, vars(fresh)[name]))


def taken_out(module: ModuleType, code: str) -> list[tuple[Any, str, Any]]:
    """Take the functions of ``module`` out of the registries that it imports, which refuse a second function of a name."""
    imported = [
        alias.asname or alias.name
        for node in ast.parse(code).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    found = []
    for registry in (vars(module).get(name) for name in imported):
        for name, old in list(getattr(registry, "_entries", {}).items()):
            if old.__module__ == module.__name__:
                del registry._entries[name]
                found.append((registry, name, old))
    return found


def merged(module: ModuleType, old: Any, new: Any) -> Any:
    """``old``, changed in place into ``new`` where it holds functions; else ``new``."""
    if (
        isinstance(old, FunctionType)
        and isinstance(new, FunctionType)
        and old.__module__ == module.__name__
    ):
        old.__code__, old.__defaults__, old.__kwdefaults__ = (
            new.__code__,
            new.__defaults__,
            new.__kwdefaults__,
        )
        return old
    if isinstance(old, staticmethod | classmethod):
        merged(module, old.__func__, new.__func__)
        return old
    if isinstance(old, property):
        merged(module, old.fget, new.fget)
        return old
    if isinstance(old, type) and isinstance(new, type):
        for name, method in list(vars(new).items()):
            if isinstance(
                method, FunctionType | staticmethod | classmethod | property
            ) and name in vars(old):
                merged(module, vars(old)[name], method)
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        for name in list(old):
            if name not in new:
                del old[name]
        for name, value in new.items():
            old[name] = merged(module, old[name], value) if name in old else value
        return old
    if hasattr(old, "_entries") and hasattr(new, "_entries"):
        old.kind = new.kind
        if not new._entries:
            # other modules, which are not executed again, fill it
            return old
        merged(module, old._entries, new._entries)
        old._about = new._about
        return old
    return new
