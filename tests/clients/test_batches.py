"""Which columns of a left-padded batch every row can fill."""

import numpy as np
import pytest

from kvstore.clients.batches import Row, fillable_columns, rows_of


def row(padding: int, tokens: int) -> Row:
    return Row(padding, np.arange(tokens))


@pytest.mark.parametrize(
    ("rows", "hits", "columns"),
    [
        ([row(0, 40)], [32], 32),
        ([row(0, 40)], [0], 0),
        ([row(3, 40)], [0], 0),  # padding alone is no gain
        ([row(0, 70), row(30, 40)], [64, 32], 62),
        ([row(0, 70), row(30, 40)], [64, 0], 30),
        ([row(0, 70), row(30, 40)], [0, 32], 0),
        ([row(5, 70), row(35, 40)], [0, 32], 0),
        ([row(0, 70), row(30, 40), row(69, 1)], [16, 32, 0], 16),
    ],
)
def test_every_row_can_fill_the_columns(rows: list[Row], hits: list[int], columns: int) -> None:
    assert fillable_columns(rows, hits) == columns


def test_rows_start_after_their_padding() -> None:
    first, second = rows_of(np.array([[7, 8, 9], [0, 0, 5]]), np.array([[1, 1, 1], [0, 0, 1]]))
    assert (first.padding, first.tokens.tolist(), first.columns) == (0, [7, 8, 9], 3)
    assert (second.padding, second.tokens.tolist(), second.columns) == (2, [5], 3)
