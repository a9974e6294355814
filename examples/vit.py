"""A vision transformer of Hugging Face, unmodified, on images made here: stripes in one of four directions.

python examples/vit.py [--steps 80]
"""

from __future__ import annotations

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

import mycel


def images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy stripes, and the number of their direction."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=draw)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = torch.stack([rows, columns, rows + columns, rows - columns])[labels]
    phase = torch.rand(count, 1, 1, generator=draw) * 6.28
    pixels = torch.sin(along + phase)[:, None] + 0.3 * torch.randn(count, 1, 16, 16, generator=draw)
    return pixels.expand(-1, 3, -1, -1).contiguous(), labels


def main(steps: int = 80) -> float:
    """The accuracy on images it has not seen."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        num_labels=4,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = mycel.train_step(model, optimizer, clip_norm=1.0, outputs=True)
    for i in range(steps):
        pixels, labels = images(32, i)
        loss, outputs = step(pixel_values=pixels, labels=labels)
        if i % 20 == 0:
            right = (outputs.logits.argmax(-1) == labels).float().mean()
            print(f"step {i:3d}   loss {float(loss):.3f}   right {float(right):.0%}")
    pixels, labels = images(256, 10_000)
    _, outputs = step.evaluate(pixel_values=pixels, labels=labels)
    right = float((outputs.logits.argmax(-1) == labels).float().mean())
    print(f"right on images it has not seen: {right:.0%}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    main(parser.parse_args().steps)
