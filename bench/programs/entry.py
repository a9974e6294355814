"""How a program enters the sweep: a name, and what makes its model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
SEQ = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
IMG = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
IDS = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(4))
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])
LENGTHS = torch.tensor([5, 3, 2])
Made = tuple[nn.Module, Any]


class Net(nn.Module):
    """Parts with names, and what is done with them."""

    def __init__(self, how: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.how(self, *args)


PROGRAMS: dict[str, Callable[[], Any]] = {}


def net(parts: Callable[[], dict[str, Any]], *args: torch.Tensor) -> Callable[[Any], Any]:
    """Enter a function of a Net and these arguments as a program of its name."""

    def enter(how: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        PROGRAMS[f"net/{how.__name__}"] = lambda: (Net(how, **parts()), args)
        return how

    return enter


def program(make: Callable[[], Made]) -> Callable[[], Made]:
    """Enter a function that makes a model and a batch as a program of its name."""
    PROGRAMS[f"code/{make.__name__}"] = make
    return make
