"""What is gathered together, where modules are taken by their size."""

from torch import nn

from paceline.parallel.fsdp import find_units


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))
        self.head = nn.Linear(8, 100)


def names(model, least):
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[unit] for unit in find_units(model, least)]


def test_modules_of_a_size_and_what_they_leave_over():
    model = Model()
    assert names(model, 500) == ["layers.0", "layers.1"], "288 + 264 parameters each"
    assert names(model, 270) == ["layers.0.0", "layers.1.0"], "what is left of a layer is too small"
    assert names(model, 200) == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]
    assert names(model, 600) == [], "a list of layers is not called, so it cannot be gathered"


def test_embedding_and_head_belong_to_the_whole_but_a_sequential_calls_all_it_holds():
    assert "head" not in names(Model(), 1)
    assert names(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), 50) == ["0"]
