"""Text of tensors in captured code: printed at every call with the values of that call, kept as PyTorch keeps it."""

import contextlib
import copy
import io
import re
import sys

import pytest
import torch
from torch import nn

import mycel

pytestmark = pytest.mark.filterwarnings("ignore:.*runs as plain Python")


class Printing(nn.Module):
    """`say` prints or keeps text of what the model computes."""

    def __init__(self, say):
        super().__init__()
        self.linear, self.say, self.last, self.log = nn.Linear(2, 2), say, "", []

    def forward(self, x):
        h = self.linear(x)
        self.say(self, x, h)
        return h.square().sum()


def kept(model, x, h):
    model.last = f"{h.sum()} of {x[0]}"


def logged(model, x, h):
    model.log.append(str(h))


SAYS = {
    "tensor": lambda model, x, h: print("h", h, x.sum()),
    "f-string": lambda model, x, h: print(f"mean {h.mean()}, {h[0]}!"),
    "str": lambda model, x, h: print("h: " + str(h) + repr(x.sum())),
    "join": lambda model, x, h: print(", ".join(map(str, [h.sum(), 3])), str(h.min()), sep=" | ", end=".\n"),
    "structure": lambda model, x, h: print([h.sum(), 1], {"x": x}),
    "changed later": lambda model, x, h: [y := h.detach() * 1, text := f"{y}", y.add_(1), print(text, y)],
    "number": lambda model, x, h: print(h.sum().item(), f"{h.sum().item()}"),
    "format": lambda model, x, h: print(f"{h.sum():.3f}"),
    "stderr": lambda model, x, h: print(f"sum {h.sum()}", file=sys.stderr),
    "kept": kept,
    "list": logged,
}


def said(call, model):
    """What some calls print and keep; gradients' names apart, which a program has none of."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for i in range(3):
            call(torch.arange(6.0).reshape(3, 2) + i)
    return re.sub(r", grad_fn=<\w+>", "", f"{out.getvalue()}|{err.getvalue()}|{model.last}|{model.log}")


@pytest.mark.parametrize("name", SAYS)
def test_text_is_that_of_each_call(name):
    torch.manual_seed(0)
    plain = Printing(SAYS[name])
    stepped, jitted = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)

    def eager_step(x):
        optimizer.zero_grad()
        plain(x).backward()
        optimizer.step()

    fast = mycel.jit(jitted)
    assert said(fast, jitted) == said(copy_of := copy.deepcopy(plain), copy_of)
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.01))
    expected = said(eager_step, plain)
    assert "tensor(" in expected or re.search(r"\d", expected)
    assert said(step, stepped) == expected


def test_what_is_printed_alone_stays_in_the_program():
    model = Printing(SAYS["f-string"])
    fast = mycel.jit(model, strict=True)
    text = str(fast.program(torch.ones(3, 2)))
    assert "show(" in text and "island(" not in text and "Traced" not in text


def test_text_that_is_returned_is_refused():
    scale = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(mycel.CaptureError, match="text was asked of a traced tensor"):
        mycel.jit(lambda x: (x * scale, f"{(x * scale).sum()}"))(torch.ones(2))
