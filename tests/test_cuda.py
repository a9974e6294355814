"""The same programs on a GPU: models, gradients, every operator's kernel, random numbers that match the CPU's."""

from __future__ import annotations

import gc

import pytest
import torch
from experts import Routed
from models import MODELS, llama

import mycel
import mycel.ops
from examples import parse_example
from mycel import api
from mycel.errors import RunError
from mycel.ir import CONTROL, OPS, type_of
from mycel.ops import o
from mycel.ops.sdpa import counted
from mycel.plan import CPU
from mycel.run.block_inputs import block_inputs
from mycel.train import decode
from mycel.train.generate import Sampling, stream

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)


def to_cuda(batch):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("name", MODELS)
def test_models_and_gradients(name):
    model, batch = MODELS[name]().cuda().eval(), to_cuda(MODELS[name].inputs())
    loss = lambda: total(model(**batch))
    value, grads = mycel.value_and_grad(loss, wrt=model)()
    want = loss()
    want.backward()
    assert torch.allclose(value, want.detach(), rtol=1e-4, atol=1e-5)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for k, p in model.named_parameters():
        theirs = torch.zeros_like(p) if p.grad is None else p.grad
        assert float((grads[k] - theirs).abs().max()) <= 1e-4 * max(float(theirs.abs().max()), 1e-2 * largest), k


def total(out):
    """The sum of squares of a model's float results, on their device."""
    if isinstance(out, torch.Tensor):
        return (out**2).mean() if out.is_floating_point() else 0.0
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return sum(total(v) for v in values)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_kernel(name):
    op = OPS[name]
    if op in CONTROL or name == "opaque_random":  # torch's own generators differ between devices
        return
    for text in op.examples:
        if "sorted=False" in text:  # any order will do
            continue
        example = parse_example(text)
        inputs = example.make("f64" if "f64[" in text else "f32")
        extra = {"device": "cuda"} if "device" in op.defaults else {}
        moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
        try:
            outs = op.kernel(*moved, **example.params, **extra)
        except (RuntimeError, NotImplementedError) as e:
            if "not implemented for" in str(e) or "not support" in str(e):
                continue
            raise
        want = op.kernel(*inputs, **example.params)
        for a, b in zip(as_tuple(outs), as_tuple(want), strict=True):
            assert type_of(a) == type_of(b) and a.is_cuda, text
            assert torch.allclose(
                a.cpu().double() if not a.is_complex() else a.cpu(),
                b.double() if not b.is_complex() else b,
                rtol=2e-3,
                atol=2e-4,
                equal_nan=True,
            ), text


def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def test_dropout_draws_the_same_numbers():
    key = torch.tensor(1234567)
    x = torch.ones(64, 64)
    drop = OPS["dropout"].kernel
    assert torch.equal(drop(x, key, 0, p=0.3), drop(x.cuda(), key.cuda(), 0, p=0.3).cpu())


def test_a_program_moves_with_its_inputs():
    text = (
        "def main(x: f32[4]):\n  a: f32[4] = iota(dim=0, dtype=f32, shape=(4,))\n  y: f32[4] = mul(a, x)\n  return y\n"
    )
    run = mycel.jit(mycel.Program.parse(text))
    (y,) = run(torch.ones(4, device="cuda"))
    assert y.is_cuda and y.tolist() == [0, 1, 2, 3] and run(torch.ones(4))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("classes", [7, 256, 10001])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_loss_in_16_bits(monkeypatch, classes, reduction, bias, dtype):
    """Against torch in 64 bits, in one chunk and in several."""
    from mycel.ir import OPS

    op = OPS["linear_cross_entropy"]
    torch.manual_seed(0)
    x, w = torch.randn(300, 32, device="cuda", dtype=dtype), torch.randn(classes, 32, device="cuda", dtype=dtype)
    b = torch.randn(classes, device="cuda", dtype=dtype) if bias else None
    target = torch.randint(0, classes, (300, 2), device="cuda")[:, 0]  # not side by side in memory
    target[10:20] = -100
    wide = [t.double().requires_grad_() for t in (x, w, b) if t is not None]
    loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*wide), target, reduction=reduction)
    want = loss, *torch.autograd.grad(loss, wide)
    for chunk in (op.kernel.__globals__["CHUNK"], 64 * classes):
        monkeypatch.setitem(op.kernel.__globals__, "CHUNK", chunk)
        with torch.no_grad():
            results = op.kernel(x, w, b, target, reduction=reduction)
        for a, c in zip(results, want, strict=True):
            assert (a.double() - c).norm() <= 1e-2 * c.norm()
        assert abs(results[0] - loss) <= 1e-4 * abs(loss)


@pytest.mark.parametrize("shape", [(300, 64, 5000), (3000, 256, 5000), (200, 2048, 777)], ids=str)
def test_the_fused_loss_holds_what_it_says(shape, monkeypatch):
    """Memory while it runs, in one chunk and in several, padded or not: what planning counts."""
    rows, width, classes = shape
    loss = OPS["linear_cross_entropy"]
    monkeypatch.setitem(loss.kernel.__globals__, "CHUNK", 1 << 22)
    x, w = (torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in (rows, classes))
    target = torch.randint(0, classes, (rows,), device="cuda")
    for _ in range(2):  # the first time libraries take memory for themselves
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            results = loss.kernel(x, w, None, target)
        peak = torch.cuda.max_memory_allocated() - before
        held = sum(t.nbytes for t in results)
        del results
    predicted = loss.scratch(*map(type_of, (x, w)), None, type_of(target)) + held
    assert 0.9 * predicted <= peak <= 1.05 * predicted


def test_the_fused_loss_is_nan_where_there_is_no_such_class():
    from mycel.ir import OPS

    x, w = (
        torch.randn(4, 8, device="cuda", dtype=torch.bfloat16),
        torch.randn(5, 8, device="cuda", dtype=torch.bfloat16),
    )
    with torch.no_grad():
        loss, *_ = OPS["linear_cross_entropy"].kernel(x, w, None, torch.tensor([0, 1, 5, 2], device="cuda"))
    assert loss.isnan()


@pytest.mark.parametrize("counts", [[3, 0, 61, 0], [0, 0, 0, 64], [16, 16, 16, 16]], ids=str)
def test_torchs_grouped_products_are_ours(counts):
    """In bf16 torch has kernels for them; groups that are empty have a gradient of zero."""
    torch.manual_seed(0)
    sizes = torch.tensor(counts)
    x, g, w = torch.randn(64, 32), torch.randn(64, 48), torch.randn(4, 48, 32)
    for name, operands in {
        "grouped_matmul": (x, w, sizes),
        "grouped_weight": (g, x, sizes),
    }.items():
        rounded = [t.bfloat16() if t.is_floating_point() else t for t in operands]
        want = OPS[name].kernel(*(t.float() if t.is_floating_point() else t for t in rounded))
        got = OPS[name].kernel(*(t.cuda() for t in rounded)).float().cpu()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=5e-2)


def far(x, wanted):
    return float((x.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n, chosen, width", [(300, 8, 2048), (50, 1, 3000), (33, 3, 129)])
def test_rows_of_experts_move_by_our_kernels(n, chosen, width, dtype):
    """To their experts and back, and through the gate; against 64 bits, where torch's operators compute."""
    torch.manual_seed(0)
    near = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    x, rows = (torch.randn(k, width, device="cuda").to(dtype) for k in (n, n * chosen))
    order = torch.randperm(n * chosen, device="cuda")
    counts = torch.tensor([n * chosen - 20, 0, 20], device="cuda")
    h, scale = torch.randn(n * chosen, 2 * width, device="cuda").to(dtype), torch.rand(n * chosen, 1, device="cuda")
    w = torch.randn(3, 16, width, device="cuda").to(dtype)
    cases = [(o.dispatch, (x, order), {"chosen": chosen}), (o.collect, (rows, order), {"chosen": chosen}),
             (o.gated_grad, (rows, h, scale), {}), (o.gated_matmul, (h, w, scale, counts), {})]  # fmt: skip
    for op, operands, params in cases:
        with torch.no_grad():
            ours = op(*operands, **params)
            wanted = op(*(v.double() if v.is_floating_point() else v for v in operands), **params)
        for mine, theirs in zip(*(y if isinstance(y, tuple) else (y,) for y in (ours, wanted)), strict=True):
            assert far(mine, theirs) < near, op.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"maximize": True, "weight_decay": 0.0}, {"decoupled": False}])
def test_adam_of_large_parameters(dtype, settings):
    """By our kernel as by torch's own, with a small one beside."""
    torch.manual_seed(0)
    shapes = [(300, 1000), (5,)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(s, device="cuda", dtype=dtype)) for s in shapes] for _ in range(2))
    settings = dict(settings)
    kind = torch.optim.AdamW if settings.pop("decoupled", True) else torch.optim.Adam
    optimizers = [kind(ps, lr=1e-2, fused=True, **settings) for ps in (ours, theirs)]
    model = torch.nn.ParameterList(ours)
    noise = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
    step = mycel.train_step(model, optimizers[0], loss=lambda model, k: sum(
        (p * g * (k + 1)).float().sum() for p, g in zip(model, noise, strict=True)), compile=False)  # fmt: skip
    for k in range(4):
        step(k=torch.tensor(float(k), device="cuda"))
        for p, g in zip(theirs, noise, strict=True):
            p.grad = g * (k + 1)
        optimizers[1].step()
    for p, q in zip(ours, theirs, strict=True):
        assert far(p.detach(), q.detach()) < (1e-6 if dtype == torch.float32 else 1e-3)
        for slot in ("exp_avg", "exp_avg_sq"):
            mine, other = (opt.state[x][slot] for opt, x in zip(optimizers, (p, q), strict=True))
            assert far(mine, other) < (1e-6 if dtype == torch.float32 else 2e-3), slot


def test_the_norm_of_large_gradients():
    torch.manual_seed(0)
    like = {(1000, 700): torch.bfloat16, (3,): torch.bfloat16, (70001,): torch.float32, (2, 2): torch.float32}
    xs = [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in like.items()]
    wanted = torch.stack([x.double().norm() for x in xs]).norm()
    assert float(o.global_norm(*xs)) == pytest.approx(float(wanted), rel=1e-6)
    assert torch.equal(o.global_norm(*xs), o.global_norm(*(o.global_norm(x) for x in xs)))  # of the norm of each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, dropout", [((1, 4), 0.0), ((2, 1), 0.3), ((2, 4), 0.0), ((1, 1), 0.3)], ids=str)
def test_the_gradient_of_a_bias_in_16_bits(dtype, shape, dropout):
    """A tile at a time, summed over batch and heads where the bias has none: against the meaning in 64 bits."""
    grad = OPS["attention_mask_grad"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 40, device="cuda", dtype=dtype) for h, n in ((4, 150), (2, 90), (2, 90)))
    mask = torch.randn(*shape, 150, 90, device="cuda", dtype=dtype)
    mask[..., 10, :40] = -torch.inf
    wide = [x.double() for x in (q, k, v, mask)]
    draws = counted(q, k, torch.tensor(3, device="cuda"), 1) if dropout else None
    y, lse = OPS["attention"].kernel(*wide, draws, dropout=dropout)
    g = torch.randn_like(y)
    want = grad.kernel(g, *wide, y, lse, draws, dropout=dropout)
    narrow = (g.to(dtype), q, k, v, mask, y.to(dtype), lse.float(), draws)
    result = grad.kernel(*narrow, dropout=dropout)
    assert result.dtype == mask.dtype and (result.double() - want).norm() <= 1e-2 * want.norm()
    compiled = torch.compile(grad.kernel, fullgraph=True)(*narrow, dropout=dropout)
    assert (compiled.double() - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize("members", [1, 16])
def test_many_short_windows_with_a_bias_in_16_bits(members):
    """Of 49 pixels each, as Swin has them; one bias for all of them, or one each: against the meaning in 64 bits."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    q, k, v = (torch.randn(3000 // members * members, 3, 49, 32, device="cuda", dtype=dtype) for _ in range(3))
    bias = torch.randn(members, 3, 49, 49, device="cuda", dtype=dtype)
    bias = bias if members == 1 else bias.repeat(len(q) // members, 1, 1, 1)
    wide = [x.double() for x in (q, k, v, bias)]
    y, lse = OPS["attention"].kernel(*wide)
    g = torch.randn_like(y)
    wanted = [*OPS["attention_grad"].kernel(g, *wide, y, lse), OPS["attention_mask_grad"].kernel(g, *wide, y, lse)]
    narrow = OPS["attention"].kernel(q, k, v, bias)
    grads = OPS["attention_grad"].kernel(g.to(dtype), q, k, v, bias, *narrow)
    of_bias = OPS["attention_mask_grad"].kernel(g.to(dtype), q, k, v, bias, *narrow)
    assert far(narrow[0], y) < 1e-2 and far(narrow[1], lse) < 1e-2
    for mine, theirs in zip((*grads, of_bias), wanted, strict=True):
        assert far(mine, theirs) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_recurrent_layers(dtype):
    """In one kernel between products, forward and back: against torch's operators in 64 bits."""
    torch.manual_seed(0)
    t, b, n, bound = 5, 3, 300, 1e-5 if dtype == torch.float32 else 2e-2
    gy, gc, h, c = (torch.randn(*s, b, n, device="cuda", dtype=dtype) for s in ((t,), (t,), (), ()))
    for gates in (4, 3):
        x, bias = (torch.randn(*s, gates * n, device="cuda", dtype=dtype) for s in ((t, b), ()))
        w = torch.randn(gates * n, n, device="cuda", dtype=dtype) / 17
        results = []
        for how in (dtype, torch.float64):
            xs, ws, hs, cs, biases, gys, gcs = (z.to(how) for z in (x, w, h, c, bias, gy, gc))
            if gates == 4:
                outs = OPS["lstm_steps"].kernel(xs, ws, hs, cs)
                results.append((*outs, *OPS["lstm_steps_grad"].kernel(gys, gcs, ws, cs, *outs[1:])))
            else:
                outs = OPS["gru_steps"].kernel(xs, ws, biases, hs)
                results.append((*outs, *OPS["gru_steps_grad"].kernel(gys, ws, hs, *outs)))
        for mine, theirs in zip(*results, strict=True):
            assert mine.dtype == dtype and far(mine, theirs) < bound


@pytest.mark.parametrize("window", [(1, 0), (31, 0), (70, 5), (300, 0)])
@pytest.mark.parametrize("width, length", [(64, 256), (192, 200), (40, 130)])
def test_a_window_in_16_bits(window, width, length):
    """Torch's own kernel with a window, and its gradients: against blocks in 64 bits."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, h, length, width, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    attention, grad = OPS["attention"].kernel, OPS["attention_grad"].kernel
    want = attention(q.double(), k.double(), v.double(), None, window=window)
    want += grad(g.double(), q.double(), k.double(), v.double(), None, *want, window=window)
    results = attention(q, k, v, None, window=window)
    results += grad(g, q, k, v, None, *results, window=window)
    for a, b in zip(results, want, strict=True):
        assert a.shape == b.shape and (a.double() - b).norm() <= 1e-2 * b.norm()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_steps_on_documents_are_torchs(kind, compiled):
    """In 16 bits: documents of many lengths a tile at a time, padding as a mask of columns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=512, vocab_size=512, use_cache=False)
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (2, 600), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (16, 300, 120, 31, 133, 25, 352, 90, 133)])
        batch["position_ids"] = positions.reshape(2, 600).cuda()
    else:
        batch["attention_mask"] = (torch.arange(600) < torch.tensor([[600], [410]])).long().cuda()
        batch["labels"] = torch.where(batch["attention_mask"] == 1, ids, -100)
    losses = []
    for ours in (True, False):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if ours:
            step = mycel.train_step(model, optimizer, compile=compiled)
            losses.append([float(step(**batch)) for _ in range(6)])
            continue
        rows = []
        for _ in range(6):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(float(loss))
        losses.append(rows)
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0][-1] < losses[0][0] - 0.3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recorded_step_is_the_step(accumulate):
    """A CUDA graph replays what the code does: losses, weights and random numbers, with a schedule."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def train(recorded):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=2, n_positions=64)
        model = GPT2LMHeadModel(config).cuda()
        # eps: the bias of keys has no gradient but rounding, which Adam would make as large as any other
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        step = mycel.train_step(model, optimizer, precision="bf16", clip_norm=1.0, accumulate=accumulate)
        losses = []
        for i in range(8):
            ids = torch.randint(0, 131, (4, 64), device="cuda")
            if i == 1 and not recorded:
                step.entries[0].replayed.why = "for comparison"
            losses.append(step(input_ids=ids, labels=ids))
            optimizer.param_groups[0]["lr"] *= 0.9
        assert bool(step.entries[0].replayed.why) != recorded, step.entries[0].replayed.why
        assert ("one CUDA graph" in step.explain()) == recorded
        return torch.stack(losses), [p.detach() for p in model.parameters()]

    (a, mine), (b, others) = train(True), train(False)
    assert torch.allclose(a, b, rtol=1e-3) and len(set(a.tolist())) == len(a)
    for x, y in zip(mine, others, strict=True):
        assert (x - y).norm() <= 1e-2 * y.norm()


@pytest.fixture
def replayed_calls(monkeypatch):
    """The calls of jitted functions that may be recorded, as they are made."""
    calls, plain = [], api.replayed_call

    def seen(*how):
        calls.append(plain(*how))
        return calls[-1]

    monkeypatch.setattr(api, "replayed_call", seen)
    return calls


def recordings(call):
    """Those of a jitted call; that it has some, and that nothing spoke against any."""
    of_contexts = [*call.by_context.values()]
    assert of_contexts and not any(replayed.why for replayed in of_contexts), [r.why for r in of_contexts]
    return [replayed.recording for replayed in of_contexts]


def same_results(actual, wanted):
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    elif isinstance(wanted, (dict, tuple, list)):
        values = (x.values() if isinstance(x, dict) else x for x in (actual, wanted))
        for a, b in zip(*values, strict=True):
            same_results(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_jitted_models_are_replayed(name, replayed_calls):
    """Or run as they are; what a call returned stays what it was."""
    model, batch = MODELS[name]().cuda().eval(), to_cuda(MODELS[name].inputs())
    fast = mycel.jit(model)
    with torch.no_grad():
        wanted = model(**batch)
        results = [fast(**batch) for _ in range(4)]
    for each in results:
        same_results(each, wanted)
    if name in ("llama", "gpt2", "bert", "vit"):
        (call,) = replayed_calls
        assert all(recordings(call))


def test_a_jitted_call_is_recorded_anew_for_weights_that_moved(replayed_calls):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).cuda()
    fast, kept = mycel.jit(model), []
    with torch.no_grad():
        for turn in range(3):
            for p in model.parameters():
                kept.append(p.data)
                p.data = p.data + 0.1
            for _ in range(20):
                x = torch.randn(4, 64, device="cuda")
                same_results(fast(x), model(x))
            if turn == 1:
                model[0].weight.data = model[0].weight.data.t()
                same_results(fast(x), model(x))
    assert len(recordings(replayed_calls[0])) == 1


def test_a_jitted_call_on_other_streams_and_in_other_graphs(replayed_calls):
    weight = torch.randn(64, 64, device="cuda")
    fast = mycel.jit(lambda x: torch.tanh(x @ weight) * 2)
    wanted = lambda x: torch.tanh(x @ weight) * 2
    x = torch.randn(4, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.no_grad():
        for stream in (torch.cuda.current_stream(), side, torch.cuda.current_stream(), side, side):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                same_results(fast(x), wanted(x))
            torch.cuda.current_stream().wait_stream(stream)
        with torch.inference_mode():
            same_results(fast(x), wanted(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        x.normal_()
        graph.replay()
        same_results(y, wanted(x))
        torch.set_float32_matmul_precision("high")
        try:
            exact = fast(x), fast(x)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert all(torch.allclose(z, wanted(x), rtol=1e-2, atol=1e-1) for z in exact)
        same_results(fast(x), wanted(x))
    assert len(recordings(replayed_calls[0])) == 3


def test_the_memory_of_a_recorded_call_goes_with_it():
    """Most of it: libraries keep workspaces."""
    weight = torch.randn(1024, 1024, device="cuda")
    held = []
    with torch.no_grad():
        for _ in range(3):
            fast = mycel.jit(lambda x: (x @ weight).relu() + 1)
            for _ in range(3):
                fast(torch.randn(1024, 1024, device="cuda"))
            del fast
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
    assert held[2] <= held[0]


@pytest.mark.parametrize("guess", [False, True])
def test_text_by_replayed_code_is_what_generate_writes(guess, replayed_calls, monkeypatch):
    """Prompt after prompt, beyond the first cache; one recording for each size of it, with guesses and without."""
    monkeypatch.setattr(decode, "LEAST", 16)
    torch.manual_seed(0)
    model = llama(max_position_embeddings=256, eos_token_id=None).cuda().eval()
    decoder = decode.Decoder(model, 256, guess=guess)
    for ids in ([5, 7, 11, 2, 5, 7], [3, 1, 4], [5, 7, 11, 2, 5, 7]):
        with torch.no_grad():
            asked = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
            wanted = model.generate(torch.tensor([ids], device="cuda"), **asked)[0, len(ids) :].tolist()
        assert [*stream(model, ids, Sampling(40, 0.0), [], decoder)] == wanted
    assert all(len(recordings(call)) == 1 for call in replayed_calls) and len(replayed_calls) >= 3


CAPTURABLE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in CAPTURABLE), ("AdamW", True)])
@pytest.mark.filterwarnings("error:.*runs as it is")
def test_capturable_optimisers_take_torchs_steps(name, compiled):
    """The update is part of the program; a learning rate on the device is read at every step, and torch goes on where
    the step stopped, with counts of steps that it asks to have on the device, and back."""
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).cuda()
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    rate = lambda: torch.tensor(1e-2, device="cuda") if name in ("Adam", "AdamW") else 1e-2
    mine, plain = (getattr(torch.optim, name)(m.parameters(), lr=rate(), capturable=True) for m in (model, twin))
    step = mycel.train_step(model, mine, loss=torch.nn.functional.mse_loss, compile=compiled)

    def by_torch(module, optimizer, x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(8):
        gen = torch.Generator("cuda").manual_seed(i)
        x, y = (torch.randn(16, n, device="cuda", generator=gen) for n in (32, 8))
        for group in (*mine.param_groups, *plain.param_groups) if i == 3 else ():
            group["lr"] = group["lr"].fill_(5e-3) if isinstance(group["lr"], torch.Tensor) else 5e-3
        got = by_torch(model, mine, x, y) if i in (5, 6) else step(x, y)
        torch.testing.assert_close(got, by_torch(twin, plain, x, y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)
    assert step.updating.by_rule and all(held["step"].is_cuda for held in mine.state.values())


EVERYTHING = {**dict.fromkeys(("activations", "gradients", "parameters", "optimizer"), "host"), "update": "device"}


def offloaded(plan, compiled):
    """A step that was trained, evaluated and called under a plan, its peak, and all that came out of it."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = llama(num_attention_heads=4, num_key_value_heads=2, vocab_size=512, **sizes).cuda()
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan, compile=compiled)
    gen = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 500, (16, 256), generator=gen).cuda() for _ in range(4)]
    losses = [step(input_ids=ids, labels=ids) for ids in batches]
    torch.cuda.reset_peak_memory_stats()
    losses.append(step(input_ids=batches[0], labels=batches[0]))
    peak = torch.cuda.max_memory_allocated() - before
    losses += [step(input_ids=ids, labels=ids) for ids in (batches[1][:8], batches[1])]  # another signature
    losses += [step.evaluate(input_ids=batches[2], labels=batches[2])]
    with step.whole() as whole:
        losses.append(whole(input_ids=batches[3], labels=batches[3]).loss.detach())
    state = step.state_dict()
    slots = [held[k].cpu() for held in state["optimizer"]["state"].values() for k in ("exp_avg", "exp_avg_sq")]
    return step, peak, [*losses, *(x.cpu().clone() for x in state["model"].values()), *slots]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kinds", [{"activations": "host", "optimizer": "host"}, EVERYTHING], ids=["some", "all"])
def test_offload_is_the_same_step(compiled, kinds):
    """What lives on the host, or waits there: the same bits, in the memory that was planned."""
    plain, _, want = offloaded(None, compiled)
    moving, peak, got = offloaded({"offload": kinds}, compiled)
    decided = moving.plan.decided.moved
    full = compiled and kinds is EVERYTHING  # at this size what must come and go takes all of the wire's time
    assert decided.streamed and (decided.moved or full)
    assert all(map(torch.equal, want, got)), "offload changes no bit"
    assert moving.plan.peak < plain.plan.peak and peak <= moving.plan.peak


@pytest.mark.parametrize("kinds", [EVERYTHING, {"parameters": "host", "optimizer": "host"}], ids=["all", "state"])
def test_an_update_on_the_host_is_the_step_within_rounding(kinds):
    """In a thread beside the device: the same twice to the bit, and torch's two kernels differ by rounding alone."""
    _, _, want = offloaded(None, False)
    moving, peak, got = offloaded({"offload": {**kinds, "update": "host"}}, False)
    again = offloaded({"offload": {**kinds, "update": "host"}}, False)[2]
    assert moving.plan.decided.moved.updated and peak <= moving.plan.peak
    assert all(map(torch.equal, got, again)), "whoever reads what the host writes waits for it"
    assert all((x.cpu() - y.cpu()).norm() <= 1e-3 * y.norm().cpu() for x, y in zip(got, want, strict=True))


def test_a_skipped_step_updates_nothing_on_the_host():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).cuda()
    offload = {"parameters": "host", "optimizer": "host", "update": "host"}
    step = mycel.train_step(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=torch.nn.functional.cross_entropy,
        precision="fp16", clip_norm=1.0, plan={"offload": offload},
    )  # fmt: skip
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 8, (32,), device="cuda")
    step(x, y)
    before = [t.cpu().clone() for t in step.state_dict()["model"].values()]
    step.set_counters({**step.counters(), "loss_scale": torch.tensor(2.0**24)})
    step(x, y)
    after = [t.cpu().clone() for t in step.state_dict()["model"].values()]
    assert step.skipped == 1 and all(map(torch.equal, before, after))
    for _ in range(12):
        step(x, y)
    assert step.skipped < 13 and not torch.equal(step.state_dict()["model"]["0.weight"].cpu(), before[0])


def test_images_lie_channels_last():
    """What a convolution in 16 bits gives, and what is made of it, is not moved again."""
    torch.manual_seed(0)
    x, w = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((2, 16, 8, 8), (16, 16, 3, 3)))
    how = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    y = o.conv(x, w, **how)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert o.conv_transpose(y, w, output_padding=(0, 0), **how).is_contiguous(memory_format=torch.channels_last)
    dw = o.conv_weight(y, x, shape=(16, 16, 3, 3), **how)
    assert dw.is_contiguous()  # as parameters lie
    wide = [t.float().requires_grad_() for t in (x, w)]
    want = torch.nn.functional.conv2d(*wide, padding=1)
    (exact,) = torch.autograd.grad(want, wide[1:], y.float())
    assert (y - want).norm() <= 1e-2 * want.norm() and (dw - exact).norm() <= 1e-2 * exact.norm()


HAS_FP8 = torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not HAS_FP8, reason="no products in 8 bits")
@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("rows", [256, 48, 40], ids=lambda n: f"{n} rows")
def test_products_in_eight_bits(rows, left):
    """As the CPU emulates them, up to the rounding of the result: of sizes that the kernel takes, and others."""
    torch.manual_seed(0)
    x = torch.randn(2, rows // 2, 128).bfloat16() * 2.0 ** torch.randint(-20, 20, (2, rows // 2, 1))
    w, g = torch.randn(320, 128).bfloat16(), torch.randn(2, rows // 2, 320).bfloat16()
    cases = {"fp8_linear": (x, w), "fp8_matmul": (g, w), "fp8_linear_weight": (g, x)}
    for name, (a, b) in cases.items():
        want = OPS[name].kernel(a.bfloat16(), b, left=left).double()
        got = OPS[name].kernel(a.bfloat16().cuda(), b.cuda(), left=left).double().cpu()
        scale = want.abs().amax(-1, keepdim=True)
        assert ((got - want).abs() <= 2**-7 * scale).all(), name


@pytest.mark.skipif(not HAS_FP8, reason="no products in 8 bits")
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(2, 2048, 1024), (1000, 70), (3, 5)], ids=str)
def test_columns_in_eight_bits(shape, form):
    """To the bit as the CPU converts them: of all magnitudes, one of zeros, and one that is not finite."""
    torch.manual_seed(0)
    x = torch.randn(shape) * 2.0 ** torch.randint(-30, 30, (shape[-1],))
    x[..., 1], x[0, ..., 2] = 0, float("inf")
    for dtype in (torch.bfloat16, torch.float32):
        (want, scales), (got, ours) = (OPS["fp8_columns"].kernel(v.to(dtype), form=form) for v in (x, x.cuda()))
        assert torch.equal(ours.cpu(), scales)
        good = [i for i in range(shape[-1]) if i != 2]
        assert torch.equal(got.cpu().view(torch.uint8)[good], want.view(torch.uint8)[good])
        assert (got.float()[2] * ours[2]).isnan().any()


@pytest.mark.skipif(not HAS_FP8, reason="no products in 8 bits")
@pytest.mark.parametrize("shape", [(2, 1024, 1024), (1000, 70), (3, 5)], ids=str)
def test_gates_in_eight_bits(shape):
    """What the kernels give, multiplied by its scales, is the gate and its gradients up to the rounding to 8 bits."""
    torch.manual_seed(0)
    g, a, b = (torch.randn(shape).bfloat16() for _ in range(3))
    g *= 2.0 ** torch.randint(-20, 20, (*shape[:-1], 1))
    forms = {"form": torch.float8_e5m2, "kept": torch.float8_e4m3fn}
    cases = [("gated_fp8", (a, b), {"form": torch.float8_e4m3fn}), ("gated_fp8_grad", (g, a, b), forms)]
    for name, operands, params in cases:
        got = OPS[name].kernel(*(x.cuda() for x in operands), **params)
        want = OPS[name].kernel(*(x.float() for x in operands), **params)
        assert len(got) == len(want)
        for i in range(0, len(want), 2):
            ours, theirs = (x[i].double().cpu() * x[i + 1].double().cpu() for x in (got, want))
            step = 2.0 ** (-3 if want[i].dtype == torch.float8_e4m3fn else -2)  # between neighbours, of the larger
            assert ours.shape == theirs.shape
            assert ((ours - theirs).abs() <= step * theirs.abs() + 2.0**-9 * theirs.abs().amax(-1, keepdim=True)).all()
            assert (ours == theirs).double().mean() > 0.99


@pytest.mark.skipif(not HAS_FP8, reason="no products in 8 bits")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_in_eight_bits(compiled):
    """Falls as the emulation does, and multiplies in 8 bits.  Over four steps: what one rounding to 8 bits changes has
    grown to a percent after six, with the compiler and without."""

    def losses(device):
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
        model = llama(num_attention_heads=4, num_key_value_heads=2, **sizes).to(device)
        step = mycel.train_step(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            precision="fp8",
            compile=compiled and device == "cuda",
        )
        step.planned_for = CPU  # at this size nothing would pay
        ids = torch.randint(3, 500, (4, 64), generator=torch.Generator().manual_seed(1)).to(device)
        return torch.stack([step(input_ids=ids, labels=ids).cpu() for _ in range(4)]), step.explain()

    (got, said), (want, _) = losses("cuda"), losses("cpu")
    assert "14 of 15 products" in said
    assert torch.allclose(got, want, rtol=5e-3)


def test_kernels_are_not_launched_on_fake_tensors():
    """Which would read what is at address 0."""
    text = "def main(x: bf16[64,64]):\n  y: f8e4m3[64,64], s: f32[64,1] = fp8_columns(x, form=f8e4m3)\n  return y, s\n"
    x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    block_inputs(mycel.Program.parse(text), (), [x], x.device)
    torch.cuda.synchronize()


def test_a_router_that_breaks_is_named_one_step_late():
    """The device is not waited for: the next step is begun before the loss of the last is looked at."""
    model, x = Routed(6).cuda(), torch.randn(8, 4, dtype=torch.float64, device="cuda")
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(x=x)
    model.router.weight.data.fill_(torch.nan)
    step(x=x)
    with pytest.raises(RunError, match="the router of the model gives weights that are not finite: 16 of 16"):
        step(x=x)
