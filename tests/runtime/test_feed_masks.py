"""What a mask may hold."""

from __future__ import annotations

import numpy as np
import pytest

from tfx.errors import FeedError
from tfx.runtime.feeds import FeedChecker
from tfx.runtime.tensors import TensorSpec

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"), "token_ids", 9)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
@pytest.mark.parametrize("value", [2, -1])
def test_a_mask_holds_0_and_1_in_every_type(dtype, value):
    """A soft mask would weigh keys in a padded graph and keep them whole in a ragged one."""
    mask = TensorSpec("attention_mask", dtype, ("batch", "sequence"), "attention_mask")
    values = np.array([[1, 0, 1], [1, value, 0]], dtype)
    ids = np.ones((2, 3), np.int64)
    with pytest.raises(FeedError, match=f"attention_mask: found {value}, wanted 0 or 1"):
        FeedChecker((IDS, mask), None)({"input_ids": ids, "attention_mask": values})
