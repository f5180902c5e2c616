"""The dtype that unlike operands agree on."""

from __future__ import annotations

import logging

import pytest
import torch

from fxpass import messages
from fxpass.casts.casts import MixedDtypeError, common_dtype

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
WHERE = "linear, at train.py:7 y = self.head(h)"


@pytest.mark.parametrize(("dtypes", "expected"), [({BF16, F32}, BF16), ({F16, F32}, F16)])
def test_low_precision_with_float32_is_the_low_precision(dtypes, expected, caplog):
    assert common_dtype(dtypes, "cast", WHERE) == expected
    assert not caplog.records


@pytest.mark.parametrize("dtypes", [{F16, BF16}, {F16, BF16, F32}])
def test_float16_with_bfloat16_is_float32_with_a_warning(dtypes, caplog):
    assert common_dtype(dtypes, "cast", WHERE) == F32
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fxpass.casts.casts", logging.WARNING)
    assert f"float16 meets bfloat16 in {WHERE}: computed in float32" in record.getMessage()
    assert messages.fixed(messages.HALF_MEETS_BFLOAT16) in record.getMessage()


OTHERS = (F64, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mixed_dtypes", ["cast", "error"])
def test_what_autocast_does_not_leave_behind_is_left_to_pytorch(other, dtype, mixed_dtypes):
    assert common_dtype({other, dtype}, mixed_dtypes, WHERE) is None


@pytest.mark.parametrize("dtypes", [{BF16, F32}, {F16, BF16}])
def test_the_error_says_what_where_and_what_to_do(dtypes):
    with pytest.raises(MixedDtypeError) as caught:
        common_dtype(dtypes, "error", WHERE)
    names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    assert str(caught.value) == (
        f"operands of {names} meet outside autocast in {WHERE}: cast one of them, put the call "
        "under torch.autocast, or let fxpass cast with FUSEDCE_MIXED_DTYPES=cast"
    )
