# SPDX-License-Identifier: Apache-2.0
"""Which rows the programs of an expert take: the pairs (row, slot j) of a pass, ordered by expert
and cut into tiles of at most so many, all of them of one expert.

    order [n · k] int64     the pairs, those whose expert has no address last
    tiles [T, 3] int32      expert, first position in `order`, where the expert's positions end

T follows from shapes alone: there are as many tiles as the worst routing needs, and those that this
one does not need end before they begin.
"""


def most_tiles(pairs: int, experts: int, rows_per_tile: int) -> int:
    return pairs // rows_per_tile + min(experts, pairs)
