"""Modules that are imported when one of their attributes is first read."""

from __future__ import annotations

import torch

from lightrft.utils import lazy_imports
from tests.architecture.test_imports import run


def test_the_lazy_names_stand_for_the_real_ones():
    assert lazy_imports.torch.float32 is torch.float32
    assert isinstance(torch.zeros(1), lazy_imports.Tensor)
    assert not isinstance(1.0, lazy_imports.Tensor)


def test_nothing_is_imported_before_an_attribute_is_read():
    code = (
        "import sys\n"
        "from lightrft.utils.lazy_imports import Tensor, np, torch\n"
        "print(isinstance(1.0, Tensor), 'torch' in sys.modules, 'numpy' in sys.modules)\n"
        "np.zeros(1)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    assert run(code).split() == ["False", "False", "False", "False", "True"]
