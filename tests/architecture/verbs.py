"""Which settings each verb reads."""

from pydantic import ConfigDict

from docs.generate import VERBS
from lightrft.config.base import Settings


class Options(Settings):
    """What ``lightrft check`` passes to a function: whatever that takes."""

    model_config = ConfigDict(extra="allow")


CONFIG_OF: dict[str, type[Settings]] = {
    **VERBS,
    "explain": VERBS["rl"],
    "check": Options,
    "report": Options,
}
