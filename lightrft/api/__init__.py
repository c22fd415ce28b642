"""The Python way: every verb as a function, and the results of a run."""

from lightrft.api.calls import FUNCTIONS, signed
from lightrft.api.run import Page, Run
from lightrft.api.shown_data import ShownData

__all__ = ["FUNCTIONS", "Page", "Run", "ShownData", "signed"]
