"""These tests need a Python with transformers 4.57, which ``make test-exports`` installs."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("OLDER_PYTHON") else ["test_*.py"]
