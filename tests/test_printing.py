"""Text of tensors in captured code: printed, logged and warned of at every call with the values of that call, kept and
returned as PyTorch does."""

import contextlib
import copy
import functools
import io
import json
import logging
import random
import re
import sys
import warnings

import pytest
import torch
from distributing import OneDevice
from pipelining import Tied, pipeline_equals
from torch import nn

import mycel
from mycel.plan.schedule import named

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
    "in brackets": lambda model, x, h: print(f"({h.sum()})({x.sum()})"),
    "parameter": lambda model, x, h: print(f"{model.linear.bias}", model.linear.bias, str(model.linear.bias)),
    "written": lambda model, x, h: sys.stdout.write(f"sum {h.sum()}\n"),
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


def beside_torch(say):
    """A model that says something, and a step of torch's own on it."""
    torch.manual_seed(0)
    model = Printing(say)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize("name", SAYS)
def test_text_is_that_of_each_call(name):
    plain, eager_step = beside_torch(SAYS[name])
    stepped, jitted = copy.deepcopy(plain), copy.deepcopy(plain)
    fast = mycel.jit(jitted)
    assert said(fast, jitted) == said(copy_of := copy.deepcopy(plain), copy_of)
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.01))
    expected = said(eager_step, plain)
    assert "tensor(" in expected or re.search(r"\d", expected)
    assert said(step, stepped) == expected


def twice(model, x, h):
    print("again", h.sum())
    print("again", h.sum())


def turns(model, x, h):
    total = h.detach().abs().sum()
    while total < 100:
        print("turn")
        total = total * 2


PLAIN = {
    "plain": lambda model, x, h: print("hi", 3, sep="-"),
    "twice": lambda model, x, h: [print("hi"), print("hi"), print()],
    "the same value twice": twice,
    "stderr": lambda model, x, h: print("hi", file=sys.stderr, flush=True),
    "value to stderr": lambda model, x, h: print(h.sum(), file=sys.stderr, flush=True),
    "branch": lambda model, x, h: print("small") if h.sum() < 20 else print("large"),
    "turns": turns,
    "generator": lambda model, x, h: list(spoken()),
}


def spoken():
    print("hi")
    yield 1


@pytest.mark.parametrize("name", PLAIN)
def test_text_without_values_is_said_at_every_call(name):
    plain, eager_step = beside_torch(PLAIN[name])
    stepped, jitted = copy.deepcopy(plain), copy.deepcopy(plain)
    assert said(mycel.jit(jitted, strict=True), jitted) == said(copy_of := copy.deepcopy(plain), copy_of)
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.01), strict=True)
    expected = said(eager_step, plain)
    assert len(expected.split("\n")) > 3
    assert said(step, stepped) == expected


def test_a_module_that_is_called_twice_alike_is_heard_twice():
    class Saying(nn.Module):
        def forward(self, x):
            print("here")
            return x.sin().cos().exp()

    saying = Saying()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        mycel.jit(lambda x: saying(x) + saying(x))(torch.ones(2))
    assert out.getvalue() == "here\n" * 2


@functools.cache
def say_once(text):
    print(text)


def test_what_a_cached_function_says_is_said_once():
    def fn(x):
        say_once("once for all")
        return x * 2

    out = io.StringIO()
    fast = mycel.jit(fn)
    with contextlib.redirect_stdout(out):
        for i in range(3):
            fast(torch.full((2,), float(i)))
    assert out.getvalue() == "once for all\n"


def test_text_without_values_in_a_pipeline_is_said_once_for_each_microbatch():
    class Saying(Tied):
        def forward(self, ids, labels):
            print("a microbatch")
            return super().forward(ids, labels)

    torch.manual_seed(0)
    ids = torch.randint(0, 12, (4, 3))
    one = OneDevice.of(Saying().double(), {"ids": ids, "labels": ids}, accumulate=4)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        pipeline_equals(one, named("1f1b", 2, 4), random.Random(0))
    assert out.getvalue() == "a microbatch\n" * 8  # in the pipeline, and on one device


# -- text that is looked into


def first_letters(x, h):
    return h * (2.0 if f"{h.sum():.3f}"[0] == "-" else 3.0)


def by_length(x, h):
    return h * len(f"{h.sum():.1f}")


def by_words(x, h):
    whole, part = f"{h.sum().item():.3f}".split(".")
    return h * int(whole) + int(part)


def by_search(x, h):
    return h * (2.0 if re.search(r"^-\d", f"{h.sum():.3f}") else 3.0)


def by_key(x, h):
    return h * {"True": 2.0}.get(f"{bool(h.sum() > 0)}", 5.0)


def kept_text(x, h):
    texts = [f"{v:.2f}" for v in h[0].tolist()]
    return h * sum(float(text) for text in texts) + len(max(texts))


def parsed(x, h):
    try:
        return h * float(f"{h.sum():.3f}")
    except ValueError:
        return h * 0


LOOKS = {
    "length": by_length,
    "letters": first_letters,
    "split": by_words,
    "equal": lambda x, h: h if f"{h.sum():.0f}" == "-2" else h * 7,
    "differs": lambda x, h: h if "%.0f" % h.sum().item() != "-2" else h * 7,  # noqa: UP031
    "order": lambda x, h: h if f"{h.sum()}" < "2" else h * 7,
    "in": lambda x, h: h if "-" in f"sum {h.sum()}" else h * 7,
    "in text": lambda x, h: h if f"{(h.sum() > 0)}" in "tensor(True)" else h * 7,
    "not in": lambda x, h: h if "-" not in str(h.sum()) else h * 7,
    "starts": lambda x, h: h if f"{h.sum():.3e}".upper().startswith("-") else h * 7,
    "joined": lambda x, h: h * len(", ".join(map(str, h[0].tolist()))),
    "formatted": lambda x, h: h * "{:.3f}|{}".format(h.sum().item(), 1).count("-"),  # noqa: UP032
    "padded": lambda x, h: h * f"{h.sum().item()!s:>30}".index("-" if h.sum() < 0 else "."),
    "added": lambda x, h: h * ("sum " + str(h.sum()) + "!").find("."),
    "iterated": lambda x, h: h * sum(letter.isdigit() for letter in f"{h.sum():.3e}"),
    "searched": by_search,
    "key": by_key,
    "kept": kept_text,
    "parsed": parsed,
    "json": lambda x, h: h * len(json.dumps({"loss": [f"{h.sum():.3f}"]})),
    "repr": lambda x, h: h * len(repr([f"{h.detach()}"])),
}


class Looking(nn.Module):
    """Computes by what the text of a tensor looks like."""

    def __init__(self, look):
        super().__init__()
        self.linear, self.look = nn.Linear(2, 2, dtype=torch.float64), look

    def forward(self, x):
        return self.look(x, self.linear(x)).sum()


@pytest.mark.parametrize("name", LOOKS)
def test_text_that_is_looked_into_is_that_of_each_call(name):
    torch.manual_seed(0)
    plain = Looking(LOOKS[name])
    stepped = copy.deepcopy(plain)
    fast = mycel.jit(copy.deepcopy(plain))
    first = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.01))
    for i in (1.0, 20.0, -3.0, -400.0):
        x = torch.tensor([[i, 1.0], [2.0, i]], dtype=torch.float64)
        assert fast(x).item() == pytest.approx(first(x).item())
        optimizer.zero_grad()
        loss = plain(x)
        loss.backward()
        optimizer.step()
        assert step(x).item() == pytest.approx(loss.item())
    assert all(torch.allclose(p, q) for p, q in zip(stepped.parameters(), plain.parameters(), strict=True))
    with pytest.raises(mycel.CaptureError, match=r"was looked into|was asked of"):
        mycel.jit(copy.deepcopy(plain), strict=True)(torch.ones(2, 2, dtype=torch.float64))


def test_text_that_is_looked_into_and_returned_is_refused_with_its_line():
    model = Returning(lambda x, h, loss: f"{loss:.2f}".upper())
    with pytest.raises(mycel.CaptureError, match=r"was looked into \(upper\)") as refused:
        mycel.jit(model)(torch.ones(3, 2))
    assert refused.value.file == __file__ and "upper" in refused.value.text and refused.value.hint


def test_an_error_that_a_value_decides_shows_types_where_it_has_no_values():
    def fn(x):
        if x.sum() > 2:
            raise ValueError(f"too large: {x}")
        return x * 2

    fast = mycel.jit(fn)
    assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(mycel.RunError, match=r"ValueError: too large: f32\[2\]"):
        fast(torch.ones(2) * 4)


LOG = logging.getLogger("mycel_test.printing")


class OwnWarning(UserWarning):
    """A category of the user's."""


def guarded(model, x, h):
    if h.sum() > 0:
        LOG.warning("positive %s", h.sum())


def caught_in_a_log(model, x, h):
    try:
        raise ValueError("no")
    except ValueError:
        LOG.exception("failed with %s", h.sum())


LOGS = {
    "f-string": lambda model, x, h: LOG.info(f"h {h} of {x.sum()}"),
    "module": lambda model, x, h: logging.error(f"({h.sum()})"),
    "arguments": lambda model, x, h: LOG.warning("h %s of %s, %d", h, x, 3),
    "number": lambda model, x, h: LOG.log(35, "sum %s %s", h.sum().item(), f"{h.sum().item():.2f}"),
    "printf": lambda model, x, h: LOG.info("sum %.3f", h.sum()),
    "without values": lambda model, x, h: LOG.info("called with %d", 3),
    "not enabled": lambda model, x, h: LOG.debug("h %s", h),
    "adapter": lambda model, x, h: logging.LoggerAdapter(LOG, {}).error("h %s", h),
    "extra": lambda model, x, h: LOG.info("sum %s", h.sum(), extra={"place": 3}),
    "branch": guarded,
    "exception": caught_in_a_log,
    "warning": lambda model, x, h: warnings.warn(f"sum {h.sum():.3f}", stacklevel=1),
    "category": lambda model, x, h: warnings.warn(f"sum {h.sum()}", OwnWarning, stacklevel=2),
    "an exception": lambda model, x, h: warnings.warn(RuntimeWarning(f"sum {h.sum()}"), stacklevel=1),
    "printf warning": lambda model, x, h: warnings.warn("sum %.3f" % h.sum(), stacklevel=1),  # noqa: UP031
}


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def emit(self, record):
        place = (record.filename, record.lineno, record.funcName, getattr(record, "place", None))
        self.kept.append((record.name, record.levelno, record.getMessage(), *place, bool(record.exc_info)))


def logged_and_warned(call, action):
    """What some calls log and warn of, and the lines; gradients' names apart."""
    handler, root = Records(), logging.getLogger()
    before, LOG.level = LOG.level, logging.INFO
    root.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter(action)
            warnings.filterwarnings("ignore", ".*runs as plain Python")
            warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")  # torch's own, once
            for i in (0, 0, 1, -9):
                call(torch.arange(6.0).reshape(3, 2) + i)
    finally:
        root.removeHandler(handler)
        LOG.level = before
    places = [(str(w.message), w.category, w.filename, w.lineno) for w in warned]
    return re.sub(r", grad_fn=<\w+>", "", f"{handler.kept}|{places}"), len(handler.kept) + len(warned)


WARNS = ("warning", "category", "an exception", "printf warning")


@pytest.mark.parametrize(
    ("name", "action"), [*((name, "always") for name in LOGS), *((name, "default") for name in WARNS)]
)
def test_logs_and_warnings_are_those_of_each_call(name, action):
    plain, eager_step = beside_torch(LOGS[name])
    stepped, jitted = copy.deepcopy(plain), copy.deepcopy(plain)
    expected = logged_and_warned(copy.deepcopy(plain), action)
    assert (expected[1] > 0) == (name != "not enabled")
    assert logged_and_warned(mycel.jit(jitted), action) == expected
    expected = logged_and_warned(eager_step, action)
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.01))
    assert logged_and_warned(step, action) == expected


def test_a_logger_whose_level_changes_is_seen_at_the_next_call():
    def fn(x):
        LOG.debug("sum %s", x.sum())
        LOG.info("called")
        if LOG.getEffectiveLevel() > logging.INFO:
            return x * 3
        return x * (2 if LOG.isEnabledFor(logging.DEBUG) else 1)

    fast, handler, before = mycel.jit(fn), Records(), LOG.level
    logging.getLogger().addHandler(handler)
    x, heard = torch.ones(2), []
    try:
        for level, factor in [(20, 1), (10, 2), (20, 1), (30, 3), (10, 2), (20, 1)]:
            LOG.setLevel(level)
            handler.kept.clear()
            assert torch.equal(fast(x), x * factor)
            heard.append([record[2] for record in handler.kept])
    finally:
        logging.getLogger().removeHandler(handler)
        LOG.setLevel(before)
    said = ["sum tensor(2.)", "called"]
    assert heard == [said[1:], said, said[1:], [], said, said[1:]] and len(fast.entries) == 3


def test_what_is_logged_alone_stays_in_the_program():
    for name in ("f-string", "arguments", "number", "warning", "category"):
        before, LOG.level = LOG.level, logging.INFO
        try:
            text = str(mycel.jit(Printing(LOGS[name]), strict=True).program(torch.ones(3, 2)))
        finally:
            LOG.level = before
        assert "write_" in text and "island(" not in text and "Traced" not in text
        assert str(mycel.Program.parse(text)) == text


def test_what_is_printed_alone_stays_in_the_program():
    model = Printing(SAYS["f-string"])
    fast = mycel.jit(model, strict=True)
    text = str(fast.program(torch.ones(3, 2)))
    assert "show(" in text and "island(" not in text and "Traced" not in text


class Returning(nn.Module):
    """Returns a loss, and `text` of it."""

    def __init__(self, text):
        super().__init__()
        self.linear, self.text = nn.Linear(2, 2), text

    def forward(self, x):
        h = self.linear(x)
        loss = h.square().sum()
        return {"loss": loss, "text": self.text(x, h, loss), "h": h}


def last_line(x, h, loss):
    text = ""
    for i in range(3):
        text += f"{i}: {h[i].sum():.3f}; "
    return [text, {"last": h[-1].detach()}]


TEXTS = {
    "format": lambda x, h, loss: f"loss {loss:.2f}",
    "tensor": lambda x, h, loss: (f"{h.detach()}", x, str(x)),
    "number": lambda x, h, loss: f"{loss.item()}|{loss.item():8.3e}",
    "parts": last_line,
    "empty": lambda x, h, loss: ("", "plain", f"{x.sum()}" + f"{x.sum()}"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_returned_is_that_of_each_call(name):
    torch.manual_seed(0)
    plain = Returning(TEXTS[name])
    fast = mycel.jit(copy.deepcopy(plain), strict=True)
    stepped = copy.deepcopy(plain)
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.01), outputs=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    first = copy.deepcopy(plain)

    def shown(out):
        return re.sub(r", grad_fn=<\w+>|, requires_grad=True", "", str(out))

    for i in range(3):
        x = torch.arange(6.0).reshape(3, 2) + i
        assert shown(fast(x)) == shown(first(x))
        optimizer.zero_grad()
        out = plain(x)
        out["loss"].backward()
        optimizer.step()
        loss, outputs = step(x)
        assert torch.equal(loss, out["loss"])
        assert shown(outputs) == shown(out)
    assert len(step.entries) == 1


def test_text_beside_a_gradient_is_that_of_each_call():
    value_and_grad = mycel.value_and_grad(lambda x: ((x * x).sum(), f"{(x * 2).sum():.1f}"), has_aux=True)
    for i in (1.0, 2.0):
        x = torch.full((3,), i)
        (value, text), grad = value_and_grad(x)
        assert (float(value), text) == (3 * i * i, f"{6 * i:.1f}") and torch.equal(grad, 2 * x)


def test_text_of_a_branch_that_is_used_outside_is_refused_with_its_line():
    def branch(x):
        text = ""
        if x.sum() > 0:
            text = f"{x}"
        return x, text

    scale = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(mycel.CaptureError) as refused:
        mycel.jit(lambda x: branch(x * scale))(torch.ones(2))
    assert refused.value.file == __file__ and refused.value.hint


def test_text_that_python_needs_is_refused_with_its_line():
    scale = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(mycel.CaptureError, match="Python float was asked") as refused:
        mycel.jit(lambda x: (x * scale, "%.2f" % (x * scale).sum()))(torch.ones(2))  # noqa: UP031
    assert refused.value.file == __file__ and refused.value.text.startswith("mycel.jit(")
    assert "no call around it can stay Python" in str(refused.value) and refused.value.hint


def test_what_is_said_with_accumulate_is_said_once_for_each_part():
    class Saying(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x, labels):
            h = self.linear(x)
            print(f"{x.sum():.1f}")
            return nn.functional.cross_entropy(h, labels)

    model = Saying()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.01), accumulate=2)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        step(torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, -100, 2]))
    assert out.getvalue() == "6.0\n22.0\n"
