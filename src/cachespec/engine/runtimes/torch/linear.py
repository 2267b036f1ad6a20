"""Matrices of weights, each in the form that multiplies fastest on its device.

Decoding reads every weight once a token, so what counts is how few bytes that is and how close to the memory's speed they
are read. On a CPU, `torch.nn.functional.linear` reorders bfloat16 weights at every call; packed once, they are read about
twice as fast. Measured on two cores with AVX512-BF16, 3072 x 576, microseconds at 1, 4 and 16 rows: linear 440, 480, 680;
packed 280, 245, 420.

Packed kernels are slower for one or two rows than for three or four. Callers pad (`PAD`).
"""

from __future__ import annotations

from time import perf_counter
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

PAD: Final = 4
"""Rows below this cost as much as this many, or more, with packed kernels: pad to it."""

_INT8_ROWS: Final = 4  # on a CPU, up to here the int8 kernel beats multiplying with weights made bfloat16 for the call
_INT8_TRIED: Final = (1, 4, 16)  # rows that are tried on a GPU, whose kernel has been a slow one in some versions of torch


class Linear(Protocol):
    """x [rows, inputs] -> [rows, outputs], both of the model's dtype. `nbytes`: of weights in memory."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """hidden += what `__call__` gives, in place."""


class Plain:
    """`torch.nn.functional.linear` on the weights as they are."""

    __slots__ = ("_bias", "_transposed", "_weight", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        if self._bias is None and hidden.dtype == x.dtype:
            hidden.addmm_(x, self._transposed)  # the sum costs no kernel of its own
        else:
            hidden.add_(self(x))


class Packed:
    """Weights in oneDNN's blocked layout. float32 and bfloat16, CPU."""

    __slots__ = ("_bias", "_run", "_weight", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = weight.nbytes
        # The number of rows is a hint: the layout chosen for 16 is as good for one.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        hidden.add_(self._run(x, self._weight, self._bias, "none", [], ""))


class Int8:
    """int8 weights with a scale for each output, bfloat16 in and out. Up to `rows` are multiplied by the int8 kernel."""

    __slots__ = ("_bias", "_rows", "_scales", "_weight", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, rows: int) -> None:
        self._weight, self._scales = quantised(weight)
        self._bias, self._rows = bias, rows
        self.nbytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self._rows:
            y = torch._weight_int8pack_mm(x, self._weight, self._scales)
        else:
            y = F.linear(x, self._weight.to(x.dtype)).mul_(self._scales)
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        hidden.add_(self(x))


class Output(Protocol):
    """The output matrix: x [rows, inputs] of the model's dtype -> logits, float32. `pad`: fewer rows than this cost as much
    as this many."""

    nbytes: int
    pad: int

    def __call__(self, x: Tensor) -> Tensor: ...


class HalfHead:
    """The output matrix of a CPU model with 16-bit weights: float16 in memory, multiplied in float32.

    Logits come in float32 that way. bfloat16 ones would make ties of half the likely tokens: at 20, its steps are 0.125.
    float16 holds bfloat16 weights exactly between 6e-5 and 65504, and smaller ones to 3e-8.
    """

    __slots__ = ("_packed", "_run", "nbytes", "pad")

    def __init__(self, weight: Tensor) -> None:
        self.nbytes, self.pad = 2 * weight.numel(), 1
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._run = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x.float(), self._packed)  # type: ignore[no-any-return]


class WideHead:
    """The output matrix of a GPU model with 16-bit weights: the sums, which are float32, are not rounded."""

    __slots__ = ("_transposed", "nbytes", "pad")

    def __init__(self, weight: Tensor) -> None:
        self._transposed, self.nbytes, self.pad = weight.t(), weight.nbytes, 1

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._transposed, out_dtype=torch.float32)


class Head:
    """The output matrix with any `Linear`."""

    __slots__ = ("_linear", "nbytes", "pad")

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.pad = PAD if isinstance(linear, Packed) else 1
        self.nbytes = linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x).float()


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights and the bfloat16 scale of each output; weight ~ int8 * scale.

    The scale is rounded first and the weights divided by what it became, so that rounding it costs nothing.
    """
    weight = weight.float()
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30).to(torch.bfloat16)
    whole = (weight / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
    return whole.contiguous(), scales.view(-1)


def make_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, int8: int | None, device: torch.device) -> Linear:
    """The fastest form of these weights, tried once on a small input before it is relied on. `int8`: see `int8_rows`."""
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    if int8 is not None:
        return Int8(weight.to(device), bias, rows=int8)
    weight = weight.to(device=device, dtype=dtype)
    return Packed(weight, bias) if packs(dtype, device) else Plain(weight, bias)


def make_head(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Output:
    """The output matrix; 16 bits also in an int8 model, where it is what rounding hurts most."""
    if dtype == torch.bfloat16 and device.type == "cpu" and _half_works():
        return HalfHead(weight)
    if dtype == torch.bfloat16 and device.type == "cuda" and _wide_works(device):
        return WideHead(weight.to(device=device, dtype=dtype))
    return Head(make_linear(weight, None, dtype, int8=None, device=device))


def int8_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Up to how many rows the int8 kernel is the faster way; 0 where there is none."""
    if not _int8_kernel_works(device, dtype):
        return 0
    return _INT8_ROWS if device.type == "cpu" else _faster_rows(device, dtype)


def _faster_rows(device: torch.device, dtype: torch.dtype, size: int = 4096) -> int:
    """Of those tried, the most rows up to which the int8 kernel is measured to be faster than converted weights."""

    def seconds(rows: int, form: Int8) -> float:
        x, best = torch.ones(rows, size, device=device, dtype=dtype), float("inf")
        for _ in range(5):
            begin = perf_counter()
            form(x)[0, 0].item()  # waits for the result
            best = min(best, perf_counter() - begin)
        return best

    weight = torch.ones(size, size, device=device)
    kernel, converted = Int8(weight, None, rows=max(_INT8_TRIED)), Int8(weight, None, rows=0)
    found = 0
    for rows in _INT8_TRIED:
        if seconds(rows, kernel) >= seconds(rows, converted):
            break
        found = rows
    return found


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `Packed` works for this dtype here: the build has oneDNN, and the processor what it needs."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return _works(lambda: Packed(torch.ones(16, 16, dtype=dtype), None)(torch.ones(1, 16, dtype=dtype)))


def _half_works() -> bool:
    return _works(lambda: HalfHead(torch.ones(16, 16))(torch.ones(1, 16)))


def _wide_works(device: torch.device) -> bool:
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    return _works(lambda: WideHead(ones)(ones))


def _int8_kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    weight = torch.ones(32, 32, dtype=torch.int8, device=device)
    ones = torch.ones(32, device=device, dtype=dtype)
    return _works(lambda: torch._weight_int8pack_mm(ones.view(1, 32), weight, ones))


def _works(attempt: object) -> bool:
    """Whether a kernel runs and multiplies ones rightly: builds differ in what they have."""
    try:
        with torch.inference_mode():
            y = attempt()  # type: ignore[operator]
            return bool((y == y.shape[-1]).all())
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False
