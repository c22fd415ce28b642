"""``lightrft settings``: settings by words."""

from __future__ import annotations

import pytest

from lightrft.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["settings", *words]) == 0
    return capsys.readouterr().out


def test_a_setting_is_found_by_its_name_with_default_verbs_and_description(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    first, second, *_ = said(capsys, "temperature").splitlines()
    assert first.startswith("sampling.temperature = 1.0  (rl, ") and "generate" in first
    assert second.startswith("      Divisor of the logits; 0 is greedy.")


def test_names_come_before_descriptions_and_outer_sections_before_inner_ones(capsys):
    names = [line.split()[0] for line in said(capsys, "lr").splitlines() if line[0] != " "]
    assert names[0] == "optimizer.lr"
    assert names.index("optimizer.lr_of") < names.index("critic.optimizer.lr")
    text = said(capsys, "kl")  # in descriptions too
    assert text.index("algorithm.kl.coef") < text.index("\nreference = null")


def test_defaults_that_differ_between_verbs_are_told_apart(capsys):
    rows = [line for line in said(capsys, "lr").splitlines() if line.startswith("optimizer.lr =")]
    assert any(row.startswith("optimizer.lr = 1.0e-05  (sft") for row in rows)
    assert any("= 1.0e-06" in row and "(rl" in row for row in rows)


def test_all_words_must_be_there(capsys):
    text = said(capsys, "kl", "coefficient")
    assert "algorithm.kl.coef" in text and "sampling.temperature" not in text


def test_a_name_of_another_framework_leads_to_the_setting_here(capsys):
    assert "is online.group_size or samples or rollout.group_size" in said(
        capsys, "num_generations"
    )
    assert "learning_rate of other frameworks is optimizer.lr" in said(capsys, "--learning_rate")


def test_a_word_that_nothing_has_is_answered_with_near_ones(capsys):
    assert main(["settings", "temperture"]) == 2
    assert "did you mean temperature" in capsys.readouterr().err
    assert main(["settings", "--help"]) == 0
    assert "Search the names" in capsys.readouterr().out
    assert main(["search"]) == 2
    assert "did you mean 'settings'?" in capsys.readouterr().err
