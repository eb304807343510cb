"""Widths of passes: padded to the longest row, or beyond it to what compiled layers like."""

from __future__ import annotations

import pytest
from trainer_helpers import random_batch

from tollway.trainer.backends.microbatch import split


@pytest.mark.parametrize("multiple", [1, 16])
def test_every_row_is_in_one_pass_within_the_budget(multiple: int) -> None:
    rows = random_batch(40, seed=5, lengths=(2, 60)).rows
    passes = split(rows, 200, multiple=multiple)
    assert sorted(index for micro in passes for index in micro.members) == list(range(40))
    for micro in passes:
        longest = max(rows[index].token_ids.size for index in micro.members)
        predictions = micro.ids.shape[1] - 1
        assert predictions % multiple == 0
        assert max(1, longest - 1) <= predictions < max(1, longest - 1) + multiple
        assert micro.ids.size <= 200 or len(micro.members) == 1
        assert not micro.weights[~micro.mask].any()
