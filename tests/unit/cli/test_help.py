"""``lightrft <verb> --help`` lists every setting with its default and its description."""

from __future__ import annotations

import pytest
from pydantic import Field

from lightrft.cli.arguments import INDENT, show_help, without_dashes
from lightrft.cli.main import main
from lightrft.config.base import Settings, description_of, descriptions
from lightrft.config.demo import DemoConfig
from lightrft.config.verbs import RLConfig
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.utils.errors import ModelError, path_of

VERBS = ("rl", "sft", "eval", "generate", "chat", "export", "merge", "convert", "doctor", "demo")


class Inner(Settings):
    """A branch."""

    rate: float = 1.0
    """Rate of ``x``,
    positive. Raise it in need."""
    names: dict[str, int] = Field(default_factory=lambda: {"rate": 1, "b": 2})
    """A table."""


class Outer(Settings):
    """A tree."""

    inner: Inner = Inner()
    """The branch."""
    plain: int = 3


class Later(Outer):
    """A tree that inherits fields."""

    more: bool = False
    """Do more."""


def described_rows(text: str) -> dict[str, str]:
    """Key to description, as the help shows them; empty for the further keys of a table."""
    rows: dict[str, str] = {}
    above = ""
    for line in text.partition("settings and their defaults\n")[2].splitlines():
        if line.startswith(INDENT):
            rows[above] = f"{rows[above]} {line.strip()}".strip()
        else:
            above = line.split()[0]
            rows[above] = ""
    return rows


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_describes_every_setting(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main([verb, "--help"]) == 0
    rows = described_rows(capsys.readouterr().out)
    # The keys of a table.
    first, *below = [key for key in rows if verb == "demo" and key.startswith("model.")] or [""]
    assert [key for key, text in rows.items() if not text] == below
    assert rows.get("run.name", "Name of").startswith("Name of")
    assert first == "" or rows[first].startswith("Sizes of")


def test_a_description_is_wrapped_below_its_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show_help("rl", Outer(), "A verb.")
    shown = capsys.readouterr().out.partition("defaults\n")[2]
    assert shown == (
        "  inner.rate        1.0\n"
        "      Rate of `x`, positive. Raise it in\n"
        "      need.\n"
        "  inner.names.rate  1\n"
        "      A table.\n"
        "  inner.names.b     2\n"
        "  plain             3\n"
    )


def test_descriptions_are_the_strings_below_fields() -> None:
    assert descriptions(Inner) == {
        "rate": "Rate of `x`, positive. Raise it in need.",
        "names": "A table.",
    }
    assert descriptions(Later) == {"inner": "The branch.", "more": "Do more."}


@pytest.mark.parametrize(
    ("cls", "key", "said"),
    [
        (Later, "inner.rate", "Rate of `x`"),
        (Later, "inner", "The branch."),
        (Outer, "inner.names.rate", "A table."),
        (RLConfig, "model.lora.rank", "Rank of the adapters."),
        (RLConfig, "data.sources.weight", "Relative share"),
        (DemoConfig, "model.hidden_size", "Sizes of the start model"),
        (DemoConfig, "rl.optimizer.lr", "Peak learning rate"),
    ],
)
def test_a_dotted_key_has_the_description_of_its_field(
    cls: type[Settings], key: str, said: str
) -> None:
    assert description_of(cls, key).startswith(said)


@pytest.mark.parametrize("key", ["plain", "nowhere", "nowhere.rate"])
def test_a_key_without_a_description_has_none(key: str) -> None:
    assert description_of(Outer, key) == ""


def test_a_class_without_source_has_no_descriptions() -> None:
    made: type[Settings] = type("Made", (Outer,), {"__module__": "nowhere"})
    assert descriptions(made) == {"inner": "The branch."}


def test_the_help_of_a_section_lists_that_section_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--help", "data.media"]) == 0
    rows = described_rows(capsys.readouterr().out)
    assert len(rows) > 5
    assert all(key.startswith("data.media.") for key in rows)
    assert main(["rl", "model.lora", "--help"]) == 0
    assert "model.lora.rank" in described_rows(capsys.readouterr().out)
    assert main(["sft", "--help", "dta"]) == 2
    assert "did you mean data?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rl", "algorithm=dpo"], "another verb trains by it: lightrft dpo."),
        (["rl", "algorithm=kto"], "another verb trains by it: lightrft kto."),
        (["rl", "algorithm=sft"], "another verb trains by it: lightrft sft"),
        (["dpo", "preference=grpo"], "lightrft rl algorithm=grpo"),
        (["grpo"], "did you mean 'lightrft rl algorithm=grpo'?"),
        (["simpo"], "did you mean 'lightrft dpo preference=simpo'?"),
        (["rl", "--learning_rate", "1e-5"], "learning_rate is optimizer.lr here"),
        (["rl", "--optimizer.lr=fast"], "optimizer.lr = 'fast' (from command line)"),
        (["rl", "--config", "a.yaml"], "there is no config file a.yaml"),
        (["serve", "--port", "8000"], "port is http.port here"),
        (["sft", "rollout.group_size=3"], "it is a setting of lightrft rl"),
        (["rl", "optimizer=adamw"], "below it, as in optimizer.lr=...: optimizer.lr, "),
        (["rl", "log.wandb=true"], "not true; Weights & Biases project to log to"),
    ],
)
def test_a_wrong_word_is_answered_with_the_way_to_write_it(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (["--a.b", "3", "c.yaml"], ["a.b=3", "c.yaml"]),
        (["--a.b=3", "--c"], ["a.b=3", "c=true"]),
        (["--run.overwrite", "--a", "-0.5"], ["run.overwrite=true", "a=-0.5"]),
        (["--run.overwrite", "a=1"], ["run.overwrite=true", "a=1"]),
        (["--data.template", "{x} = {y}"], ["data.template={x} = {y}"]),
        (["--config", "c.yaml", "--max-steps", "3"], ["c.yaml", "max_steps=3"]),
        (["--config=c.yaml", "folder", "a=--b"], ["c.yaml", "folder", "a=--b"]),
        (["--help", "data.media"], ["--help", "data.media"]),
        (["--a", "1", "-h", "--x"], ["a=1", "-h", "--x"]),
    ],
)
def test_settings_may_have_dashes(given: list[str], plain: list[str]) -> None:
    assert without_dashes(given) == plain == without_dashes(plain)


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("model.path=nope", "model.path"),
        ("critic.path=nope", "critic.path"),
        ("reference=nope", "reference"),
        ("reward={models: [{path: nope}]}", "reward.models.0.path"),
    ],
)
def test_a_model_that_does_not_exist_is_refused_by_the_setting_that_names_it(
    word, setting, tmp_path, capsys
):
    save_model(tiny_model("llama"), tiny_tokenizer(), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    words = [f"model.path={tmp_path / 'model'}", f"data={tmp_path / 'rows.jsonl'}", "reward=math"]
    sizes = ["sampling.max_new_tokens=4", "rollout.prompts_per_step=1"]
    more = [f"run.dir={tmp_path}", "algorithm=ppo", *sizes]
    assert main(["rl", *words, *more, word]) == 2
    assert f"{setting} = 'nope'" in capsys.readouterr().err


@pytest.mark.parametrize(("setting", "named"), [("critic.path", "critic.path"), ("", "model.path")])
def test_an_error_about_a_model_names_the_setting_of_its_path(setting: str, named: str) -> None:
    with pytest.raises(ModelError, match=f"^{named} = 'nope': there"), path_of(setting):
        raise ModelError("model.path = 'nope': there is no such folder")


@pytest.mark.parametrize(
    ("verb", "typed"), [("data", "show.verb=rl"), ("doctor", "doctor.verb=rl")]
)
def test_the_verb_of_a_config_without_its_prefix_is_refused_with_what_to_type(verb, typed, capsys):
    assert main([verb, "verb=rl", "model=m"]) == 2
    assert f"did you mean {typed}?" in capsys.readouterr().err
    assert main([verb, "--help"]) == 0
    assert typed.partition("=")[0] in capsys.readouterr().out
