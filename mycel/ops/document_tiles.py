"""Which tiles of rows and columns can have a document in common, for kernels that take a tile at a time.

    rows 0..63  have documents 2..4        columns 0..63   have 0..1        before the first: not looked at
                                                   64..127 have 1..3        the first that can meet
                                                   128..191 have 4..9       the last
                                                   192..255 have 9..9       behind it: not looked at

Each tile is known by the least and the largest of its numbers: exact where documents are packed one behind the other,
and never less than what meets.
"""

from __future__ import annotations

import torch


def meeting(rows, columns, size, step):
    """For each tile of `size` rows the first place among columns that it may meet, and the end of these, in tiles of
    `step`: numbers of the two tiles overlap in every key."""
    least, most = (_tile_numbers(rows, size, end) for end in (False, True))
    others_least, others_most = (_tile_numbers(columns, step, end) for end in (False, True))
    meets = (least.unsqueeze(2) <= others_most.unsqueeze(1)) & (others_least.unsqueeze(1) <= most.unsqueeze(2))
    meets = meets.all(3).to(torch.int32)
    first = meets.argmax(2) * step
    end = (meets.shape[2] - meets.flip(2).argmax(2)) * step
    none = meets.sum(2) == 0
    bounds = torch.stack([first.masked_fill(none, columns.shape[1]), end.masked_fill(none, 0)], 2)
    return bounds.to(torch.int32).contiguous()


def _tile_numbers(ids, size, largest):
    """The least or the largest of the numbers of each tile."""
    edge = torch.iinfo(ids.dtype).min if largest else torch.iinfo(ids.dtype).max  # as a float, for `pad`, it is another
    rest = ids.new_full((ids.shape[0], -ids.shape[1] % size, ids.shape[2]), edge)
    tiles = torch.cat([ids, rest], 1).unflatten(1, (-1, size))
    return tiles.amax(2) if largest else tiles.amin(2)
