"""Which settings each verb reads."""

from pydantic import ConfigDict

from docs.generate import SETTINGS
from lightrft.config.base import Settings
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.train import DistillationConfig
from lightrft.config.verbs import RLConfig
from lightrft.verbs import VERBS, all_settings


class Options(Settings):
    """The options of verbs without a class of settings, such as those of a function for ``lightrft check``."""

    model_config = ConfigDict(extra="allow")


class Verb(Settings):
    """What ``lightrft explain`` reads itself."""

    verb: str = "auto"


class Explained(RLConfig):
    """The settings of every verb that ``lightrft explain`` explains."""

    explain: Verb = Verb()
    preference: PreferenceConfig = PreferenceConfig()
    distill: DistillationConfig = DistillationConfig()


CONFIG_OF: dict[str, type[Settings]] = {
    **dict.fromkeys(VERBS, Options),
    **all_settings(),
    **SETTINGS,
    "explain": Explained,
}
