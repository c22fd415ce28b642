"""Run the command ``lightrft`` as ``python -m lightrft``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("lightrft.cli.main", run_name="__main__")
