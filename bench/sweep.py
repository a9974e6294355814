"""Does any PyTorch program train?  Many models and programs, each in a process of its own, against torch in f64.

    python bench/sweep.py                     all of them
    python bench/sweep.py --only bert,lstm    those whose names contain one of these
    python bench/sweep.py --kind hand         one kind: causal, masked, text, seq2seq, vision, segment, video, audio,
                                              ctc, pairs (`sweep_families.py`); captions (`sweep_captions.py`);
                                              nn, hand, net, code (`programs`)
    python bench/sweep.py --heads --kind qa   every head of each family of Hugging Face, not the first alone
    python bench/sweep.py --part 1/4          every fourth of them

For each: outputs in train and eval mode, gradients of the loss by torch's autograd and by ours, and two AdamW steps
(dropout set to zero; of what draws random numbers even so, losses and gradients of many draws are to have the mean of
torch's, and its steps are to be finite).  Models and twins are made anew, as closures and hooks hold the model they
were made with.  It passes, passes with an island, is refused, is wrong, or fails with an exception that is none of
Mycel's; what torch itself cannot run is left out.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from programs import (  # noqa: F401  they enter
    agents,
    decoding,
    densities,
    fields,
    flows,
    generative,
    habits,
    hand_layers,
    inner_gradients,
    kept_state,
    learning,
    made_weights,
    networks,
    own_python,
    papers,
    python_forms,
    rewards,
    sequences,
    solvers,
    structured,
    training_code,
    views,
)
from programs.entry import PROGRAMS, X
from programs.functions import HAND, Written
from programs.layers import MODULES
from sweep_captions import captioned
from sweep_families import families, family
from torch import nn

import mycel


def peft_model() -> tuple[nn.Module, dict[str, Any]]:
    import peft

    model, batch = family("causal", "llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config), batch


def cases(heads: bool = False) -> dict[str, Callable[[], Any]]:
    return {**cases_at_hand(), "hand/peft_lora": peft_model, **families(heads), **captioned()}


def cases_at_hand() -> dict[str, Callable[[], Any]]:
    """Those that need torch alone."""
    known: dict[str, Callable[[], Any]] = {f"nn/{name}": make for name, make in MODULES.items()}
    known.update({f"hand/{fn.__name__}": lambda fn=fn: (Written(fn), (X,)) for fn in HAND})
    known.update(PROGRAMS)
    return known


# -- one case


def called(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, (torch.Tensor, tuple)):
        return out if isinstance(out, torch.Tensor) else out[0]
    return out["loss"] if isinstance(out, dict) else out.loss


def leaves(out: Any) -> Iterator[torch.Tensor]:
    """All tensors and numbers of what a model gives."""
    if isinstance(out, (torch.Tensor, bool, int, float, complex)):
        yield torch.as_tensor(out).detach()
    elif isinstance(out, Mapping):
        for key in out:
            yield from leaves(out[key])
    elif isinstance(out, (list, tuple)):
        for part in out:
            yield from leaves(part)
    elif dataclasses.is_dataclass(out):
        yield from leaves(vars(out))


def wide(x: Any) -> Any:
    """In double precision, tensors of lists and dicts too."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(wide, x))
    if isinstance(x, dict):
        return {k: wide(v) for k, v in x.items()}
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(kind), b.to(kind), rtol=1e-4, atol=1e-6, equal_nan=True)


def judge(make: Callable[[], Any]) -> str:
    """What becomes of one model."""
    try:
        tried(make)
    except Exception as e:
        if torch.get_default_dtype() == torch.float32:  # it may make tensors of the default type
            torch.set_default_dtype(torch.float64)
            try:
                return judge(make)
            finally:
                torch.set_default_dtype(torch.float32)
        return f"left out: torch itself: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:90]}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            wrong = compare(make)
        except mycel.errors.MycelError as e:
            return f"refused: {' '.join(str(e).split())[:200]}"
        except Exception as e:
            return f"foreign: {type(e).__name__}: {str(e).splitlines()[0][:150] if str(e) else ''}"
    if wrong:
        return f"wrong: {wrong}"
    island = next((str(w.message) for w in warned if "runs as plain Python" in str(w.message)), None)
    return "pass" if island is None else f"island: {' '.join(island.split())[:160]}"


def made(make: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """A model in double precision and a batch, the same ones at every call."""
    torch.manual_seed(0)
    random.seed(0)
    model, batch = make()
    model = model.double()
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    return model, wide(batch)


def tried(make: Callable[[], Any]) -> None:
    """Torch itself can train it."""
    model, batch = made(make)
    wanted = {mode: called(copy.deepcopy(model).train(mode), batch) for mode in (True, False)}
    loss_of(wanted[True]).backward()
    if not finite(copy.deepcopy(model).train(), batch):
        raise ValueError("a loss or a gradient is not finite")
    torch.optim.AdamW(model.parameters())


def finite(model: nn.Module, batch: Any) -> bool:
    loss = loss_of(called(model, batch))
    loss.backward()
    return all(x is None or bool(x.isfinite().all()) for x in (loss, *(p.grad for p in model.parameters())))


def draws(model: nn.Module, batch: Any, training: bool) -> bool:
    """Does it draw random numbers, others than ours?"""
    losses = []
    for seed in range(6):
        torch.manual_seed(seed)
        losses.append(loss_of(called(copy.deepcopy(model).train(training), batch)).detach())
    return not all(close(loss, losses[0]) for loss in losses)


def sampled(model: nn.Module, fn: Callable[..., Any], batch: Any, count: int) -> tuple[list[str], torch.Tensor]:
    """Of many draws, loss and a number of each parameter's gradient: how far it goes along one direction."""
    names = ["loss", *(f"gradient of {name}" for name, _ in model.named_parameters())]
    along = [torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for p in model.parameters()]
    rows = []
    for seed in range(count):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = loss_of(called(fn, batch))
        loss.backward()
        gs = [p.grad for p in model.parameters()]
        moves = [0.0 if g is None else (g * d).sum().real.item() for g, d in zip(gs, along, strict=True)]
        rows.append([loss.item(), *moves])
    return names, torch.tensor(rows, dtype=torch.float64)


def compare_draws(make: Callable[[], Any], count: int = 60) -> str:
    """The first mean of many draws that is not torch's."""
    (ours, batch), (theirs, _) = made(make), made(make)
    names, got = sampled(ours.train(), mycel.jit(ours), batch, count)
    _, want = sampled(theirs.train(), theirs, batch, count)
    error = ((got.var(0) + want.var(0)) / count).sqrt()
    for name, x, y, e in zip(names, got.mean(0), want.mean(0), error, strict=True):
        if (x - y).abs() > 6 * e + 1e-6 * (1 + y.abs()):
            return f"{name}, mean of {count} draws: {x:.4g} for {y:.4g}, give or take {e:.2g}"
    return ""


def compare(make: Callable[[], Any]) -> str:
    """The first thing that differs from torch: of three calls in each mode (code may count them), and two steps."""
    model, batch = made(make)
    random_steps = draws(model, batch, True)
    for mode in (False, True):
        if random_steps if mode else draws(model, batch, False):
            continue
        (jitted, _), (plain, _) = made(make), made(make)
        fast = mycel.jit(jitted.train(mode))
        plain.train(mode)
        for call in range(3):
            ours, theirs = called(fast, batch), called(plain, batch)
            got, want = list(leaves(ours)), list(leaves(theirs))
            where = f"in {'train' if mode else 'eval'} mode, call {call}"
            if len(got) != len(want):
                return f"{len(got)} outputs {where}, for {len(want)}"
            for i, (x, y) in enumerate(zip(got, want, strict=True)):
                if x.shape != y.shape or not close(x, y):
                    return f"output {i} {where}: {x.flatten()[:4].tolist()} for {y.flatten()[:4].tolist()}"
        if not mode or not loss_of(theirs).requires_grad:
            continue
        loss_of(ours).backward()
        loss_of(theirs).backward()
        for (name, p), q in zip(jitted.named_parameters(), plain.parameters(), strict=True):
            if q.grad is not None and (
                p.grad is None and q.grad.any() or p.grad is not None and not close(p.grad, q.grad)
            ):
                return f"gradient of {name} by torch's autograd through jitted code"
    return compare_draws(make) or compare_steps(make, True) if random_steps else compare_steps(make, False)


def compare_steps(make: Callable[[], Any], draws_numbers: bool) -> str:
    """The first thing that differs from torch in two AdamW steps; of one that draws numbers, a loss that is none."""
    (model, batch), (twin, _) = made(make), made(make)
    model.train()
    twin.train()
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), compile=False, grads=True)
    for turn in range(2):
        got = step(**batch) if isinstance(batch, dict) else step(*batch)
        if draws_numbers:
            if not got.isfinite():
                return f"loss of step {turn}: {got.item()}"
            continue
        plain.zero_grad()
        want = loss_of(called(twin, batch))
        want.backward()
        plain.step()
        if not close(got, want.detach()):
            return f"loss of step {turn}: {got.item()} for {want.item()}"
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if q.grad is not None and p.grad is not None and not close(p.grad, q.grad):
                return f"gradient of {name} in step {turn}: off by {(p.grad - q.grad).abs().max():.2g}"
        held = model.state_dict()
        for (name, x), y in zip(held.items(), twin.state_dict().values(), strict=True):
            if isinstance(x, torch.Tensor) and not torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-5):
                return f"{name} after step {turn}: off by {(x.double() - y.double()).abs().max():.2g}"
        twin.load_state_dict(held)  # a norm over two rows makes much of the last bit
    return ""


def apart(make: Callable[[], Any], seconds: int) -> str:
    """The verdict of a process of its own, which starts with what is imported here."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: there.send(judge(make)))
    process.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(seconds) else "timeout"
    except EOFError:
        return "foreign: the process ended"
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names that contain one of these, by commas")
    parser.add_argument("--kind", default="")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th, from the I-th on")
    parser.add_argument("--seconds", type=int, default=240, help="for each")
    parser.add_argument("--heads", action="store_true", help="all heads of a family, not the first alone")
    args = parser.parse_args()
    known = cases(args.heads)
    wanted = [n for n in known if n.startswith(args.kind) and any(part in n for part in args.only.split(","))]
    first, every = map(int, args.part.split("/"))
    wanted = wanted[first % every :: every]
    judge(known["nn/prelu"])  # what is imported on the way is imported once for all
    if any(n not in cases_at_hand() for n in wanted):
        judge(known["hand/peft_lora"])
    tally: Counter[str] = Counter()
    for name in wanted:
        start = time.perf_counter()
        verdict = apart(known[name], args.seconds)
        tally[verdict.partition(":")[0]] += 1
        print(f"{name:<34} {time.perf_counter() - start:5.0f} s  {verdict}", flush=True)
    judged = sum(n for kind, n in tally.items() if kind != "left out")
    passed = tally["pass"] + tally["island"]
    print(f"{passed} of {judged} pass, {tally['island']} with an island; {dict(tally)}")


if __name__ == "__main__":
    main()
