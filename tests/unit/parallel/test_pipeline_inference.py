"""What is found out about a model by running it once: who computes from whom, and what stages send each other."""

import torch
from torch import nn

from paceline.config import build_spec
from paceline.layout import layout_of
from paceline.parallel.dataflow import Dataflow
from paceline.parallel.pipeline_inference import infer_stages
from paceline.workloads.unet.standalone import ExportedUNet


class Images:
    def blocks(self, net):
        return [*net.down, *net.join]

    def has(self, method):
        return False

    def loss(self, model, images):
        return model(images).square().sum(), len(images)


def test_stages_of_a_unet_send_on_what_later_ones_join():
    net = ExportedUNet({"width": 4, "depth": 2, "norm": "group", "channels": 1, "classes": range(3)})
    layout = layout_of(build_spec({"workload": "unet", "parallel": {"ranks": 5, "pipeline": 5}}))
    cut = infer_stages(Images(), net, torch.zeros(2, 1, 16, 16), layout)
    assert [call.name for call in cut.calls] == [
        *("down.0", "down.1", "down.2", "up.0", "join.0", "up.1", "join.1", "head", "the output")
    ]
    assert list(cut.stages) == [0, 1, 2, 3, 3, 4, 4, 4, 4]
    names = [{cut.calls[leaf[0]].name for leaf in leaves} for leaves in cut.messages]
    assert names == [{"down.0"}, {"down.0", "down.1"}, {"down.0", "down.1", "down.2"}, {"down.0", "join.0"}]
    assert [cut.held_by(stage) for stage in (0, 3, 4)] == [
        {"down.0"},
        {"up.0", "join.0"},
        {"up.1", "join.1", "head", "the output"},
    ]


def test_origins_follow_what_is_computed_detached_and_written():
    flow, x, y = Dataflow(), torch.ones(3), torch.zeros(3)
    flow.mark(x, lambda *_: frozenset({"x"}))
    with flow:
        y[1:] = (2 * x).detach()[1:]
        z = torch.stack([y, torch.ones(3)]).argmax(0)
    assert flow.of(z) == {"x"}
    assert flow.of(torch.ones(3)) == frozenset()


def test_a_model_that_calls_its_layers_in_another_order_is_cut_in_that_order():
    net = nn.Module()
    net.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    net.forward = lambda x: net.layers[0](net.layers[1](x))
    work = Images()
    work.blocks = lambda model: list(model.layers)
    layout = layout_of(build_spec({"workload": "unet", "parallel": {"ranks": 2, "pipeline": 2}}))
    cut = infer_stages(work, net, torch.ones(2, 4), layout)
    assert [cut.held_by(stage) for stage in (0, 1)] == [{"layers.1"}, {"layers.0", "the output"}]
