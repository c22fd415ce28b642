"""Run folders for the tests of the viewer."""

import math

from lightrft.config.base import Settings
from lightrft.observability.run_directory import RunDirectory

HOSTILE = (
    "</pre></script><script>document.title='owned'</script>"
    "<img src=//evil.example/x onerror=\"document.title='owned'\"> ' & {{7*7}}"
)


class Inner(Settings):
    lr: float = 0.1


class Config(Settings):
    name: str = "run"
    optimizer: Inner = Inner()


def rl_row(step, steps=60):
    share = 1 / (1 + math.exp(-8 * (step / steps - 0.5)))
    row = {
        "phase": "rl",
        "step": step,
        "reward/mean": 0.3 + 0.6 * share,
        "reward/correct": share,
        "reward/format": 0.9,
        "response/length": 30 - 10 * share,
        "response/clip_ratio": 0.0,
        "policy/kl": 0.1 * share,
        "policy/entropy": 0.8 - 0.5 * share,
        "rollout/tokens": 150,
        "rollout/tokens_sampled": 100,
        "rollout/tokens_trained": 80,
        "rollout/tokens_filtered": 15,
        "rollout/tokens_failed": 5,
        "time/step": 2.0,
        "time/generate": 1.2,
        "time/update": 0.7,
        "time/other": 0.1,
        "tokens_per_second": 1500.0,
        "seconds": 2.0 * step,
    }
    return row | ({"eval/accuracy": 0.4 + 0.55 * share} if step % 10 == 0 else {})


def answer(prompt, text, correct):
    return {"prompt": prompt, "text": text, "label": "5", "correct": correct}


def make_run(path, text="2+3", config=None):
    with RunDirectory.open(
        path, config or Config(optimizer=Inner(lr=0.5)), resume="auto", overwrite=False
    ) as folder:
        for step in range(1, 31):
            folder.log({"phase": "sft", "step": step, "loss": 2.0 / step})
        for step in range(1, 61):
            folder.log(rl_row(step))
        folder.write_samples(
            [answer(f"{text} #{i}", f"before {text}", False) for i in range(7)],
            [answer(f"{text} #{i}", f"after {text}", True) for i in range(7)],
        )
        folder.write_summary(
            {
                "heldout_before": 0.412,
                "heldout_after": 0.968,
                "seconds": 222.0,
                "steps": 60,
                "tokens": 9000,
                "next": [f"lightrft chat '{text}'  # {text}", "lightrft explain grpo"],
            }
        )
    return path
