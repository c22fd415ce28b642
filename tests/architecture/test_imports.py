"""What happens when the package is imported: little, quickly, with no optional package and no accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lightrft.config.presets import PRESETS
from lightrft.verbs import VERBS
from tests.architecture.test_layers import HEAVY
from tests.architecture.tree import PACKAGE, ROOT, modules

# Not optional: dependencies of the package that are only too slow to import at start-up.
INSTALLED = {"peft", "datasets", "tensorboard", "math_verify"}

IMPORT_ALL = """
import importlib, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asked_by = frame.f_globals.get("__name__", "").partition(".")[0]
        if asked_by == "{package}" and name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())

import torch

def watched(name, real):
    def call(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "{package}":
            raise AssertionError(f"{{caller}} calls torch.cuda.{{name}} as it is imported")
        return real(*args, **kwargs)
    return call

for name in ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability", "mem_get_info"):
    setattr(torch.cuda, name, watched(name, getattr(torch.cuda, name)))

for name in {names}:
    importlib.import_module(name)
assert not torch.cuda.is_initialized(), "importing the package initialises CUDA"
late = sorted({heavy} & {{name.partition(".")[0] for name in sys.modules}})
print("loaded too early:", late)
"""


IMPORT_ALONE = """
import builtins, importlib, importlib.util, sys

ASKED = {{}}  # module to the modules that it asks for as it is imported, by whatever statement or function
plain, by_name = builtins.__import__, importlib.import_module

def note(asking, name):
    parts = name.split(".")
    if parts[0] == "{package}" and asking.partition(".")[0] == "{package}":
        ASKED.setdefault(asking, set()).update(".".join(parts[:n]) for n in range(1, len(parts) + 1))

def statement(name, globals=None, locals=None, fromlist=(), level=0):
    if globals is not None:
        whole = importlib.util.resolve_name("." * level + name, globals.get("__package__"))
        for part in ("", *(fromlist or ())):
            note(globals.get("__name__", ""), f"{{whole}}.{{part}}" if part else whole)
    return plain(name, globals, locals, fromlist, level)

def function(name, package=None):
    note(sys._getframe(1).f_globals.get("__name__", ""), importlib.util.resolve_name(name, package))
    return by_name(name, package)

def below(name):
    found, left = set(), [name]
    while left:
        more = ASKED.get(left.pop(), set()) - found
        found |= more
        left += more
    return found

def fresh(name):
    for old in [n for n in sys.modules if n.partition(".")[0] == "{package}"]:
        del sys.modules[old]
    plain(name)

builtins.__import__, importlib.import_module = statement, function
for name in reversed({names}):
    note(name, name.rpartition(".")[0] or name.partition(".")[0])
    plain(name)
builtins.__import__, importlib.import_module = plain, by_name
# A module can be met half imported only where it is part of a cycle, and what happens there depends only on which of its modules
# comes first.
cycles = [name for name in {names} if name in below(name)]
for name in cycles:
    fresh(name)
print("each of", cycles)
"""


def run(code: str) -> str:
    """What a fresh interpreter that sees no accelerator prints for ``code``."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_of_modules() -> list[str]:
    return [".".join((PACKAGE, *m.name)) for m in modules() if m.part != "__main__"]


def imported_by(code: str) -> dict[str, int]:
    """Count the modules of each package that ``code`` imports, without those of Python."""
    names = "sorted({*sys.modules} - before)"
    lines = run(f"import sys; before = {{*sys.modules}}\n{code}\nprint(*{names})").splitlines()
    packages = Counter(name.partition(".")[0] for name in lines[-1].split())
    inner = {*sys.stdlib_module_names, "cython_runtime"}
    return {name: n for name, n in packages.items() if name not in inner and name[0] != "_"}


def command(*words: str) -> str:
    return (
        "import contextlib, io; from lightrft.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): main({list(words)})"
    )


def test_importing_the_package_imports_its_tables_of_names_and_verbs_alone() -> None:
    imported = imported_by("import lightrft")
    assert imported.keys() == {PACKAGE}
    assert imported[PACKAGE] <= 4


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys; import lightrft.cli.main; print(*sorted({'torch', 'transformers', 'numpy', "
        "'pydantic'} & set(sys.modules)))"
    )
    assert run(code).split() == []


def test_help_imports_no_other_package() -> None:
    imported = imported_by(command("--help"))
    assert imported.keys() == {PACKAGE}
    assert imported[PACKAGE] <= 20


def test_an_objective_is_explained_with_the_settings_and_formulas_alone() -> None:
    imported = imported_by(command("explain", "grpo"))
    assert imported.keys() <= {PACKAGE, "yaml", *SETTINGS}
    assert imported[PACKAGE] <= 150


SETTINGS = {
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
    "typing_extensions",
}
NEED_NO_MODEL = (
    *(("explain", preset) for preset in PRESETS),
    ("explain", "opd", "algorithm.distill=jsd"),
    # a curriculum loads numpy, which its options are tried with
    ("explain", "prime", "ptx.coef=0.1", "rollout.select=balanced", "--latex"),
    ("--help",),
    ("--version",),
    ("trian",),
    *((verb, "--help") for verb in VERBS),
    ("rl", "nowhere.yaml"),
    ("rl", "modle.path=a"),
    ("rl", "algorithm.loss=ppo_clop"),
    ("rl", "algorithm.filters=[{name: repeated_answers, options: {limit: 1, by: words}}]"),
    ("rl", "rollout.carry_over=true"),
    *((verb, "modle=1") for verb in ("sft", "eval", "generate", "chat", "doctor")),
    ("demo", "visoin"),
    ("check", "grpo", "--kind", "nope"),
    ("report", "nowhere"),
    ("completion", "bash"),
)


def test_what_needs_no_model_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from lightrft.cli.main import main\n"
        f"for words in {NEED_NO_MODEL!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        main(words)\n"
        "    loaded = sorted({'torch', 'transformers', 'numpy', 'datasets', 'pyarrow'} & set(sys.modules))\n"
        "    assert not loaded, (words, loaded)\n"
        "print('none')\n"
    )
    assert run(code).strip() == "none"


def test_every_module_imports_with_no_optional_package_and_without_touching_cuda() -> None:
    code = IMPORT_ALL.format(
        hidden=sorted(HEAVY - INSTALLED),
        package=PACKAGE,
        names=names_of_modules(),
        heavy={"peft", "tensorboard", "math_verify"},
    )
    assert "loaded too early: []" in run(code)


@pytest.mark.slow
def test_each_module_imports_alone_whatever_the_order() -> None:
    assert run(IMPORT_ALONE.format(package=PACKAGE, names=names_of_modules())).startswith(
        "each of "
    )


def test_a_cycle_of_imports_that_works_from_one_side_only_is_found(tmp_path: Path) -> None:
    package = tmp_path / "ring"
    package.mkdir()
    files = {
        "__init__": "",
        "a": "from ring import b\nx = 1\n",
        "b": "from ring.a import x\n",
        "c": "import ring.a\n",
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    code = f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += IMPORT_ALONE.format(package="ring", names=["ring.a", "ring.b"])
    with pytest.raises(AssertionError, match=r"partially initialized module 'ring\.a'"):
        run(code)
    (package / "b.py").write_text("import ring.a\n")
    assert run(code) == "each of ['ring.a', 'ring.b']\n"
    (package / "b.py").write_text("y = 1\n")
    assert run(code) == "each of []\n"
