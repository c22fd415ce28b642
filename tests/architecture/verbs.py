"""Which settings each verb reads."""

from docs.generate import VERBS
from lightrft.utils.settings import Settings

CONFIG_OF: dict[str, type[Settings]] = {**VERBS, "explain": VERBS["rl"]}
