"""A Keras model as a plain torch module: every weight once, under its Keras name.

Keras names weights twice, counts statistics and generators as parameters, and ignores torch's `training`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import invalid_workload
from paceline.nn.batch_norm import NORMS, GroupedBatchNorm, GroupedBatchNorm1d
from paceline.nn.keras_backend import import_keras
from paceline.nn.keyed_dropout import PASS, SITE, Site

keras = import_keras()
SEED_STATE = "seed_generator_state"
MAX_SEED = 1 << 30


@contextmanager
def reset_keras_names(seed: int) -> Iterator[None]:
    """Give a model that is built here the same names and weights each time."""
    from keras.src.utils.naming import reset_uids

    reset_uids()
    with keras.device("cpu"):
        keras.utils.set_random_seed(seed)
        yield


def use_device_of(tensor: Tensor) -> Any:
    """Let Keras compute where this tensor is; else it takes the first CUDA device."""
    return keras.device(str(tensor.device))


def list_layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


class KerasModule(nn.Module):
    """Called as the Keras model is, which also answers other attributes."""

    original: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        buffers = [name for name, _ in model.named_buffers()]
        if buffers or not model.built or not model.variables:
            lost = f"a torch buffer, {buffers[0]}, which Keras would lose" if buffers else ""
            lost = lost or "no weights; call  model.build(shape)"
            raise invalid_workload("model", f"the Keras model {model.name!r} has {lost}")
        dropouts = list(filter(_is_dropout, list_layers(model)))
        norms = [layer for layer in list_layers(model) if type(layer) is keras.layers.BatchNormalization]
        self.__dict__["original"] = model  # beside torch's registration
        self.statistics: dict[str, Any] = {}
        self.generators: list[Any] = []
        self.of_dropout = {id(layer.seed_generator.state) for layer in dropouts}
        trained = {id(variable) for layer in list_layers(model) for variable in layer._trainable_variables}
        for variable in model.variables:
            if variable.name == SEED_STATE:
                self.generators.append(variable)
                continue
            name = self._free_name(variable.path.removeprefix(f"{model.name}/").replace(".", "_"))
            if id(variable) in trained:  # or was, before it was frozen
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.detach())
                self.statistics[name] = variable
        setattr(self, SITE, [Site(layer.name) for layer in dropouts])
        for layer, site in zip(dropouts, getattr(self, SITE), strict=True):
            layer.call = _make_keyed(layer, site)
        self.__dict__[NORMS] = [_group_statistics(layer) for layer in norms if not layer.renorm]

    def _free_name(self, name: str) -> str:
        taken = self._parameters.keys() | self._buffers.keys()
        return name if name not in taken else next(n for i in range(1, 1 << 20) if (n := f"{name}_{i}") not in taken)

    def forward(self, *inputs: Any, penalised: bool = False, **options: Any) -> Any:
        """Return the outputs; `penalised`: and the sum of regularisation losses."""
        options.setdefault("training", self.training)
        if options["training"]:
            self._seed_generators(keyed=PASS.samples > 0)
        with use_device_of(next(self.parameters())):
            outputs = self.original(*inputs, **options)
            return (outputs, sum(self.original.losses)) if penalised else outputs

    def _seed_generators(self, keyed: bool) -> None:
        """Seed them from torch's generator, which has the seed of the step, the rank and the pass."""
        from keras.src.random.seed_generator import global_seed_generator

        seed = torch.initial_seed()
        for place, state in enumerate([global_seed_generator().state, *self.generators]):
            if not (keyed and id(state) in self.of_dropout):
                state.value.data.copy_(torch.tensor([(seed + place) % MAX_SEED, 0]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KerasModule":
        """Give Keras the moved buffers; parameters stay the objects that it knows."""
        super()._apply(fn, recurse)
        for name, variable in self.statistics.items():
            variable.value.data = self._buffers[name]
        for state in self.generators:
            state.value.data = fn(state.value.data)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


def _is_dropout(layer: Any) -> bool:
    ours = isinstance(layer, keras.layers.Dropout) and type(layer).__module__.startswith("keras.")
    return ours and 0 < layer.rate < 1


def _make_keyed(layer: Any, site: Site) -> Callable[..., Any]:
    """Return the call of a Dropout that draws each sample's mask from its key, if there are keys."""

    def call(inputs: Tensor, training: bool = False) -> Tensor:
        spatial = getattr(layer, "_get_noise_shape", None)
        wanted = spatial(inputs) if spatial else layer.noise_shape or inputs.shape
        shape = [there if size is None else size for size, there in zip(wanted, inputs.shape, strict=True)]
        kept = site.draw_kept(shape, layer.rate) if training and site.start is not None else None
        if kept is None:
            return type(layer).call(layer, inputs, training=training)
        return torch.where(kept, inputs * (1 / (1 - layer.rate)), 0)

    return call


def _group_statistics(layer: Any) -> GroupedBatchNorm:
    """Let a BatchNormalization take its statistics from groups, once the returned norm has one."""
    norm = GroupedBatchNorm1d(layer.moving_mean.shape[0], layer.epsilon, 1 - layer.momentum, affine=False)
    norm.name, norm.group = layer.name, 0

    def call(inputs: Tensor, training: bool = False, mask: Any = None) -> Tensor:
        norm.running_mean, norm.running_var = layer.moving_mean.value.data, layer.moving_variance.value.data
        if not (training and layer.trainable and norm.group and PASS.samples) or mask is not None:
            return type(layer).call(layer, inputs, training=training, mask=mask)
        x = inputs.to(torch.promote_types(inputs.dtype, torch.float32)).movedim(layer.axis, 1)
        before = len(norm.found)
        found = norm(x.flatten(2) if x.ndim > 2 else x).reshape(x.shape).movedim(1, layer.axis)
        each = x[0, 0].numel()  # Keras keeps the variance as it is, torch an unbiased one
        shrink = ((part, part.new_tensor([[1.0], [1 - 1 / (rows * each)]]), rows) for part, rows in norm.found[before:])
        norm.found = (*norm.found[:before], *((part * by, rows) for part, by, rows in shrink))
        shape = [size if axis == layer.axis % x.ndim else 1 for axis, size in enumerate(inputs.shape)]
        if layer.scale:
            found = found * layer.gamma.value.view(shape)
        if layer.center:
            found = found + layer.beta.value.view(shape)
        return found.to(inputs.dtype)

    layer.call = call
    return norm
