"""Natural mistakes of newcomers get an answer that names the setting, the value and the fix."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.errors import ABOUT, alike, answer, errors_page, record, recorded
from lightrft.cli.main import main
from lightrft.models.tiny import save_tiny_media, tiny_tokenizer
from lightrft.models.tiny.text import PRINTABLE, tiny_model
from lightrft.utils.errors import UserError
from tests.e2e.command import command
from tests.e2e.mistakes import FILES, MISTAKES, PROMPT, STARTS, SUBJECTS, Mistake
from tests.e2e.python_mistakes import START

OWN_CODE = """from transformers import Qwen2Config, Qwen2ForCausalLM

class Config(Qwen2Config):
    model_type = "own"

class Model(Qwen2ForCausalLM):
    config_class = Config
"""


MODEL_FOLDERS = (
    *("model", "bare", "no_system", "no_weights", "no_eos", "own_code", "reordered", "awq", "big"),
)


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and models of the mistakes, and the run ``runs/demo``."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name in MODEL_FOLDERS:
        shutil.copytree(model_folder, folder / name)
    tokenizer = tiny_tokenizer()
    refusal = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    tokenizer.chat_template = f"{refusal}{tokenizer.chat_template}"
    tokenizer.save_pretrained(folder / "no_system")
    (folder / "bare" / "chat_template.jinja").unlink()
    (folder / "no_weights" / "model.safetensors").unlink()
    tiny_tokenizer(chars=PRINTABLE[::-1]).save_pretrained(folder / "reordered")
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    rewrite(folder / "own_code", model_type="own", auto_map=code)
    (folder / "own_code" / "own.py").write_text(OWN_CODE)
    rewrite(folder / "no_eos", eos_token_id=None)
    (folder / "no_eos" / "generation_config.json").unlink(missing_ok=True)
    rewrite(folder / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    (folder / "big" / "model.safetensors").unlink()
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 32)
    rewrite(folder / "big", hidden_size=32768, num_hidden_layers=99, layer_types=None, **heads)
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    save_tiny_media("qwen2_vl", folder / "eye")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words("rl+ run.name=demo reward.terms=[varied.py:reward]")) == 0
    return folder


def rewrite(folder: Path, **fields: Any) -> None:
    """Change fields of ``config.json``. None removes one."""
    file = folder / "config.json"
    tree = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


@pytest.fixture
def at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in ``folder``, in which each mistake has the name of its run for itself."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    for package in ("vllm", "wandb", "mlflow"):  # as where they are not installed
        monkeypatch.setitem(sys.modules, package, None)
    yield
    shutil.rmtree(folder / "runs" / "run", ignore_errors=True)


def words(typed: str) -> list[str]:
    """Return the words of a command, whose first word with ``+`` stands for those of ``STARTS``."""
    verb, *others = shlex.split(typed)
    if not verb.endswith("+"):
        return [verb, *others]
    verb = verb.removesuffix("+")
    given = dict(word.split("=", 1) for word in STARTS[verb].split(" "))
    given |= dict(word.split("=", 1) for word in others)
    return [verb, *(f"{key}={value}" for key, value in given.items() if value)]


def program(capsys, lines: str) -> tuple[int, str]:
    """Run lines of Python after ``START``. Return 2 after an error, and what was said.

    An attribute that an object of ours does not have is an ``AttributeError``, as Python has it.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    status, last = 0, ""
    try:
        exec(compile(f"{START}{lines}", "<notebook>", "exec"), names)
    except (UserError, AttributeError) as error:
        status, last = 2, f"{type(error).__qualname__}: {error}"
    return status, f"{capsys.readouterr().err}lightrft: {last or names.get('run')}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.id for mistake in MISTAKES])
def test_a_natural_mistake_is_answered_with_the_fix(
    capsys, at, folder: Path, mistake: Mistake
) -> None:
    """``docs/errors.py`` says how to write the answers of the page again."""
    if mistake.typed.startswith(PROMPT):
        status, said = program(capsys, mistake.typed.removeprefix(PROMPT))
    else:
        outcome = command(capsys, *words(mistake.typed))
        status, said = outcome.status, f"{outcome.out}{outcome.err}"
    assert status == mistake.status, said
    assert "Traceback" not in said
    assert [part for part in mistake.said.split(" | ") if part not in said] == [], said
    shown = answer(mistake, said, folder)
    if "LIGHTRFT_RECORD" in os.environ:
        record(mistake, shown)
    assert alike(recorded()[mistake.id], shown), shown


def test_the_page_of_errors_has_each_command_and_the_words_of_its_answer() -> None:
    page, answers = " ".join(errors_page().split()), recorded()
    assert list(ABOUT) == list(SUBJECTS)
    assert set(answers) == {mistake.id for mistake in MISTAKES}
    refused = [mistake for mistake in MISTAKES if mistake.status]
    assert len(refused) > 120
    for mistake in refused:
        assert " ".join(answers[mistake.id].split()) in page
        assert [part for part in mistake.said.split(" | ") if part not in answers[mistake.id]] == []


def test_each_mistake_stands_in_the_table_once() -> None:
    names = [mistake.id for mistake in MISTAKES]
    assert len(set(names)) == len(names) > 190


def test_the_answers_score_2_7_of_3_in_the_mean_and_none_is_silent() -> None:
    found = [mistake for mistake in MISTAKES if mistake.id.startswith("f")]
    scores = [mistake.score for mistake in MISTAKES]
    assert len(found) >= 50
    assert sum(scores) / len(scores) >= 2.7
    assert min(scores) > 0
