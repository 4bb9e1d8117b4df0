"""The gpu tier's tests of the forward, each once more with the kernel of sm_100 hosted on Hopper.

They are the same functions: a fixture turns every call to the hosted target.
"""

from __future__ import annotations

import pytest

from . import (
    test_bias,
    test_coverage,
    test_faults,
    test_layouts,
    test_modifiers,
    test_packed,
    test_plain,
)
from .hosting import hosted as hosted

pytestmark = pytest.mark.gpu
LEFT_OUT = {
    "test_addresses_past_32_bits": "gigabytes",
    "test_captured_table_past_32_bits": "gigabytes",
    "test_more_tiles_than_a_grid_dimension": "a hosted product is one warp's: minutes",
    "test_four_million_keys": "a hosted product is one warp's: minutes",
    "test_few_queries_pick_the_packed_kernel": "asks for a kernel of Hopper",
    "test_a_compiled_kernel_takes_sinks": "asks for a kernel of Hopper",
    "test_as_element_by_element": "compares kernels of Hopper's tiles",
    "test_long": "a hosted product is one warp's: minutes",
    "test_a_bias_past_32_bits": "gigabytes",
    "test_gradients_are_those_of_the_other_path": "the backward has no kernel of sm_100",
    "test_the_gradient_of_a_bias": "the backward has no kernel of sm_100",
}


def _tests() -> dict:
    """Each by its file's name and its own."""
    modules = (
        *(test_bias, test_coverage, test_faults, test_layouts, test_modifiers),
        *(test_packed, test_plain),
    )
    return {
        f"{module.__name__.rpartition('.')[2]}_{name.removeprefix('test_')}": test
        for module in modules
        for name, test in vars(module).items()
        if name.startswith("test_") and callable(test) and name not in LEFT_OUT
    }


globals().update(_tests())
