"""Models nobody tuned the step for: whatever PyTorch trains, ten steps of it are the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from models import TEXT, VOCAB, UNet, llama, t5
from stepping import adam, adamw, agree, beside, cross_entropy, mlp, plain_step, rows, sgd
from test_step import text
from torch import nn

import mycel


class CNN(nn.Module):
    """Convolutions in groups, strides and both memory formats; statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 3, stride=2, groups=2, bias=False),
            nn.BatchNorm2d(8, momentum=0.3),
            nn.SiLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def images(i):
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(i)), rows(i)[1]


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adamw()])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_and_statistics(layout, optimizer):
    def batches(i):
        x, y = images(i)
        return x.to(memory_format=layout), y

    agree(beside(lambda: CNN().to(memory_format=layout), optimizer, batches, cross_entropy, clip_norm=1.0))


def test_statistics_of_parts_are_handed_on():
    """Statistics see each part in turn, as a loop over the parts would show them."""
    pair = beside(CNN, sgd(), images, cross_entropy, steps=0, accumulate=2)
    x, y = images(0)
    y = y.clamp(min=0)
    pair.step(x, y)
    pair.plain.zero_grad()
    losses = [cross_entropy(pair.twin(part), target) / 2 for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    pair.plain.step()
    agree(pair)


class Words(nn.Module):
    """A recurrent language model."""

    def __init__(self, cell):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, 8), cell, nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.cell(self.embed(x))[0]).flatten(0, 1)


def words(i):
    g = torch.Generator().manual_seed(i)
    return torch.randint(0, 20, (4, 6), generator=g), torch.randint(0, 20, (24,), generator=g)


@pytest.mark.parametrize(
    "cell",
    [lambda: nn.LSTM(8, 8, 2, batch_first=True), lambda: nn.GRU(8, 8, 2, batch_first=True), lambda: nn.RNN(8, 8)],
)
def test_recurrent_layers(cell):
    agree(beside(lambda: Words(cell()), adamw(), words, cross_entropy, clip_norm=0.5))


class Searching(nn.Module):
    """How often a layer runs, and which way it goes on, depends on values."""

    def __init__(self):
        super().__init__()
        self.layer, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        n = torch.tensor(0)
        while x.norm() > 1.0 and n < 5:
            x = torch.tanh(self.layer(x)) * 0.5
            n = n + 1
        x = self.other(x) if x.sum() > 0 else -x
        return self.head(x)


def varied(i):
    return rows(i)[0] * (i % 4), rows(i)[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_control_flow_that_depends_on_values(precision):
    agree(
        beside(Searching, sgd(), varied, cross_entropy, precision=precision),
        *((2e-2, 5e-2) if precision == "bf16" else ()),
    )


@pytest.mark.parametrize(
    "optimizer", [adam(), sgd(momentum=0.9), sgd(weight_decay=0.1)], ids=["adam", "momentum", "decay"]
)
def test_weights_on_the_way_not_taken_stay(optimizer):
    agree(beside(Searching, optimizer, varied, cross_entropy))


class Rooted(torch.autograd.Function):
    """A gradient of one's own, which is not the true one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign() * x.abs().sqrt()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.tanh()


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(Rooted.apply(self.layer(x)))


class Shared(nn.Module):
    """One weight in two modules."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Parametrised(nn.Module):
    """Weights that are computed from others at every call; one of them keeps a state."""

    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Checkpointed(nn.Module):
    """torch's own recomputation inside."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False))


@pytest.mark.parametrize("settings", [{}, {"accumulate": 4, "clip_norm": 0.3}], ids=str)
@pytest.mark.parametrize("make", [Custom, Shared, Parametrised, Checkpointed])
def test_unusual_modules(make, settings):
    if make is Parametrised and settings:
        pytest.skip("power iterations go on from part to part: not the whole batch at once")
    agree(beside(make, adamw(), rows, cross_entropy, **settings))


class Several(nn.Module):
    """A loss of several terms."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x, y):
        z = self.layer(x)
        decay = 1e-3 * sum(p.square().sum() for p in self.parameters())
        return {"loss": cross_entropy(self.head(z), y) + 0.1 * z.square().mean() + decay, "z": z}


@pytest.mark.parametrize("settings", [{}, {"accumulate": 4}], ids=str)
def test_a_loss_of_several_terms(settings):
    agree(beside(Several, adamw(), rows, **settings))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 6)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return x + self.b(torch.tanh(self.a(F.layer_norm(x, (6,))))) * gate, gate


class Gated(nn.Module):
    """Layers that return what backward needs too: their gates are part of the loss."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Gate() for _ in range(3)), nn.Linear(6, 5)

    def forward(self, x, y):
        gates = []
        for layer in self.layers:
            x, gate = layer(x)
            gates.append(gate.mean())
        return cross_entropy(self.head(x), y) + 0.1 * sum(gates)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=str)
def test_layers_that_return_what_backward_needs(settings):
    agree(beside(Gated, adamw(), rows, **settings))


class Exponential(nn.Module):
    """An operator that is torch's alone, of a weight or of a view of it."""

    def __init__(self, turned):
        super().__init__()
        self.w, self.head, self.turned = nn.Parameter(torch.randn(6, 6) * 0.1), nn.Linear(6, 5), turned

    def forward(self, x):
        return self.head(x @ torch.matrix_exp(self.w.t() if self.turned else self.w))


@pytest.mark.parametrize("turned", [False, True])
def test_operators_of_torch_alone(turned):
    agree(beside(lambda: Exponential(turned), sgd(), rows, cross_entropy))


def mixtral(experts, aux):
    config = hf.MixtralConfig(
        **{**TEXT, "num_hidden_layers": 1},
        num_key_value_heads=2,
        num_local_experts=4,
        router_jitter_noise=0.0,
        output_router_logits=aux,
    )
    config._experts_implementation = experts
    return hf.MixtralForCausalLM(config)


@pytest.mark.parametrize("experts, aux", [("batched_mm", False), ("grouped_mm", True), ("eager", True)])
def test_mixtures_of_experts(experts, aux):
    agree(beside(lambda: mixtral(experts, aux), adamw(lr=1e-3), text))


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=str)
def test_an_encoder_and_a_decoder(settings):
    def batches(i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCAB, (4, 8), generator=g)
        return {"input_ids": ids, "labels": torch.where(torch.rand(4, 8, generator=g) < 0.4, -100, ids)}

    agree(beside(t5, adamw(lr=1e-3), batches, **settings))


def test_a_network_with_skips():
    def batches(i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(2, 3, 16, 16, generator=g), torch.randn(2, 3, 32, 32, generator=g)

    class Denoising(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = UNet()

        def forward(self, x):
            return self.net(x, torch.tensor([3, 50]))

    agree(beside(Denoising, sgd(lr=0.02), batches, F.mse_loss, steps=5))


def test_torchs_transformer():
    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 20), nn.Flatten(0, 1))

    # the gradient of the keys' bias is nothing but rounding, which a smaller eps would make steps of
    agree(beside(make, adamw(lr=1e-3, eps=1e-4), words, cross_entropy))


class Averaged(nn.Module):
    """A slow copy of the weights, and a buffer of them, both updated in forward."""

    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(6, 5), nn.Linear(6, 5).requires_grad_(False)
        self.register_buffer("sums", torch.zeros(5))

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
            self.sums.mul_(0.5).add_(self.fast.weight.sum(1))
        return self.fast(x) + 0.1 * self.slow(x) + 0.01 * self.sums


class Clamped(nn.Module):
    """Weights that forward itself holds within bounds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return self.layer(x)


class Renormed(nn.Module):
    """torch's embedding with a bound on its rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.embed(x.abs().mul(5).long().clamp(max=19)[:, 0]))


@pytest.mark.parametrize("make", [Averaged, Clamped, Renormed])
def test_updates_in_forward(make):
    agree(beside(make, sgd(), rows, cross_entropy))


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, out, y):
        return cross_entropy(out * self.heat, y) + 0.01 * self.heat.square()


def test_a_loss_that_is_trained_too():
    torch.manual_seed(0)
    pairs = [(mlp(), Tempered())]
    pairs.append(copy.deepcopy(pairs[0]))
    optimizers = [torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.1) for model, loss in pairs]
    step = mycel.train_step(pairs[0][0], optimizers[0], pairs[0][1], compile=False)
    for i in range(5):
        assert step(*rows(i)).item() == pytest.approx(
            plain_step(pairs[1][0], optimizers[1], rows(i), pairs[1][1]), rel=1e-5
        )
    torch.testing.assert_close(pairs[0][1].heat, pairs[1][1].heat)


def test_hugging_faces_own_checkpointing():
    def make():
        model = llama(num_hidden_layers=2)
        model.gradient_checkpointing_enable()
        return model

    agree(beside(make, adamw(lr=1e-3), text, steps=5))


@pytest.mark.parametrize("parts", [1, 2])
def test_one_tensor_as_inputs_and_labels(parts):
    def batches(i):
        ids = text(i)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    agree(beside(lambda: llama(num_hidden_layers=1), adamw(lr=1e-3), batches, steps=4, accumulate=parts))


def test_a_model_that_takes_any_arguments():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    agree(beside(Wrapper, sgd(), rows, cross_entropy))


def test_two_steps_over_two_optimisers():
    """An adversarial pair: each step trains one network through the other."""
    torch.manual_seed(0)
    makers = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
    )
    curves = []
    for ours in (True, False):
        maker, judge = copy.deepcopy(makers)

        def fool(generated, judge=judge):
            return F.softplus(-judge(generated)).mean()

        def tell(out, noise, maker=maker, judge=judge):
            return F.softplus(-out).mean() + F.softplus(judge(maker(noise).detach())).mean()

        optimizers = adam()(maker), adam()(judge)
        steps = (
            mycel.train_step(maker, optimizers[0], fool, compile=False),
            mycel.train_step(judge, optimizers[1], tell, compile=False),
        )
        curve = []
        for i in range(10):
            g = torch.Generator().manual_seed(i)
            noise, real = torch.randn(8, 4, generator=g), torch.randn(8, 6, generator=g)
            if ours:
                curve += [steps[1](real, noise).item(), steps[0](noise).item()]
                continue
            for optimizer, loss in (
                (optimizers[1], lambda: tell(judge(real), noise)),
                (optimizers[0], lambda: fool(maker(noise))),
            ):
                optimizer.zero_grad()
                value = loss()
                value.backward()
                optimizer.step()
                curve.append(value.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt"])
def test_adapters_of_peft(kind):
    peft = pytest.importorskip("peft")
    some = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"]}
    config = {
        "lora": lambda: peft.LoraConfig(**some, r=4, init_lora_weights=False),
        "dora": lambda: peft.LoraConfig(**some, r=4, use_dora=True),
        "ia3": lambda: peft.IA3Config(**some, feedforward_modules=["down_proj"]),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    agree(beside(lambda: peft.get_peft_model(llama(num_hidden_layers=1), config[kind]()), adamw(), text, steps=2))


# -- models that ask for values


class Squared(nn.Module):
    """A loss of whatever a model computes first."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        out = self.model(**batch)
        return next(v for v in out.values() if v is not None).square().mean()


def detr():
    """Decides in a library's code whether what the weights make of a picture is finite."""
    backbone = hf.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = hf.DetrConfig(
        **sizes, use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, num_queries=3,
        encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0,
    )  # fmt: skip
    return Squared(hf.DetrForObjectDetection(config))


def pixtral():
    """The sizes of its pictures are values of the batch."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Squared(hf.PixtralVisionModel(hf.PixtralVisionConfig(**sizes, image_size=32, patch_size=8)))


def pictures(i):
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(i))}


@pytest.mark.parametrize("make, more, signatures", [
    (detr, {}, 1),
    (pixtral, {"image_sizes": [[[32, 32], [16, 32]], [[32, 32], [32, 8]]]}, 2),
])  # fmt: skip
def test_models_that_ask_for_values(make, more, signatures):
    def batches(i):
        return {**pictures(i), **{k: torch.tensor(v[i % 2]) for k, v in more.items()}}

    pair = agree(beside(make, adamw(), batches, steps=3))
    assert len(pair.step.entries) == signatures


def test_a_mask_that_transformers_leaves_out_is_left_out():
    """PaliGemma without token types: no padding means no mask, and layers that are not causal by themselves."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = {"model_type": "gemma", "vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8}
    image = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    config = hf.PaliGemmaConfig(
        vision_config={**sizes, **image, "projection_dim": 16, "vision_use_head": False},
        text_config={**sizes, **text},
        projection_dim=16,
        image_token_index=60,
    )
    model = hf.PaliGemmaForConditionalGeneration(config).train()
    twin = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    ids = torch.cat([torch.full((2, 4), 60), torch.randint(1, 50, (2, 6))], 1)
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "labels": ids.masked_fill(ids == 60, -100)}
    for padded in (0, 2, 0, None):
        mask = torch.ones_like(ids)
        mask[0, ids.shape[1] - (padded or 0) :] = 0
        given = batch if padded is None else {**batch, "attention_mask": mask}
        loss = twin(**given).loss
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert step(**given).item() == pytest.approx(loss.item(), abs=2e-6)
