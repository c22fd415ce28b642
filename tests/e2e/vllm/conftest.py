"""Runs with the real vLLM. ``make test-vllm`` makes an environment that has it; elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
