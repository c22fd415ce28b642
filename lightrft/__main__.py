"""``python -m lightrft`` is the command ``lightrft``."""

from lightrft.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
