"""Imports point down only, and heavy packages are imported where they are wrapped."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.tree import PACKAGE, Import, Module, imports, modules

# Lowest first; names that share a level never import one another.
LEVELS = (
    ("verbs",),
    ("utils",),
    ("config",),
    ("observability",),
    ("types", "distributed"),
    ("datasets", "models", "strategy", "engines", "rewards", "algorithms"),
    ("roles",),
    ("learner", "rollout"),
    ("workers",),
    ("trainer",),
    ("diagnostics", "viewer", "serving", "compat"),
    ("api",),
    ("cli",),
    ("__main__",),
)
# The report reads run directories, so it needs nothing that computes. Algorithms are pure functions.
ALLOWED = {
    "viewer": {"utils", "config", "observability", "types", "viewer"},
    "algorithms": {"utils", "config", "types", "algorithms"},
}
# Optional, or slow to import: inside the function that needs them only.
HEAVY = {
    *("vllm", "sglang", "deepspeed", "ray", "flash_attn", "bitsandbytes"),
    *("wandb", "mlflow", "trackio", "swanlab"),
    *("peft", "datasets", "tensorboard", "math_verify", "starlette", "uvicorn"),
    *("soundfile", "av", "torchvision", "llguidance"),
}
KERNELS = {("models", "attention", "varlen_cuda"), ("models", "logprobs")}
DEVICES = {"strategy", "engines"}
"""They ask whether a tensor is where a CUDA kernel runs."""
SILENT = (
    "trainer",
    "learner",
    "rollout",
    "workers",
    "algorithms",
    "strategy",
    "distributed",
    "types",
    "roles",
)
"""Packages that know named tensors, and no modality."""
MODALITY = re.compile(r"\b\w*(?:pixel_values|image|video|audio)\w*\b", re.I)


def level_of(part: str) -> int | None:
    return next((i for i, parts in enumerate(LEVELS) if part in parts), None)


def upward(module: Module) -> Iterator[str]:
    """Imports of ``module`` that do not point down."""
    mine = level_of(module.part)
    for found in imports(module):
        package, _, rest = found.name.partition(".")
        theirs_part = rest.partition(".")[0]
        theirs = level_of(theirs_part)
        if package != PACKAGE or theirs is None or mine is None or theirs_part == module.part:
            continue
        if theirs >= mine or theirs_part not in ALLOWED.get(module.part, {theirs_part}):
            yield f"{module.where}:{found.line} {module.part} imports {theirs_part}"


def heavy(module: Module) -> list[str]:
    at_top = [i for i in imports(module) if i.at_top and is_heavy(i)]
    return [f"{module.where}:{i.line} imports {i.name} at module level" for i in at_top]


def is_heavy(found: Import) -> bool:
    return found.name.partition(".")[0] in HEAVY or found.name.startswith("torch.utils.tensorboard")


def all_of(lines: Iterable[Iterable[str]]) -> list[str]:
    return [line for some in lines for line in some]


def fake(text: str, *name: str) -> Module:
    return Module(name, "/".join(name) + ".py", text)


def test_imports_point_down_only() -> None:
    assert all_of(upward(m) for m in modules()) == []


def test_an_upward_import_inside_a_function_is_seen() -> None:
    assert list(upward(fake("def f():\n    from lightrft.trainer import ppo\n", "models", "actor")))
    assert list(upward(fake("from ..trainer.ppo import step\n", "models", "actor")))
    assert list(upward(fake("from lightrft import cli\n", "trainer", "ppo")))
    assert not list(upward(fake("from lightrft.utils import errors\n", "models", "actor")))


def test_siblings_of_one_level_may_not_import_one_another() -> None:
    assert list(upward(fake("import lightrft.models.actor\n", "strategy", "single")))
    assert list(upward(fake("from lightrft.trainer import ppo\n", "viewer", "page")))
    assert not list(upward(fake("from .base import Strategy\n", "strategy", "single")))


def test_every_module_belongs_to_a_layer() -> None:
    homeless = [m.where for m in modules() if m.part and level_of(m.part) is None]
    assert homeless == []


def test_heavy_packages_are_imported_only_inside_functions() -> None:
    assert all_of(heavy(m) for m in modules()) == []


def test_a_heavy_import_under_a_condition_or_in_a_class_is_seen() -> None:
    assert heavy(fake("if True:\n    import ray\n", "trainer", "x"))
    assert heavy(fake("class A:\n    from peft import LoraConfig\n", "models", "x"))
    assert heavy(fake("from torch.utils.tensorboard import SummaryWriter\n", "utils", "x"))
    assert not heavy(fake("def f():\n    import ray\n", "trainer", "x"))


def lines_of_a_modality(tree: Iterable[Module]) -> dict[str, int]:
    """How many lines of each directory (of each file beside them) speak of a modality."""
    counts: dict[str, int] = {}
    for module in tree:
        spoken = sum(1 for line in module.text.splitlines() if MODALITY.search(line))
        counts[module.part] = counts.get(module.part, 0) + spoken
    return counts


def test_lines_that_speak_of_a_modality_are_where_media_are_read_and_nowhere_that_trains() -> None:
    counts = lines_of_a_modality(modules())
    print(
        "\n".join(
            f"{part or 'lightrft'}: {count}"
            for part, count in sorted(counts.items(), key=lambda kv: -kv[1])
        )
    )
    assert {part: counts[part] for part in SILENT} == dict.fromkeys(SILENT, 0)
    assert counts["models"] > 0 and counts["datasets"] > 0


def test_a_line_that_speaks_of_a_modality_is_counted() -> None:
    assert lines_of_a_modality(
        [fake("x = 1\nimages = 2\n# pixel_values_videos\n", "trainer", "ppo")]
    ) == {"trainer": 2}


def test_what_composes_and_what_trains_never_speaks_of_a_modality() -> None:
    silent = [m for m in modules() if m.part in SILENT]
    assert silent
    spoken = {m.where: sorted(set(MODALITY.findall(m.text))) for m in silent}
    assert {where: words for where, words in spoken.items() if words} == {}


def lines_on_cuda(module: Module) -> list[str]:
    """Uses of ``torch.cuda`` and ``is_cuda`` outside of what wraps a device: strategies, engines and kernels."""
    if module.part in DEVICES or module.name in KERNELS:
        return []
    return [
        f"{module.where}:{node.lineno} uses {ast.unparse(node)}: use torch.accelerator"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and (ast.unparse(node) == "torch.cuda" or node.attr == "is_cuda")
    ]


def test_only_strategies_engines_and_kernels_speak_of_cuda() -> None:
    assert all_of(map(lines_on_cuda, modules())) == []
    assert (
        lines_on_cuda(fake("import torch\nfree = torch.cuda.mem_get_info()[0]", "trainer", "x"))
        != []
    )
    assert (
        lines_on_cuda(fake("import torch\nfree = torch.cuda.mem_get_info()[0]", "strategy", "x"))
        == []
    )


ENGINE_KIND = re.compile(
    r"\bengine\.kind (?:==|!=|in|not in) "
    r"|isinstance\([^()]*\b(?:Native|VLLM|VLLMServer|HTTP|SGLang|Served)Engine\b"
    r"|isinstance\([^()]*\bTextEndpoint\b"
)


def lines_on_a_kind(module: Module) -> list[str]:
    """Lines that compare ``engine.kind`` or the class of an engine, outside of engines and table."""
    if module.part == "engines" or module.name[-1:] == ("engine_kinds",):
        return []
    return [
        f"{module.where}:{number}"
        for number, line in enumerate(module.text.splitlines(), 1)
        if ENGINE_KIND.search(line)
    ]


def test_what_differs_between_engines_is_in_the_table_of_kinds() -> None:
    assert all_of(map(lines_on_a_kind, modules())) == []
    assert lines_on_a_kind(fake('if config.engine.kind == "vllm": ...', "trainer", "x"))
    assert lines_on_a_kind(fake("assert isinstance(one, Base | HTTPEngine)", "workers", "x"))
    assert not lines_on_a_kind(fake("assert isinstance(one, RankZeroEngine)", "workers", "x"))


def test_no_folder_of_the_package_holds_more_than_twenty_files() -> None:
    folders = Counter(str(Path(m.where).parent) for m in modules())
    assert {folder: count for folder, count in folders.items() if count > 20} == {}
    assert max(folders.values()) > 10


def test_algorithms_import_only_types_settings_and_helpers() -> None:
    assert list(upward(fake("from lightrft.models.actor import Actor\n", "algorithms", "kl")))
    assert list(
        upward(fake("from lightrft.observability.metrics import Mean\n", "algorithms", "kl"))
    )
    assert not list(upward(fake("from lightrft.types import Batch\n", "algorithms", "kl")))


def test_only_the_command_line_imports_diagnostics() -> None:
    found = {
        m.part for m in modules() for i in imports(m) if i.name.startswith(f"{PACKAGE}.diagnostics")
    }
    assert found == {"cli", "diagnostics"}


# A function of these packages takes the section of the settings that it reads, or plain values.
SECTIONS_ONLY = ("algorithms", "learner", "rollout")


def whole_settings(module: Module) -> list[str]:
    """Return the imports of the settings of a whole command."""
    if module.part not in SECTIONS_ONLY:
        return []
    return [
        f"{module.where}:{i.line} imports {i.name}"
        for i in imports(module)
        if i.name.startswith("lightrft.config.verbs")
    ]


def test_learner_and_rollout_take_sections_of_the_settings_and_never_all_of_them() -> None:
    assert all_of(whole_settings(m) for m in modules()) == []


def test_a_function_that_takes_all_settings_is_seen() -> None:
    text = "from lightrft.config.verbs import RLConfig\ndef f(config: RLConfig): ...\n"
    assert whole_settings(fake(text, "learner", "x")) and whole_settings(fake(text, "rollout", "x"))
    assert not whole_settings(fake(text, "trainer", "x"))
    assert not whole_settings(
        fake("from lightrft.config.train import TrainConfig\n", "learner", "x")
    )


SEEDED = re.compile(r"\b(?:default_rng|manual_seed|RandomState|random\.Random|random\.seed)\(")
# Rows and models that are made from a seed of their own, and examples that are always the same.
OWN_SEEDS = {
    "lightrft/datasets/digits.py",
    *("lightrft/datasets/synthetic/arithmetic.py", "lightrft/datasets/synthetic/utility.py"),
    *(
        "lightrft/models/tiny/media.py",
        "lightrft/models/tiny/text.py",
        "lightrft/models/tiny/text_families.py",
    ),
    *("lightrft/algorithms/contracts/cases.py", "lightrft/algorithms/contracts/checks.py"),
    "lightrft/algorithms/contracts/preference_cases.py",
    "lightrft/algorithms/contracts/reward_cases.py",
}


def seeded(module: Module) -> bool:
    """Return whether ``module`` makes a random generator."""
    return SEEDED.search(module.text) is not None and module.name != ("utils", "seeding")


def test_every_generator_of_a_run_is_made_in_one_file() -> None:
    assert {m.where for m in modules() if seeded(m)} == OWN_SEEDS


def test_a_generator_that_is_made_elsewhere_is_seen() -> None:
    assert seeded(fake("g = torch.Generator().manual_seed(3)\n", "learner", "x"))
    assert seeded(fake("g = np.random.default_rng(3)\n", "datasets", "x"))
    assert not seeded(fake("g = numpy_generator(seed, RandomStream.CURRICULUM)\n", "rollout", "x"))
