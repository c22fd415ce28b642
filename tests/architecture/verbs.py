"""Which settings each verb reads."""

from pydantic import ConfigDict

from docs.generate import SETTINGS
from lightrft.config.base import Settings
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.config.train import DistillationConfig
from lightrft.config.verbs import RLConfig
from lightrft.verbs import all_settings


class Options(Settings):
    """What ``lightrft check`` passes to a function: whatever that takes."""

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
    **all_settings(),
    **SETTINGS,
    "explain": Explained,
    "check": Options,
    "report": Options,
    "settings": Options,
    "completion": Options,
}
