"""Where new pages go in the page tables on the device."""

from __future__ import annotations

import numpy as np
import pytest

from cortex.neuron.engine.execution.page_tables import flat_places, joined


@pytest.mark.parametrize(
    ("added", "places"),
    [
        ([(0, 0, 1)], [0]),
        ([(2, 3, 2)], [23, 24]),
        ([(1, 0, 3), (0, 9, 1), (2, 8, 2)], [10, 11, 12, 9, 28, 29]),
        ([(1, 2, 0), (1, 2, 1)], [12]),
    ],
)
def test_places_of_new_pages(added: list[tuple[int, int, int]], places: list[int]) -> None:
    found = flat_places(added, 10)
    assert found.tolist() == places
    assert found.dtype == np.int64


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([], []),
        ([(1, 0, 3)], [(1, 0, 3)]),
        ([(1, 0, 3), (1, 3, 2), (1, 5, 1)], [(1, 0, 6)]),
        ([(1, 0, 3), (2, 3, 2)], [(1, 0, 3), (2, 3, 2)]),
        ([(1, 0, 3), (1, 4, 2), (2, 0, 1), (2, 1, 1)], [(1, 0, 3), (1, 4, 2), (2, 0, 2)]),
    ],
)
def test_additions_that_follow_each_other_are_one(
    added: list[tuple[int, int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert joined(added) == expected
