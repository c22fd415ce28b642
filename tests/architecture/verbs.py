"""Which settings each verb reads."""

from lightrft import config
from lightrft.utils.settings import Settings

CONFIG_OF: dict[str, type[Settings]] = {
    "demo": config.DemoConfig,
    "rl": config.RLConfig,
    "sft": config.SFTConfig,
    "eval": config.EvaluateConfig,
    "generate": config.GenerateConfig,
    "chat": config.ChatConfig,
    "explain": config.RLConfig,
}
