"""A Keras model as a plain torch module: every weight once, under its Keras name.

Keras names weights twice, counts statistics and generators as parameters, and ignores torch's `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.nn.attention import hash32
from paceline.nn.keras_backend import import_keras

keras = import_keras()
SEED_STATE = "seed_generator_state"
MAX_SEED = 1 << 30


@contextmanager
def reset_keras_names(seed: int) -> Iterator[None]:
    """Give a model that is built here the same names and first weights, however many were built before."""
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
    """Called as the Keras model is, which also answers other attributes, such as `layers` or `save`.

    `keys`, one number per sample, make its Dropout independent of the layout.
    """

    original: Any
    keys: Tensor | None

    def __init__(self, model: Any) -> None:
        super().__init__()
        buffers = [name for name, _ in model.named_buffers()]
        if buffers or not model.built or not model.variables:
            lost = f"a torch buffer, {buffers[0]}, which Keras would lose" if buffers else ""
            message = f"workload: the Keras model {model.name!r} has {lost or 'no weights; call  model.build(shape)'}"
            raise UserError(message, code="invalid-workload", key="model")
        dropouts = list(filter(_is_dropout, list_layers(model)))
        self.__dict__.update(original=model, keys=None)  # beside torch's registration
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
        for place, layer in enumerate(dropouts):
            layer.call = _keyed(layer, place, self)

    def _free_name(self, name: str) -> str:
        taken = self._parameters.keys() | self._buffers.keys()
        return name if name not in taken else next(n for i in range(1, 1 << 20) if (n := f"{name}_{i}") not in taken)

    def forward(self, *inputs: Any, keys: Tensor | None = None, penalised: bool = False, **options: Any) -> Any:
        """Return the outputs; `penalised`: and the sum of regularisation losses."""
        options.setdefault("training", self.training)
        if options["training"]:
            self._seed_generators(keyed=keys is not None)
        self.__dict__["keys"] = keys
        try:
            with use_device_of(next(self.parameters())):
                outputs = self.original(*inputs, **options)
                return (outputs, sum(self.original.losses)) if penalised else outputs
        finally:
            self.__dict__["keys"] = None

    def _seed_generators(self, keyed: bool) -> None:
        """Seed them from torch's generator, which has the seed of the step, the rank and the pass."""
        from keras.src.random.seed_generator import global_seed_generator

        seed = torch.initial_seed()
        for place, state in enumerate([global_seed_generator().state, *self.generators]):
            if not (keyed and id(state) in self.of_dropout):
                state.value.data.copy_(torch.tensor([(seed + place) % MAX_SEED, 0]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KerasModule:
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


def _keyed(layer: Any, place: int, module: KerasModule) -> Callable[..., Any]:
    """Return the call of a Dropout that draws each sample's mask from its key, if there are keys."""

    def call(inputs: Tensor, training: bool = False) -> Tensor:
        keys = module.keys
        spatial = getattr(layer, "_get_noise_shape", None)
        wanted = spatial(inputs) if spatial else layer.noise_shape or inputs.shape
        shape = torch.Size(there if size is None else size for size, there in zip(wanted, inputs.shape, strict=True))
        if not training or keys is None or shape[0] != len(keys):
            return type(layer).call(layer, inputs, training=training)
        rows = hash32(((keys + (place + 1) * 0x85EBCA77) & 0xFFFFFFFF).to(torch.int32))
        columns = torch.arange(shape[1:].numel(), device=inputs.device, dtype=torch.int32) * -0x61C88647
        noise = hash32(rows[:, None] + columns).view(shape)
        return torch.where(noise < int((layer.rate - 0.5) * 2**32), 0, inputs * (1 / (1 - layer.rate)))

    return call
