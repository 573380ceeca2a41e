"""What the run file says of a Keras model and its samples."""

from typing import ClassVar

from pydantic import model_validator

from paceline.config.sections import DataSection, ModelSection, conflict_error, field

SAVED = ".keras"


class KerasModel(ModelSection):
    """A function that returns a keras.Model, or a saved one; its loss and metrics here, or by compile()."""

    word: ClassVar[str] = "build"
    references: ClassVar[tuple[str, ...]] = ("build", "loss")

    build: str = field("", "", "function that returns the model, as file.py:function, or a saved model, as file.keras")
    arguments: dict[str, bool | int | float | str] = field({}, "", "what the function is called with, by name")
    loss: str = field("", "", "of keras.losses, or file.py:function of (y, output), per sample; empty: of compile()")
    from_logits: bool = field(False, "", "of a cross-entropy in model.loss: the model ends without softmax or sigmoid")
    metrics: tuple[str, ...] = field((), "names", "of keras.metrics, for evaluations; empty takes those of compile()")
    score: str = field("", "", "metric of the best checkpoint, -NAME where lower is better; empty: accuracy or -loss")

    @model_validator(mode="after")
    def _logits_of_a_loss(self) -> "KerasModel":
        if self.from_logits and not self.loss.endswith("crossentropy"):
            raise conflict_error(
                f"model.from_logits=true is for a cross-entropy, not for model.loss={self.loss!r}; in compile() type  "
                "loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
            )
        return self


class KerasData(DataSection):
    """Where inputs and targets come from: a function of the user's."""

    word: ClassVar[str] = "source"
    references: ClassVar[tuple[str, ...]] = ("source",)

    source: str = field(
        "", "", "function that returns (inputs, targets), as file.py:function; empty: `data` beside build"
    )
    classes: tuple[str, ...] = field((), "names", "of the classes, in the order of their numbers")
