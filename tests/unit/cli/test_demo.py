import pytest

from lightrft.cli.demo import demo_of, preset
from lightrft.config.base import build
from lightrft.config.demo import DemoConfig
from lightrft.trainer.demo import make_start
from lightrft.trainer.reward_demo import check_gold
from lightrft.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "name", "rest"),
    [
        ([], "arithmetic", []),
        (["run.seed=3", "more.yaml"], "arithmetic", ["run.seed=3", "more.yaml"]),
        (["vision"], "vision", []),
        (["run.seed=3", "audio", "--help"], "audio", ["run.seed=3", "--help"]),
    ],
)
def test_the_demo_is_named_by_a_word_among_the_arguments(given, name, rest):
    assert demo_of(given) == (name, rest)
    assert preset(name).is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["visoin"], "did you mean 'vision'"),
        (["smell"], "there are arithmetic, vision"),
        (["vision", "audio"], "'vision audio'"),
    ],
)
def test_a_demo_that_there_is_not_is_refused_with_those_that_there_are(given, said):
    with pytest.raises(ConfigError, match=said):
        demo_of(given)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"family": "llama"}, "family changes nothing with learned_rewards"),
        ({"learned_rewards": {"text": {}}}, r"text\.rl\.reward\.terms \(none\)"),
        (
            {"learned_rewards": {"text": {"rl": {"reward": {"terms": ["math"]}}}}},
            r"\(math of weight 1\) must be one term of weight 0",
        ),
    ],
)
def test_settings_of_learned_rewards_that_make_no_sense_are_refused(tree, said):
    with pytest.raises(ConfigError, match=said):
        check_gold(build(DemoConfig, {"learned_rewards": {"text": {}}, **tree}))


@pytest.mark.parametrize("setting", ["tower", "processor"])
def test_settings_of_media_are_refused_for_a_family_that_reads_text_alone(tmp_path, setting):
    with pytest.raises(ConfigError, match="'llama' reads text alone"):
        make_start(DemoConfig(family="llama", **{setting: {"depth": 1}}), tmp_path / "start", 0)
    assert not (tmp_path / "start").exists()
