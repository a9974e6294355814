"""What train_step takes: models and losses of every form; and what it says to those who misuse it."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from stepping import adamw, agree, beside, both, cross_entropy, mlp, rows, sgd
from torch import nn

import mycel
from mycel.errors import GradientError, MycelError, PlanError, TrainError

# -- forms of losses and of models


def of_batch(out, *batch):
    return cross_entropy(out, batch[-1]) + 0.1 * (out.sum(1) - batch[0].sum(1)).square().mean()


LOSSES = {
    "function": F.cross_entropy,
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "lambda": lambda out, y: F.cross_entropy(out, y),
    "keyword only option": lambda out, y, *, scale=2.0: F.cross_entropy(out, y) * scale,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_output_and_target(name):
    agree(beside(mlp, sgd(), rows, LOSSES[name]))


def test_a_loss_of_the_whole_batch():
    pair = both(mlp, sgd(), of_batch)
    twin = beside(mlp, sgd(), rows, lambda out, y: cross_entropy(out, y), steps=0)
    x, y = rows(0)
    assert pair.step(x, y).item() == pytest.approx(of_batch(twin.twin(x), x, y).item(), rel=1e-5)


class Scaling(nn.Module):
    """Its second argument is optional."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, scale=None):
        out = self.body(x)
        return out if scale is None else out * scale[:, None]


def test_what_the_loss_needs_is_no_optional_argument_of_the_model():
    pair = agree(beside(Scaling, sgd(), rows, F.cross_entropy, steps=2))
    x, y = rows(2)
    scale = torch.rand(len(x))
    want = F.cross_entropy(pair.twin(x, scale), y).item()
    assert pair.step(x, scale, y).item() == pytest.approx(want, rel=1e-4)
    with pytest.raises(TrainError, match="the model takes 2, the loss 1"):
        mycel.train_step(pair.model, pair.optimizer, loss=lambda out, y: F.cross_entropy(out, y))(x, scale, y, y)


def test_a_wrapper_of_any_arguments_is_given_some():
    pair = beside(
        lambda: nn.DataParallel(mlp()), sgd(), lambda i: rows(i)[:1], lambda out, x: out.square().mean(), steps=0
    )
    x = rows(0)[0]
    want = pair.twin(x).square().mean().item()
    assert pair.step(x).item() == pytest.approx(want, rel=1e-5)


class Criterion(nn.Module):
    """A loss with a state of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, out, y):
        self.seen += 1
        return cross_entropy(out, y) * (1 + 0.1 * self.seen)


def test_a_loss_that_is_a_module_with_buffers():
    mine, torchs = Criterion(), Criterion()
    pair = both(mlp, sgd(), mine)
    pair.loss = torchs
    for i in range(3):
        pair.further(rows(i))
    agree(pair)
    assert mine.seen == 3


@pytest.mark.parametrize("name, loss, args, kwargs", [
    ("the target by name", lambda out, target: F.cross_entropy(out, target), 1, {"target": 1}),
    ("a target with a default", lambda out, y=None: F.cross_entropy(out, y), 2, {}),
    ("both by name", F.cross_entropy, 0, {"input": 0, "target": 1}),
])  # fmt: skip
def test_a_loss_whose_arguments_come_by_name_or_have_defaults(name, loss, args, kwargs):
    batch = rows(0)
    pair = both(mlp, sgd(), loss)
    value = pair.step(*batch[:args], **{k: batch[i] for k, i in kwargs.items()})
    assert value.item() == pytest.approx(cross_entropy(pair.twin(batch[0]), batch[1]).item(), rel=1e-5)


class Returning(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(6, 5), form

    def forward(self, x, y=None):
        out = self.layer(x)
        loss = None if y is None else cross_entropy(out, y)
        match self.form:
            case "scalar":
                return loss
            case "tuple":
                return loss, out
            case "dict":
                return {"logits": out, "loss": loss}
            case "loss last":
                return out, loss
            case "list":
                return [loss]
            case "two scalars":
                return out, loss, loss * 2
        return None


@pytest.mark.parametrize("form", ["scalar", "tuple", "dict", "loss last", "list"])
def test_models_that_return_their_loss(form):
    model = Returning(form)
    x, y = rows(0)
    wanted = cross_entropy(model.layer(x), y).item()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), compile=False)
    for value in (step(x, y), step(x, y=y), step(y=y, x=x)):
        assert value.item() == pytest.approx(wanted, rel=1e-6)
        assert value.shape == () and not value.requires_grad


@pytest.mark.parametrize(
    "form, message",
    [
        ("nothing", r"returned \w+ without a loss\n  try "),
        ("two scalars", r"returned 3 values, 2 of them scalars: .* loss\n  try       a dict with loss"),
    ],
)
def test_models_that_return_something_else(form, message):
    model = Returning(form)
    with pytest.raises(TrainError, match=message):
        mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)(*rows(0))


def test_a_loss_is_a_value_of_its_own():
    """Later steps do not change it."""
    pair = both(mlp, sgd(), cross_entropy)
    losses = [pair.step(*rows(i)) for i in range(4)]
    values = [pair.step(*rows(0)) is not None and x.item() for x in losses]
    assert values == [x.item() for x in losses] and len(set(values)) == 4
    norm = pair.step.grad_norm
    before = norm.item()
    pair.step(*rows(1))
    assert norm.item() == before


def test_modes_around_a_step_do_not_matter():
    """A step is outside of autograd: no_grad around it changes nothing, nor do inference tensors as a batch."""
    wanted = both(mlp, sgd(), cross_entropy).step(*rows(0)).item()
    for mode in (torch.no_grad, torch.enable_grad):
        pair = both(mlp, sgd(), cross_entropy)
        with mode():
            batch = tuple(x.clone() for x in rows(0))
            assert pair.step(*batch).item() == wanted
        assert pair.step(*batch).item() != wanted, "it trains"
    with torch.inference_mode():
        batch = tuple(x.clone() for x in rows(0))
    assert both(mlp, sgd(), cross_entropy).step(*batch).item() == wanted


def test_a_first_step_in_inference_mode():
    pair = both(mlp, adamw(), cross_entropy)
    with torch.inference_mode():
        pair.step(*rows(0))
    pair.step(*rows(1))


# -- misuse ----------------------------------------------------------------------------------------------------------


def step(model=None, optimizer=None, loss=cross_entropy, **settings):
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return mycel.train_step(model, optimizer, loss, **{"compile": False, **settings})


X, Y = rows(0)
NAMES = r"torch\.optim\.Adam, torch\.optim\.AdamW, .*torch\.optim\.SGD"
MISUSE = {
    "no loss": (lambda: step(loss=None)(X), TrainError, r"the model returned .* which is no loss\n.*loss=f"),
    "loss of rows": (
        lambda: step(loss=lambda o, y: cross_entropy(o, y, reduction="none"))(X, Y),
        TrainError,
        r"shape \(8,\).*\n  try +\.mean",
    ),
    "loss of one element": (
        lambda: step(loss=lambda o, y: cross_entropy(o, y)[None])(X, Y),
        TrainError,
        r"shape \(1,\)",
    ),
    "loss is a number": (
        lambda: step(loss=lambda o, y: 1.0)(X, Y),
        TrainError,
        "the loss is float.*\n  try +a loss that stays a tensor",
    ),
    "loss is an index": (
        lambda: step(loss=lambda o, y: o.argmax())(X, Y),
        TrainError,
        r"the loss is torch\.int64.*\n  try +a loss in floating point",
    ),
    "loss is detached": (
        lambda: step(loss=lambda o, y: cross_entropy(o, y).detach())(X, Y),
        GradientError,
        r"depends on no parameter .*cut off.*\n  try .*without detach\(\)",
    ),
    "an optimiser that asks for losses": (
        lambda: step(optimizer=torch.optim.LBFGS(mlp().parameters())),
        TrainError,
        r"several times a step: it needs a closure\n  try       mycel\.value_and_grad",
    ),
    "an optimiser of sparse gradients": (
        lambda: step(optimizer=torch.optim.SparseAdam(mlp().parameters())),
        TrainError,
        r"needs sparse gradients.*\n  try       torch\.optim\.Adam",
    ),
    "parameters": (lambda: step(optimizer=mlp().parameters()), TrainError, f"was given parameters as .*\n.*{NAMES}"),
    "a class": (
        lambda: step(optimizer=torch.optim.SGD),
        TrainError,
        r"the class SGD as optimizer\n  try       SGD\(model\.parameters\(\), lr=…\)",
    ),
    "a batch without data": (
        lambda: step()(X.to("meta"), Y.to("meta")),
        TrainError,
        "holds no data: it is on the meta device",
    ),
    "a function as model": (lambda: mycel.train_step(lambda x: x, None), TrainError, "torch.nn.Module, not function"),
    "parameters of another model": (
        lambda: step(optimizer=torch.optim.SGD(mlp().parameters()))(X, Y),
        GradientError,
        r"depends on no parameter of the optimizer\n  try +an optimizer over the parameters of this model",
    ),
    "all frozen": (
        lambda: step(model=mlp().requires_grad_(False))(X, Y),
        GradientError,
        r"no parameter of the optimizer requires a gradient.*\n  try +parameter\.requires_grad_\(True\)",
    ),
    "differentiable": (
        lambda: step(optimizer=torch.optim.SGD(mlp().parameters(), differentiable=True)),
        TrainError,
        "differentiable",
    ),
    "unknown precision": (
        lambda: step(precision="fp4"),
        TrainError,
        "fp4.*\n  known     fp32, bf16, fp16, fp8\n  try ",
    ),
    "a dtype as precision": (lambda: step(precision=torch.float16), TrainError, "fp8\n  try       precision='fp16'"),
    "a list as precision": (lambda: step(precision=["bf16"]), TrainError, "fp8\n  try       precision='bf16'"),
    "fp16 of bf16 weights": (lambda: step(model=mlp().bfloat16(), precision="fp16")(X, Y), TrainError, "bf16"),
    "no parts": (lambda: step(accumulate=0), TrainError, "accumulate=0"),
    "half a part": (lambda: step(accumulate=1.5), TrainError, "accumulate=1.5"),
    "no rows to divide": (lambda: step(accumulate=2)(X[:0], Y[:0]), TrainError, "accumulate=2 .* 0"),
    "clip to nothing": (lambda: step(clip_norm=0), TrainError, "clip_norm=0"),
    "clip to no value": (lambda: step(clip_value=0), TrainError, "clip_value=0"),
    "clip twice": (lambda: step(clip_value=1, clip_norm=1), TrainError, "both given"),
    "clip to NaN": (lambda: step(clip_norm=float("nan")), TrainError, "clip_norm=nan"),
    "memory without a unit": (lambda: step(memory="20"), TrainError, "'20' is not a size"),
    "memory in words": (lambda: step(memory="lots"), TrainError, "'lots' is not a size"),
    "no memory": (lambda: step(memory="0GiB"), TrainError, "less than one byte"),
    "too little memory": (
        lambda: step(memory="1KiB")(X, Y),
        PlanError,
        r"needs at least .*, the budget is 1.00 KiB: .* too much",
    ),
    "compile perhaps": (
        lambda: step(compile="perhaps"),
        TrainError,
        "known     True, False, 'auto'\n  try       compile='auto'",
    ),
    "no mesh": (lambda: step(mesh="dp"), PlanError, "is no mesh\n  try       mycel.Mesh"),
    "an unknown plan": (
        lambda: step(mesh=mycel.Mesh(dp=2), plan="megatron"),
        PlanError,
        "there is no plan .megatron.\n  ready     cp, dp",
    ),
    "a mesh without ranks": (lambda: step(mesh=mycel.Mesh(dp=2))(X, Y), PlanError, "2 ranks"),
    "a name nobody takes": (lambda: step()(X, Y, colour=Y), TrainError, "neither the model nor the loss takes colour"),
    "a loss that calls what the model returned": (
        lambda: step(loss=lambda net, x, y: (net(x) - y).square().mean())(X, Y),
        TrainError,
        r"net, its first argument, is what the model returned\n  try       model  as the name",
    ),
    "asked before the first batch": (lambda: step().plan, TrainError, "not seen a batch.*\n  try"),
    "explained before the first batch": (lambda: step().explain(), TrainError, "not seen a batch"),
    "the wrong shape": (lambda: step()(X[:, :3], Y), MycelError, "3 and 6"),
}
MISUSE |= {
    "a word as loss": (lambda: step(loss="mse"), TrainError, "mse"),
    "an unhashable precision": (lambda: step(precision=[]), TrainError, "fp32, bf16, fp16"),
    "a word to clip to": (lambda: step(clip_norm="1"), TrainError, "clip_norm='1'"),
    "a list as memory": (lambda: step(memory=[1]), TrainError, "memory"),
    "NaN memory": (lambda: step(memory=float("nan")), TrainError, "memory"),
    "negative memory": (lambda: step(memory=-1), TrainError, "memory"),
    "memory is True": (lambda: step(memory=True), TrainError, "memory"),
    "accumulate is True": (lambda: step(accumulate=True), TrainError, "accumulate=True"),
    "an argument too many": (lambda: step()(X, Y, Y), MycelError, "c is 5 and 8"),
}
THEIRS = {
    "no arguments": (lambda: step()(), TypeError, "missing 1 required positional argument"),
    "lists as batch": (lambda: step()([[1.0] * 6], Y), TypeError, "must be Tensor, not list"),
    "another dtype": (lambda: step()(X.double(), Y), RuntimeError, "same dtype.*double != float"),
    "a model on two devices": (
        lambda: step(model=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5, device="meta")))(X, Y),
        RuntimeError,
        "device meta is not on the expected device cpu",
    ),
    "a target out of range": (lambda: step()(X, Y.abs() + 50), IndexError, "Target 1?50 is out of bounds"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_told(name):
    call, error, message = MISUSE[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", THEIRS)
def test_errors_of_the_model_itself_come_as_they_are(name):
    """What its code or torch says of a wrong call is what one reads without us."""
    call, error, message = THEIRS[name]
    with pytest.raises(error, match=message):
        call()


def test_a_failed_step_changes_nothing():
    """A target out of range stops the step midway: the next one is as if it had not been."""
    pair = both(mlp, sgd(momentum=0.9), cross_entropy)
    for i in range(4):
        if i == 2:
            with pytest.raises(IndexError):
                pair.step(rows(0)[0], rows(0)[1].abs() + 50)
        pair.further(rows(i))
    agree(pair)


def test_integer_and_unused_parameters_are_left_alone():
    class Integers(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.Parameter(torch.tensor([1, 2, 3, 4, 5]), requires_grad=False)
            self.layer = nn.Linear(6, 5)

        def forward(self, x):
            return self.layer(x) * self.n

    agree(beside(Integers, sgd(momentum=0.9), rows, cross_entropy))


def test_a_step_inside_of_captured_code_is_refused():
    pair = both(mlp, sgd(), cross_entropy)
    with pytest.raises(TrainError, match="captured"):
        mycel.jit(lambda x, y: pair.step(x, y))(X, Y)


def test_a_step_is_not_copied_and_takes_data():
    model, batch = mlp(), rows(0)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss=cross_entropy, compile=False)
    with pytest.raises(TrainError, match="a step was copied"):
        copy.deepcopy(step)
    bare = mlp().to("meta")
    step = mycel.train_step(bare, torch.optim.SGD(bare.parameters(), 0.1), loss=cross_entropy, compile=False)
    with pytest.raises(TrainError, match="the model holds no data"):
        step(*batch)
