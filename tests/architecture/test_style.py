"""How the code is written, as far as a syntax tree can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from tests.architecture.tree import ROOT, Module, modules, text_files

LONG_FUNCTION, LONG_FILE = 80, 700
# A catalogue is as long as its entries.
CATALOGUES = {
    "lightrft/algorithms/advantages.py",
    "lightrft/algorithms/policy_losses.py",
    "lightrft/config/other_names/translated.py",
    "lightrft/config/presets.py",
    "lightrft/models/families.py",
    "lightrft/observability/metric_table.py",
    "lightrft/verbs.py",
}
# A folder of one machine, which nobody else has.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:work|farm|root|opt/wheels|opt/pypi|tmp/bash_jobs|home/\w+|Users/\w+)\b"
)
# (module or builtin, name): each runs what a file or a string says.
RUNS_DATA = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "marshal.loads",
    "shelve.open",
}
# Where data is executed all the same, and why that is safe.
# The two processes that call rewards read frames that the process which started them wrote.
OURS = {
    ("rewards", "sandbox", "worker"): "pickle.loads",
    ("rewards", "sandbox", "trial"): "pickle.loads",
    ("utils", "memory_function"): "pickle.loads",
}


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    """Lines of ``function`` without its docstring, comments and empty lines."""
    first = function.body[0]
    is_doc = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    doc = range(first.lineno, (first.end_lineno or first.lineno) + 1) if is_doc else range(0)
    rows = (
        text[i - 1].strip()
        for i in range(function.lineno, (function.end_lineno or function.lineno) + 1)
        if i not in doc
    )
    return sum(1 for row in rows if row and not row.startswith("#"))


def prints(module: Module) -> list[str]:
    if module.part == "cli":
        return []
    return [f"{module.where}:{node.lineno}" for node, name in calls(module) if name == "print"]


def runs_data(module: Module) -> list[str]:
    """Calls that execute data. ``torch.load`` counts unless it says ``weights_only=True``."""
    found = []
    for node, name in calls(module):
        safe = any(
            k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in node.keywords
        )
        if OURS.get(module.name) != name and (
            name in RUNS_DATA or (name == "torch.load" and not safe)
        ):
            found.append(f"{module.where}:{node.lineno} {name}")
    return found


def hidden_defaults(module: Module) -> list[str]:
    """``getattr(config, name, default)``: a default that the settings do not know of."""
    found = []
    for node, name in calls(module):
        if (
            name == "getattr"
            and len(node.args) == 3
            and re.search("cfg|config|settings|args", ast.unparse(node.args[0]))
        ):
            found.append(f"{module.where}:{node.lineno} {ast.unparse(node)}")
    return found


def swallowed(module: Module) -> list[str]:
    """Handlers that do nothing at all, and bare ``except:``."""
    handlers = [n for n in ast.walk(module.tree) if isinstance(n, ast.ExceptHandler)]
    return [
        f"{module.where}:{h.lineno}"
        for h in handlers
        if h.type is None or all(isinstance(s, ast.Pass | ast.Continue) for s in h.body)
    ]


def long_ones(module: Module) -> list[str]:
    text = module.text.splitlines()
    functions = [
        n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    sizes = [(f"{module.where}:{f.lineno} {f.name}", code_lines(f, text)) for f in functions]
    found = [f"{where} has {size} lines of code" for where, size in sizes if size > LONG_FUNCTION]
    if len(text) > LONG_FILE and module.where not in CATALOGUES:
        found.append(f"{module.where} has {len(text)} lines")
    return found


def undocumented(module: Module) -> list[str]:
    """The module itself, its public classes, and its public functions, where they have no docstring.

    Methods are told by their class; what a protocol's reader must know stands in the class too.
    """
    nodes: list[ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = [module.tree]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes += [n for n in module.tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    return [
        f"{module.where}:{node.lineno} {node.name}"
        if not isinstance(node, ast.Module)
        else module.where
        for node in nodes
        if not ast.get_docstring(node)
    ]


def over_the_tree(check: Callable[[Module], list[str]]) -> list[str]:
    return [line for module in modules() for line in check(module)]


def fake(text: str) -> Module:
    return Module(("utils", "x"), "x.py", text)


def test_nothing_prints_outside_the_command_line() -> None:
    assert over_the_tree(prints) == []
    assert prints(fake("print(1)"))


def test_no_file_or_string_is_executed() -> None:
    assert over_the_tree(runs_data) == []
    assert runs_data(fake("eval(x)"))
    assert runs_data(fake("torch.load(path, weights_only=False)"))
    assert not runs_data(fake("model.eval(); torch.load(path, weights_only=True)"))


def test_defaults_are_the_settings_own() -> None:
    assert over_the_tree(hidden_defaults) == []
    assert hidden_defaults(fake("getattr(config.model, 'x', 3)"))


def test_no_error_is_swallowed() -> None:
    assert over_the_tree(swallowed) == []
    assert swallowed(fake("try:\n    f()\nexcept ValueError:\n    pass"))
    assert swallowed(fake("try:\n    f()\nexcept:\n    g()"))


def test_functions_and_files_fit_a_reader() -> None:
    assert over_the_tree(long_ones) == []
    assert long_ones(fake("def f():\n" + "    x = 1\n" * (LONG_FUNCTION + 1)))
    assert long_ones(fake("x = 1\n" * (LONG_FILE + 1)))


def test_whatever_is_public_says_what_it_is_for() -> None:
    assert over_the_tree(undocumented) == []
    assert undocumented(fake('"""Module."""\ndef f(): ...'))


def test_no_file_names_a_folder_of_one_machine() -> None:
    rows = [
        f"{path.relative_to(ROOT)}:{i} {found.group(0)}"
        for path in text_files()
        for i, row in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if (found := MACHINE_PATH.search(row))
    ]
    assert rows == []
    assert MACHINE_PATH.search("/".join(["see ", "root", "x"]))
