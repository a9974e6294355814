"""Control flow on tensors is captured, not decided: one program serves all ways through a function, and gives what
plain Python gives."""

from __future__ import annotations

import copy
import linecache
import sys

import pytest
import torch
from control_flow import CASES
from torch import nn

import mycel
from mycel.errors import CaptureError
from mycel.ir import walk


def leaves(value):
    """Numbers and tensors inside, as tensors."""
    if isinstance(value, dict):
        return [x for v in value.values() for x in leaves(v)]
    if isinstance(value, (tuple, list)):
        return [x for v in value for x in leaves(v)]
    return [torch.as_tensor(value).detach().double()]


def close(actual, wanted, tolerance=1e-12):
    actual, wanted = leaves(actual), leaves(wanted)
    assert len(actual) == len(wanted)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def cloned(arguments):
    return tuple(a.clone() for a in arguments)


def operators(program):
    return {e.op.name for _, e in walk(program)}


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_all_ways(name, mode):
    case = CASES[name]
    fn = case.fn() if isinstance(case.fn, type) else case.fn
    twin = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    fast = mycel.jit(twin, mode=mode)
    for _ in range(2):
        for arguments in case.arguments:
            close(fast(*cloned(arguments)), fn(*cloned(arguments)))
            if isinstance(fn, nn.Module):
                close(twin.state_dict(), fn.state_dict())
    assert len(fast.entries) == 1
    op_names = operators(fast.program(*case.arguments[0]))
    assert op_names & {"cond", "loop", "scan"} if case.has == {"cond", "loop", "scan"} else case.has <= op_names
    if not case.has:
        assert not op_names & {"cond", "loop", "scan"}


@pytest.mark.parametrize("name", CASES)
def test_programs_print_and_parse(name):
    case = CASES[name]
    program = mycel.capture(case.fn() if isinstance(case.fn, type) else case.fn, *case.arguments[0])
    assert mycel.Program.parse(str(program), program.consts) == program


# -- what is refused


def grows(x):
    while x.sum() < 10:
        x = torch.cat([x, x])
    return x


def changes_dtype(x):
    n = torch.zeros((), dtype=torch.int64)
    while x.sum() < 10:
        n = n + 0.5
        x = x + 1
    return n


def none_then_tensor(x):
    y = None
    while x.sum() < 10:
        y = x
        x = x + 1
    return y


def other_shapes(x):
    if x.sum() > 0:
        y = x
    else:
        y = x[:1]
    return y


def other_values(x):
    if x.sum() > 0:
        kind = "a"
    else:
        kind = "b"
    return x * len(kind)


def returns_or_not(x):
    if x.sum() > 0:
        return x


def defined_in_one_branch(x):
    if x.sum() > 0:
        y = x
    return y


def list_in_a_loop(x):
    seen = []
    while x.sum() < 10:
        seen.append(x)
        x = x + 1
    return seen


def many_elements(x):
    if x > 0:
        return x
    return -x


def asks_for_a_number(x):
    while x.sum() < 10:
        x = x + x.detach().numpy().max()
    return x


def generator(x):
    for v in x:
        if v > 0:
            yield v


def uses_a_generator(x):
    return list(generator(x))


def looks_at_its_frame(x):
    names = locals()
    if x.sum() > 0:
        return x
    return -x * len(names)


def float_range(x):
    for _ in range(x.sum()):
        x = x + 1
    return x


KEPT = []


def keeps(x, keep=KEPT.append):
    if x.sum() > 0:
        y = x * 2
        keep(y)
    else:
        y = x
    return y + KEPT.pop()


ONE = torch.nn.Parameter(torch.ones((), dtype=torch.float64))  # what depends on it is not known when it is captured
REFUSED = {
    grows: r"x is f64\[3\] when the loop starts and f64\[6\] after a turn",
    changes_dtype: r"n is i64\[\] when the loop starts and f\d+\[\] after a turn",
    none_then_tensor: r"y is None when the loop starts and f64\[3\]",
    other_shapes: r"y is f64\[3\] in one branch and f64\[1\] in the other",
    other_values: r"kind is str 'a' in one branch and str 'b' in the other",
    returns_or_not: r"f64\[3\] in one branch and None in the other",
    defined_in_one_branch: "y is used here, but it is not defined on every way",
    list_in_a_loop: "seen has another number of items after each turn",
    many_elements: "a tensor with 3 elements",
    asks_for_a_number: "a NumPy array was asked of a traced tensor",
    uses_a_generator: "the control flow of generator is not captured, because it is a generator",
    looks_at_its_frame: r"because it calls locals\(\)",
    float_range: "range",
    keeps: "a tensor made in a branch or loop was used outside of it",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__)
def test_refusals_name_variable_values_and_line(fn):
    KEPT.clear()
    with pytest.raises(mycel.CaptureError, match=REFUSED[fn]) as caught:
        mycel.jit(lambda x: fn(x * ONE), strict=True)(torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64))
    error = caught.value
    assert error.file == __file__ and error.hint
    assert error.text == linecache.getline(__file__, error.line).strip()


CELL = """\
import functools, torch
WEIGHT = torch.nn.Parameter(torch.ones(3))
def doubled(fn):
    @functools.wraps(fn)
    def inner(*args):
        return fn(*args) * 2
    return inner
def outer(k):
    @doubled
    def decides(x):
        y = x * WEIGHT
        if y.sum() > 0:
            return y * k
        return y - k
    return decides
"""


@pytest.mark.parametrize("where", ["notebook", "command line"])
def test_code_without_a_file_is_rewritten(where, monkeypatch):
    name = f"<{where}>" if where == "notebook" else "<string>"
    if where == "notebook":  # as IPython does
        monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(True), name))
    else:
        monkeypatch.setattr(sys, "orig_argv", ["python", "-c", CELL])
    namespace = {}
    exec(compile(CELL, name, "exec"), namespace)
    fn = namespace["outer"](3.0)
    fast = mycel.jit(fn, strict=True)
    for x in (torch.ones(3), -torch.ones(3)):
        close(fast(x), fn(x))


def test_functions_without_source_say_so():
    namespace = {}
    exec("def plain(x):\n    return x * 2\ndef decides(x):\n    return x if x.sum() > 0 else -x", namespace)
    x = torch.ones(3)
    close(mycel.jit(namespace["plain"])(x), x * 2)
    with pytest.raises(
        mycel.CaptureError, match="the control flow of decides is not captured, because its source is not available"
    ):
        mycel.jit(lambda x: namespace["decides"](x * ONE), strict=True)(x)
    close(mycel.jit(namespace["decides"])(x), x)
    close(mycel.jit(torch.sin)(x), x.sin())
    close(mycel.jit(lambda x: max(len(x), 2) * x)(x), x * 3)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_asserts_are_checked_at_run_time(mode):
    def fn(x, n):
        for i in range(n):
            assert x.sum() + i < 5, "the sum is too large"
        if x[0] > 3:
            raise ValueError("first element")
        return x * 2

    fast = mycel.jit(fn, mode=mode)
    good, bad, worse = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.5]), torch.tensor([4.0, -3.0])
    close(fast(good, torch.tensor(2)), good * 2)
    with pytest.raises(mycel.RunError, match="the sum is too large") as caught:
        fast(bad, torch.tensor(2))
    assert "test_control_flow.py" in str(caught.value)
    close(fast(bad, torch.tensor(0)), bad * 2)
    with pytest.raises(mycel.RunError, match="ValueError: first element"):
        fast(worse, torch.tensor(1))
    assert len(fast.entries) == 1


# -- what stays Python's


def test_python_values_stay_python():
    log = []

    def note(value):
        log.append(value)
        return value

    def fn(x, flag):
        a = note(0) or note("b") or note("c")
        b = note(1) and note([]) and note(2)
        c = 1 < note(2) < note(1) < note(9)
        for i in (k for k in range(5)):
            if i == 3:
                break
            log.append(i)
        else:
            log.append("never")
        while flag:
            log.append("while")
            flag = False
        else:  # noqa: PLW0120
            log.append("else")
        try:
            assert flag, "no flag"
        except AssertionError as e:
            log.append(str(e).partition("\n")[0])  # pytest writes more into it
        first, *rest = [note(z) for z in "xyz"] if not flag else []
        return x * len(rest), a, b, c, first

    x = torch.ones(2)
    wanted, trail = fn(x, True), log[:]
    log.clear()
    result = mycel.jit(fn)(x, True)
    assert log == trail
    assert result[1:] == wanted[1:]
    close(result[0], wanted[0])


def test_lines_and_names_are_the_users():
    def fn(x):
        total = x
        while total.sum() < 10:
            total = total + 1
        if total[0] > 3:
            result = total * 2
        else:
            result = total
        return result

    program = mycel.capture(fn, torch.ones(3))
    lines = {e.source.rpartition(":")[0] for _, e in walk(program)}
    assert lines == {"tests/test_control_flow.py"}
    text = str(program)
    assert "total: f32[3] = loop" in text.replace("total_1", "total") and "result: f32[3] = cond" in text
    first = fn.__code__.co_firstlineno
    loop = next(e for _, e in walk(program) if e.op.name == "loop")
    assert loop.source == f"tests/test_control_flow.py:{first + 2}"


def test_errors_of_user_code_keep_their_lines():
    def fn(x):
        if x.ndim == 1:
            for i in range(3):
                if i == 2:
                    raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine") as caught:
        mycel.jit(fn)(torch.ones(3))
    assert caught.traceback[-1].lineno + 1 == fn.__code__.co_firstlineno + 4


class Private:
    def __init__(self):
        self.__weight = torch.tensor(2.0)

    def __scaled(self, x):
        return x * self.__weight if x.sum() > 0 else x

    def run(self, x):
        return self.__scaled(x)


def test_private_names():
    fast = mycel.jit(Private().run)
    for x in (torch.ones(2), -torch.ones(2)):
        close(fast(x), Private().run(x))


def test_closures_and_globals_are_live():
    factor = 2.0

    def fn(x):
        if x.sum() > 0:
            return x * factor
        return x

    x = torch.ones(2)
    close(mycel.jit(fn)(x), x * 2)
    factor = 3.0
    close(mycel.jit(fn)(x), x * 3)


def test_random_draws_differ_between_turns_and_branches():
    def fn(x, n):
        rows = torch.zeros(6, 4)
        for i in range(n):
            rows[i] = torch.rand(4)
        if x.sum() > 0:
            y = torch.rand(4)
        else:
            y = torch.randn(4)
        for _ in range(40):
            x = x + torch.rand(4)
        return rows, y, x

    fast = mycel.jit(fn)
    torch.manual_seed(0)
    rows, y, x = fast(torch.ones(4), torch.tensor(6))
    assert rows.unique().numel() == 24 and not (y == rows).any()
    assert 10 < (x - 1).mean() < 30
    torch.manual_seed(0)
    close(fast(torch.ones(4), torch.tensor(6)), (rows, y, x))
    torch.manual_seed(1)
    assert not (fast(torch.ones(4), torch.tensor(6))[0] == rows).any()


def test_repeated_layers_with_control_flow_are_one_block():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            y = self.norm(self.linear(x)).relu()
            if y.sum() > 2:
                y = y * 0.5
            return x + y

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    program = mycel.capture(model, torch.ones(2, 4))
    assert sum(e.op.name == "cond" for _, e in walk(program)) == 1
    assert sum(e.op.name == "call" for _, e in walk(program)) == 6
    close(mycel.jit(model)(torch.ones(2, 4)), model(torch.ones(2, 4)), 1e-5)


def test_unrolled_and_looped_give_the_same():
    def short(x):
        for i in range(16):
            x = x + i / 3 * x.cos() + i**2 % 5
        return x

    def long(x):
        for i in range(17):
            x = x + i / 3 * x.cos() + i**2 % 5
        return x

    x = torch.linspace(0, 1, 4, dtype=torch.float64)
    assert "scan" not in operators(mycel.capture(short, x)) and "scan" in operators(mycel.capture(long, x))
    for fn in (short, long):
        close(mycel.jit(fn)(x), fn(x))
        assert mycel.jit(fn)(x.float()).dtype == torch.float32


def test_jit_inside_control_flow():
    inner = mycel.jit(lambda x: x * 2 if x.sum() > 0 else x)

    @mycel.jit
    def outer(x):
        while x.abs().sum() < 20:
            x = inner(x) - 0.5
        return x

    for x in (torch.ones(3), -torch.ones(3)):
        wanted = x
        while wanted.abs().sum() < 20:
            wanted = (wanted * 2 if wanted.sum() > 0 else wanted) - 0.5
        close(outer(x), wanted)
    assert len(outer.entries) == 1


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_prints_happen_when_the_program_runs(mode, capsys):
    def fn(x):
        while x < 3:
            x = x + 1
            print("x is", x, sep="=")
        return x

    fast = mycel.jit(fn, mode=mode)
    for start in (1.0, 0.0):
        fast(torch.tensor(start))
        assert capsys.readouterr().out == "".join(f"x is=tensor({k}.)\n" for k in range(int(start) + 1, 4))


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_breakpoints_stop_when_the_program_runs(mode, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys,
        "breakpointhook",
        lambda: seen.append({k: v.tolist() for k, v in sys._getframe(1).f_locals["values"].items()}),
    )

    def fn(x):
        y = x * 2
        if y.sum() > 0:
            z = y + 1
            breakpoint()
            y = z
        return y

    fast = mycel.jit(fn, mode=mode)
    for x in (torch.ones(2), -torch.ones(2), 2 * torch.ones(2)):
        fast(x)
    assert [s["z"] for s in seen] == [[3.0, 3.0], [5.0, 5.0]] and seen[0]["y"] == [2.0, 2.0]


class Moved(torch.nn.Module):
    """A loop that gives a buffer other memory; a view of what it had stays as it was."""

    def __init__(self, view: bool, inside: bool = False):
        super().__init__()
        self.register_buffer("w", torch.ones(3))
        self.view, self.inside = view, inside

    def forward(self, x, most):
        seen = self.w[:2] if self.view else None
        total = x[:2] * 0
        while x.sum() < most:
            if self.inside:
                total = total + seen
            self.w.data = self.w * 2
            x = x + 1
        return self.w[:2] + seen + total if self.view else self.w * 1


@pytest.mark.parametrize("view, inside", [(False, False), (True, False), (True, True)])
@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
def test_other_memory_in_a_loop_is_not_seen_by_views_of_the_old(view, inside):
    """Where there is such a view the loop stays Python, and is refused where nothing may."""
    x, most = torch.ones(3), torch.tensor(12.0)
    wanted = Moved(view, inside)(x, most)
    assert torch.equal(mycel.jit(Moved(view, inside))(x, most), wanted)
    strict = mycel.jit(Moved(view, inside), strict=True)
    if not view:
        assert torch.equal(strict(x, most), wanted)
        return
    with pytest.raises(CaptureError, match=r"other memory in a loop.* while a view of the memory .*\n(?s:.*)copy_"):
        strict(x, most)
