"""What a rank does in the test of manual regions:  python manual_child.py FOLDER.  It trains a model with regions
beside the plain one."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch
from test_manual import SPLIT, Decorated, Layers, Plain, rows

import mycel


def losses(model: torch.nn.Module, steps: int, **settings: object) -> tuple[list[float], mycel.Step]:
    step = mycel.train_step(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        compile=False,
        clip_norm=1.0,
        **{"plan": None, **settings},
    )
    return [float(step(**rows())) for _ in range(steps)], step


def main() -> None:
    torch.manual_seed(0)
    model, plain = Layers(Decorated).double().eval(), Layers(Plain).double().eval()
    plain.load_state_dict(model.state_dict())
    wanted, _ = losses(plain, 5)
    parameters = {f"layers.*.inner.{name}": layout for name, layout in SPLIT.items()}
    got, step = losses(model, 5, mesh=mycel.Mesh(tp=2), plan={"parameters": parameters})
    assert all(abs(a - b) < 1e-10 for a, b in zip(got, wanted, strict=True)), (got, wanted)
    assert model.layers[0].inner.up.weight.shape == (4, 6)
    Path(sys.argv[1], f"explained-{os.environ['RANK']}").write_text(step.explain())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    main()
