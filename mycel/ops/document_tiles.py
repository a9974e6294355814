"""Which tiles of rows and columns can have a document in common, for kernels that take a tile at a time.

    rows 0..63  have documents 2..4        columns 0..63   have 0..1        before the first: not looked at
                                                   64..127 have 1..3        the first that can meet
                                                   128..191 have 4..9       the last
                                                   192..255 have 9..9       behind it: not looked at

Each tile is known by the least and the largest of its numbers: exact where documents are packed one behind the other,
and never less than what meets.  Tiles of a single document see all of each other: no number of theirs is compared.
"""

from __future__ import annotations

import torch


def meeting(rows, columns, size, step):
    """For each tile of `size` rows, of the places among columns in tiles of `step`: the first that it may meet and the
    end of these, the first that all of it meets and the end of its neighbours that all of it meets."""
    least, most = (_tile_numbers(rows, size, end).unsqueeze(2) for end in (False, True))
    others_least, others_most = (_tile_numbers(columns, step, end).unsqueeze(1) for end in (False, True))
    meets = ((least <= others_most) & (others_least <= most)).all(3)
    alone = (least == most) & (others_least == others_most)
    some, all_ = (_run(x, step) for x in (meets, meets & alone.all(3)))
    last = (meets.shape[2] - meets.flip(2).to(torch.int32).argmax(2)) * step
    last = torch.where(some[0] == some[1], 0, last)
    return torch.stack([some[0], last, *all_], 2).to(torch.int32).contiguous()


def _run(flags, step):
    """The first of the tiles that are marked, and the end of its marked neighbours; the end of all, if none is."""
    count = flags.shape[2]
    places = torch.arange(count, device=flags.device)
    first = torch.where(flags, places, count).amin(2)
    stop = torch.where(~flags & (places >= first.unsqueeze(2)), places, count).amin(2)
    return first * step, stop * step


def _tile_numbers(ids, size, largest):
    """The least or the largest of the numbers of each tile."""
    edge = torch.iinfo(ids.dtype).min if largest else torch.iinfo(ids.dtype).max  # as a float, for `pad`, it is another
    rest = ids.new_full((ids.shape[0], -ids.shape[1] % size, ids.shape[2]), edge)
    tiles = torch.cat([ids, rest], 1).unflatten(1, (-1, size))
    return tiles.amax(2) if largest else tiles.amin(2)
