"""One small reader per public data set."""

from lightrft.datasets.benchmarks import gsm8k, instructions, maths, verl

__all__ = ["gsm8k", "instructions", "maths", "verl"]
