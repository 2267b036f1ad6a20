"""Forms of a matrix: all compute the same product, as exactly as their weights allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.torch.support import Tensor, torch

from cachespec.engine.runtimes.torch import linear

CPU = torch.device("cpu")
WIDTHS = (1, 2, 3, 4, 5, 8, 17, 64)


@pytest.fixture(autouse=True)
def inference() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def weights(outputs: int = 96, inputs: int = 64) -> Tensor:
    found: Tensor = torch.randn(outputs, inputs) * 0.1
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [linear.Plain, linear.Packed])
@pytest.mark.parametrize("biased", [False, True])
def test_dense_forms(make: Callable[..., Any], dtype: Any, biased: bool) -> None:
    if make is linear.Packed and not linear.packs(dtype, CPU):
        pytest.skip("this build or processor has no packed kernels")
    weight, bias = weights().to(dtype), torch.randn(96).to(dtype) if biased else None
    form = make(weight, bias)
    assert form.nbytes == weight.nbytes
    for rows in WIDTHS:
        x = torch.randn(rows, 64).to(dtype)
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(form(x).double(), exact, rtol=limit, atol=limit)
        hidden = torch.randn(rows, 96)
        summed = hidden.clone()
        form.add_to(summed, x)
        assert torch.allclose(summed, hidden + form(x).float(), atol=1e-5)


def test_the_sum_into_a_residual_of_the_same_dtype() -> None:
    form, x, hidden = linear.Plain(weights().bfloat16(), None), torch.randn(5, 64).bfloat16(), torch.randn(5, 96).bfloat16()
    summed = hidden.clone()
    form.add_to(summed, x)
    assert torch.allclose(summed.float(), hidden.float() + form(x).float(), atol=3e-2)


@pytest.mark.parametrize("kernel", [False, True])
def test_int8_is_what_its_weights_say(kernel: bool) -> None:
    if kernel and not linear._int8_kernel_works(CPU, torch.bfloat16):
        pytest.skip("this build has no int8 kernel")
    weight, bias = weights(), torch.randn(96).bfloat16()
    whole, scales = linear.quantised(weight)
    decoded = whole.double() * scales.double().unsqueeze(1)
    # Half a step of each output, its largest weight being 127 or a little less: the scale is rounded to bfloat16.
    assert ((weight.double() - decoded).abs() <= scales.double().unsqueeze(1) * 0.501 + 1e-9).all()
    assert (scales.double() * 127 >= weight.double().abs().amax(1) * (1 - 2**-8)).all()
    form = linear.Int8(weight, bias, rows=4 if kernel else 0)
    assert form.nbytes == weight.numel() + 2 * 96
    for rows in WIDTHS:
        x = torch.randn(rows, 64).bfloat16()
        exact = x.double() @ decoded.t() + bias.double()
        assert torch.allclose(form(x).double(), exact, rtol=2e-2, atol=2e-2)
        hidden = torch.zeros(rows, 96)
        form.add_to(hidden, x)
        assert torch.equal(hidden, form(x).float())


def test_int8_of_nothing_is_nothing() -> None:
    weight = weights()
    weight[3] = 0
    form = linear.Int8(weight, None, rows=0)
    assert (form(torch.ones(2, 64).bfloat16())[:, 3] == 0).all()


def test_the_half_head_keeps_logits_apart() -> None:
    """bfloat16 logits near 20 are multiples of an eighth; these are not."""
    if not linear._half_works():
        pytest.skip("this build has no float16 kernel")
    weight = weights(1000).bfloat16()
    head = linear.HalfHead(weight)
    assert head.nbytes == weight.nbytes
    for rows in (1, 3, 9):
        x = (torch.randn(rows, 64) * 20).bfloat16()
        found = head(x)
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


def test_forms_fall_back_where_kernels_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(attempt: object) -> bool:
        return False

    monkeypatch.setattr(linear, "_works", missing)
    weight, x = weights(), torch.randn(2, 64)
    plain = linear.make_linear(weight, None, torch.float32, int8=None, device=CPU)
    assert isinstance(plain, linear.Plain)
    head = linear.make_head(weight, torch.bfloat16, CPU)
    assert isinstance(head, linear.Head)
    assert head(x.bfloat16()).dtype == torch.float32
    assert head.pad == 1
    eight = linear.make_linear(weight, torch.zeros(96), torch.bfloat16, int8=linear.int8_rows(CPU, torch.bfloat16), device=CPU)
    assert torch.allclose(eight(x.bfloat16()).float(), x @ weight.t(), atol=0.1)


def test_an_int8_kernel_serves_as_many_rows_as_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves with what is called: the kernel costs its rows, conversion always ten."""
    now = price = 0.0

    class Timed(linear.Int8):
        def __call__(self, x: Tensor) -> Tensor:
            nonlocal now
            now += x.shape[0] * price if x.shape[0] <= self._rows else 10
            return x

    monkeypatch.setattr(linear, "Int8", Timed)
    monkeypatch.setattr(linear, "perf_counter", lambda: now)
    found = {}
    for price in (0.1, 1.0, 4.0, 11.0):
        found[price] = linear._faster_rows(CPU, torch.bfloat16, 8)
    assert found == {0.1: 16, 1.0: 4, 4.0: 1, 11.0: 0}


def test_a_kernel_that_fails_or_errs_does_not_work() -> None:
    def fails() -> Tensor:
        raise RuntimeError("not compiled")

    assert not linear._works(fails)
    assert not linear._works(lambda: torch.ones(2, 3))
    assert linear._works(lambda: torch.full((2, 3), 3.0))
