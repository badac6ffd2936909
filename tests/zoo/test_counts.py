"""What the zoo says its modules hold is what their forward pass does.

The autograd graph behind last_hidden_state holds exactly the operations that it depends on: no pooler, no head.
"""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch


@pytest.fixture(scope="module")
def operations(zoo):
    """How often each operation happens on the way to last_hidden_state, by row."""
    routes = importlib.import_module("routes")
    found = {}
    for row in zoo.ZOO:
        of = routes.source(row)
        with routes.inference(of.module), torch.enable_grad():
            feeds = {name: torch.from_numpy(array) for name, array in routes.feeds(row, 2, 5, "right").items()}
            seen, left = set(), [of.call(feeds)["last_hidden_state"].grad_fn]
        while left:
            function = left.pop()
            if function is not None and function not in seen:
                seen.add(function)
                left += [each for each, _ in function.next_functions]
        found[row.name] = Counter(function.name().removesuffix("0").removesuffix("Backward") for function in seen)
    return found


KINDS = {
    "attention": ("Softmax", "SafeSoftmax", "XSoftmax", "ScaledDotProduct"),
    "layer_norm": ("NativeLayerNorm",),
    "rms_norm": ("Rsqrt", "FusedRmsNorm"),
    "gelu": ("Gelu", "Tanh", "Sigmoid"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_modules(zoo, operations, kind):
    found = {
        name: sum(number for operation, number in counted.items() if operation.startswith(KINDS[kind]))
        for name, counted in operations.items()
    }
    assert found == {row.name: row.counts[kind] for row in zoo.ZOO}


def test_names_differ(zoo):
    assert len({row.name for row in zoo.ZOO}) == len(zoo.ZOO)
