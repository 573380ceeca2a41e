"""A model of the user's own under sharded layouts: weights from any generator, buffers, frozen and odd shapes."""

import textwrap

import pytest
from layout_rows import parts_after

from paceline import train
from paceline.config import build_spec
from paceline.launch.local import run_ranks
from paceline.layout import parse_layout
from paceline.trials.check import check
from results import check_holds, expect_error

pytestmark = pytest.mark.usefixtures("warm_ranks")

OWN = """
import numpy as np, torch
from torch import nn
from paceline import Workload

X = torch.randn(101, 6, generator=torch.Generator().manual_seed(0))

class Rows:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def cost(self, ids): return np.ones(len(ids))
    def batch(self, ids, keys): return X[ids]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)
        self.register_buffer("shift", torch.rand(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.shift += float(np.random.default_rng().normal())
        draw = np.random.default_rng()  # another one in every process
        with torch.no_grad():
            for p in self.parameters():
                if p.requires_grad:
                    p.copy_(torch.as_tensor(draw.normal(size=p.shape), dtype=p.dtype) * 0.3)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x + self.shift)) * self.frozen
        return self.out(x)[:, 0]

class Own(Workload):
    def model(self): return Net()
    def data(self, split): return Rows(101 if split == "train" else 7)
    def loss(self, model, x):
        return ((model(x) - x.sum(1)) ** 2).sum(), len(x)

class Same(Own):
    def model(self):
        torch.manual_seed(0)
        net = Net()
        net.shift.fill_(1.0)
        with torch.no_grad():
            for p in net.parameters():
                if p.requires_grad:
                    p.normal_(std=0.3)
        return net
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(textwrap.dedent(OWN))
    train, parallel = {"steps": 6, "global_batch": 13, "lr": 1e-2}, {"threads": 1, "timeout_s": 120}
    return lambda kind: build_spec({"workload": f"{file}:{kind}", "train": train, "parallel": parallel})


def test_any_model_can_be_sharded(own):
    check_holds(own("Same"), layouts=["single", "zero1:3", "zero2:2", "fsdp:3", "hsdp:2x2", "fsdp:1"], steps=6)


ENCODER = """
import torch, torch.nn.functional as F
from torch import nn
from paceline import Workload

X = torch.randint(0, 97, (64, 12), generator=torch.Generator().manual_seed(0))

class Net(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        kinds = (nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(kinds if linear else (nn.Conv1d(12, 12, 3, padding=1) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 1)
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))[:, 0]

class Own(Workload):
    linear = True
    def model(self): return Net(self.linear)
    def data(self, split): return X if split == "train" else X[:16]
    def loss(self, model, x):
        return F.mse_loss(model(x), x.float().mean(1) / 50 - 1, reduction="sum"), len(x)

class Convolutions(Own):
    linear = False

class Alone(Own):
    def model(self): return nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(384, 1), nn.Flatten(0))

class Scaled(Own):
    "Gradients that a stage sends back are twice as large."
    def loss(self, model, x):
        from paceline.parallel.pipeline_inference import InferredPipeline
        if not hasattr(self, "hooked") and isinstance(model, InferredPipeline):
            double = lambda _, given: (2 * given[0] - given[0].detach(),)
            self.hooked = model.layers[2].register_forward_pre_hook(double)
        return super().loss(model, x)

class Averaged(Own):
    "Gradients of shards are averaged where they should be summed."
    def loss(self, model, x):
        from torch.distributed.fsdp import FSDPModule
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
        return super().loss(model, x)

class Kept(Own):
    "One of the ranks adds nothing to the gradient of a layer."
    def loss(self, model, x):
        import torch.distributed as dist
        weight = dict(model.named_parameters()).get("module.norm.weight")
        if weight is not None and dist.get_rank() and not weight._backward_hooks:
            weight.register_hook(lambda gradient: gradient * 0)
        return super().loss(model, x)

class Unsummed(Own):
    "Half of the gradient of a bias that every rank holds."
    def loss(self, model, x):
        from torch.distributed.tensor import DTensor
        for layer in model.layers:
            if isinstance(layer.linear2.bias, DTensor) and not layer.linear2.bias._backward_hooks:
                layer.linear2.bias.register_hook(lambda gradient: gradient / 2)
        return super().loss(model, x)
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    file = tmp_path_factory.mktemp("encoder") / "encoder.py"
    file.write_text(textwrap.dedent(ENCODER))
    train, parallel = {"steps": 4, "global_batch": 8, "lr": 1e-3}, {"threads": 1, "timeout_s": 120}
    return lambda kind: build_spec({"workload": f"{file}:{kind}", "train": train, "parallel": parallel})


@pytest.mark.parametrize(
    ("precision", "layouts"),
    [
        ("fp32", ["tensor:2", "pipeline:2", "fsdp:2+pipeline:2:gpipe", "tensor:2+pipeline:2"]),
        ("bf16", ["tensor:4", "pipeline:4"]),
    ],
)
def test_a_model_without_rules_is_divided_by_those_that_are_found(encoder, precision, layouts):
    """Attention, dropout and norms of torch's own layers among them."""
    check_holds(encoder("Own").replace({"train.precision": precision}), layouts=["single", *layouts], steps=3)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [("Kept", "ddp:2"), ("Averaged", "fsdp:2"), ("Unsummed", "tensor:2"), ("Scaled", "pipeline:2")],
)
def test_check_finds_a_wrong_gradient(encoder, fault, layout):
    parity = check(encoder(fault), layouts=["single", layout], steps=2)
    assert not parity.holds
    assert parity.rows[1].grad_norm > 1e-3


@pytest.mark.parametrize(
    ("kind", "layout", "code", "key"),
    [
        ("Own", "tensor:3", "conflict", "tensor"),
        ("Own", "tensor:8", "conflict", "tensor"),
        ("Own", "tensor:2+sequence", "conflict", "tensor"),
        ("Convolutions", "tensor:2", "not-supported", "tensor"),
        ("Alone", "tensor:2", "not-supported", "tensor"),
        ("Own", "pipeline:5", "not-supported", "pipeline"),
        ("Own", "pipeline:2:interleaved", "not-supported", "pipeline"),
        ("Alone", "pipeline:2", "not-supported", "pipeline"),
    ],
)
def test_what_cannot_be_divided_is_rejected_before_ranks_start(encoder, kind, layout, code, key, tmp_path):
    spec = encoder(kind).replace({f"parallel.{name}": value for name, value in parse_layout(layout).items()})
    with expect_error(code, f"parallel.{key}"):
        train(spec, tmp_path, show=False)
    assert not any(tmp_path.iterdir())


def test_ranks_that_draw_other_weights_do_not_start_and_copies_of_a_group_stay_one_model(own, tmp_path):
    changes = {"parallel.strategy": "hsdp", "parallel.ranks": 4, "train.steps": 3}
    with expect_error("conflict", "model"):
        train(own("Own").replace(changes), tmp_path, show=False)
    held = run_ranks(parts_after, (own("Same").replace(changes),), 4)
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert held[0] != held[1]
