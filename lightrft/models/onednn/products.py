"""Products of float32 matrices by oneDNN in training and scoring, where it is faster than MKL.

torch multiplies float32 matrices by MKL on x86. On processors of AMD, MKL computes with vectors of
256 bits. From Zen 5 on, a core has units of 512 bits. oneDNN uses them, and large products take
less than half of the time. On other processors, both libraries are about as fast.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LEAST = 2**25
"""Multiplications of the smallest product that oneDNN gets. It compiles a kernel for each new
shape, which takes about as long as MKL takes for this product."""
ZEN_5 = 26
"""Family number of AMD's first processors with vector units of 512 bits."""
BLOCK = 2**22
"""Numbers of a gradient that exist once more while it is summed."""
_PLAIN = (Tensor, nn.Parameter)


def onednn_available() -> bool:
    """Return whether torch has oneDNN, on an x86 processor with vector units."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices on this processor."""
    return onednn_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def is_faster_than_mkl() -> bool:
    """Return whether oneDNN uses wider vectors than MKL on this processor."""
    if not onednn_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return _amd_family(Path("/proc/cpuinfo").read_text(encoding="utf-8")) >= ZEN_5
    except OSError:
        return False


def _amd_family(cpuinfo: str) -> int:
    """Return the family number of a processor of AMD, and 0 for others."""
    family = re.search(r"^cpu family\s*:\s*(\d+)$", cpuinfo, re.MULTILINE)
    is_amd = re.search(r"^vendor_id\s*:\s*AuthenticAMD$", cpuinfo, re.MULTILINE)
    return int(family[1]) if family and is_amd else 0


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or ``None``.
    """
    if not _is_for_onednn(input, weight):
        return functional.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias)


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias`` by oneDNN, without gradients.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``, which may be packed.
        bias: ``[out]``, or ``None``.
    """
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def write_gradient_of_input(out: Tensor, d: Tensor, weight: Tensor) -> None:
    """Write the gradient in the input to ``out [N, in]``.

    Args:
        out: Gets the gradient.
        d: ``[N, out]`` gradient in the output.
        weight: ``[out, in]``.
    """
    if _is_for_onednn(d, weight.t()):
        out.copy_(multiply(d, weight.t()))
    else:
        torch.mm(d, weight, out=out)


def add_gradient_of_weight(total: Tensor, d: Tensor, input: Tensor) -> None:
    """Add the gradient in the weight to ``total [out, in]``.

    Args:
        total: Sum of gradients, in the dtype of ``d`` or a wider one.
        d: ``[N, out]`` gradient in the output.
        input: ``[N, in]``.
    """
    if _is_for_onednn(input.t(), d.t()):
        rows = max(1, BLOCK // input.shape[1])
        for part, columns in zip(total.split(rows), d.split(rows, 1), strict=True):
            part += _gradient_of_weight(columns, input)
    elif total.dtype == d.dtype:
        # saves a temporary [out, in], but takes tensors of one dtype only
        total.addmm_(d.T, input)
    else:
        total += d.T @ input


def _gradient_of_weight(d: Tensor, input: Tensor) -> Tensor:
    count, height = d.shape
    width = input.shape[1]
    # oneDNN copies its left operand; this order also copies the result, into the order of weights
    if count * width + height * width < count * height:
        return multiply(input.t(), d.t()).t()
    return multiply(d.t(), input.t())


def _is_for_onednn(input: Tensor, weight: Tensor) -> bool:
    return (
        is_faster_than_mkl()
        and input.numel() * weight.shape[0] >= LEAST
        and input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        # tensors of other classes have products of their own
        and type(input) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return multiply(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        d_input = d_weight = d_bias = None
        rows = d.reshape(-1, d.shape[-1])
        if ctx.needs_input_grad[0]:
            d_input = multiply(d, weight.t())
        if ctx.needs_input_grad[1]:
            d_weight = _gradient_of_weight(rows, input.reshape(-1, input.shape[-1]))
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        return d_input, d_weight, d_bias
