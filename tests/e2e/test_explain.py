"""``lightrft explain``."""

from __future__ import annotations

import pytest

from lightrft.config.presets import PRESETS
from tests.e2e.command import assert_refused, command


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_explained_with_its_numbers_and_papers(capsys, preset):
    outcome = command(capsys, "explain", preset)
    assert outcome.status == 0
    assert PRESETS[preset]["advantage"]["name"] in outcome.out
    assert "arXiv" in outcome.out and "numbers in force" in outcome.out


def test_a_number_says_which_file_or_argument_it_came_from(capsys, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("algorithm: {preset: ppo, loss: {clip_low: 0.1}}\n")
    out = command(capsys, "explain", config, "algorithm.loss.clip_high=0.3").out
    found = {
        line.split()[0]: line for line in out.splitlines() if line.strip().startswith("algorithm.")
    }
    assert (
        "0.1" in found["algorithm.loss.clip_low"]
        and "mine.yaml" in found["algorithm.loss.clip_low"]
    )
    assert (
        "0.3" in found["algorithm.loss.clip_high"]
        and "command line" in found["algorithm.loss.clip_high"]
    )
    assert "preset ppo" in found["algorithm.kl.coef"]


def test_latex_is_written_where_asked_for(capsys):
    out = command(capsys, "explain", "grpo", "--latex").out
    assert ("\\" in out and "pi_" in out) or "\\frac" in out


def test_a_server_that_the_run_starts_is_told(capsys, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("algorithm: {preset: grpo}\nengine: {kind: sglang}\n")
    assert "an SGLang server that each process starts" in command(capsys, "explain", config).out


def test_a_function_of_ones_own_is_shown_by_its_name(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def twice(batch, rewards, settings):\n    return 2 * rewards, rewards\n")
    outcome = command(capsys, "explain", f"algorithm.advantage={file}:twice")
    assert outcome.status == 0, outcome.err
    assert "twice" in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grppo"], ["grppo", "did you mean 'grpo'"]),
        (["algorithm.loss=ppo_clop"], ["ppo_clop", "ppo_clip"]),
        (["algorithm.advantage=nowhere.py:f"], ["nowhere.py"]),
        (["nowhere.yaml"], ["no config file", "nowhere.yaml"]),
        (
            ["grpo", "algorithm.loss.ratio=sequence", "algorithm.token_masks=[high_entropy]"],
            ["sequence_token"],
        ),
        (
            ["grpo", "engine.kind=vllm", "engine.quantization=fp8_per_channel"],
            ["engine.quantization = fp8_per_channel", "algorithm.importance_sampling=[tis]"],
        ),
        (["grpo", "rollout.partial=true"], ["rollout.partial = True changes nothing"]),
    ],
)
def test_what_does_not_exist_or_makes_no_sense_is_refused(capsys, words, said):
    assert_refused(command(capsys, "explain", *words), *said)


@pytest.mark.parametrize("mark", [(), ("explain.verb=iterate",)], ids=["found", "named"])
def test_rounds_are_explained_with_their_selection_and_the_loss_of_their_training(capsys, mark):
    recipe = "recipes/gsm8k_iterative_dpo.yaml"
    words = [recipe, "model=m", "select.margin=0.5", "dpo.batch_size=7", *mark]
    out = command(capsys, "explain", *words).out
    assert "dpo on selected responses, rounds: 3" in out
    assert "r(x, y_w) - r(x, y_l) > margin" in out
    found = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "margin = 0.5" in out
    assert "7" in found["batch_size"] and "command line" in found["batch_size"]
    assert "default" in found["optimizer.lr"]


def test_a_selection_that_a_training_cannot_read_is_refused_when_it_is_explained(capsys):
    words = ("recipes/gsm8k_iterative_dpo.yaml", "model=m", "select.keep=best")
    assert_refused(command(capsys, "explain", *words), "select.keep = 'best'", "lightrft dpo")


@pytest.mark.parametrize(
    "words",
    [
        ("grpo",),
        ("ppo", "train.num_mini_batches=2"),
        ("explain.verb=sft",),
        ("dpo",),
        ("kto",),
        ("explain.verb=distill",),
        ("recipes/gsm8k_iterative_dpo.yaml", "model=m"),
    ],
)
def test_the_load_balancing_loss_of_experts_is_shown_where_it_is_added(capsys, words):
    coefficient = "model.router_aux_loss_coef=0.02"
    texts = [command(capsys, "explain", *words, *more).out for more in ((), (coefficient,))]
    assert "router" not in texts[0]
    shown = dict.fromkeys(line.strip() for line in texts[1].splitlines())
    assert any(line.endswith(" + 0.02 L_router") for line in shown if "minimise" in line)
    assert any("L_router = E sum_e f_e P_e" in line for line in shown)
    assert "with router_aux_loss_coef = 0.02" in shown
    (number,) = [line for line in shown if line.startswith("model.router_aux_loss_coef")]
    assert number.split()[1:] == ["0.02", "command", "line"]
    # One pass counts experts for each pass that trains.
    passes = {line.split()[1] for line in shown if "counts of chosen experts" in line}
    trains = {line.split()[1] for line in shown if line.endswith("the loss, forward and backward")}
    assert passes == trains and len(passes) == 1
    latex = command(capsys, "explain", *words, coefficient, "--latex").out
    assert (
        r"+0.02\,L_{\mathrm{router}}" in latex
        and r"(\mathrm{router\_aux\_loss\_coef}=0.02)" in latex
    )


def test_rows_without_advantage_are_told_to_balance_experts(capsys):
    words = ("grpo", "algorithm.kl.coef=0")
    texts = [
        command(capsys, "explain", *words, *more).out
        for more in ((), ("model.router_aux_loss_coef=0.02",))
    ]
    dropped, kept = "are not run through the model", "gradient from the load-balancing loss"
    assert [dropped in text for text in texts] == [True, False]
    assert [kept in text for text in texts] == [False, True]
