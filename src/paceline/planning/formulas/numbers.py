"""The types in which a step is computed, kept and sent, as bytes per parameter or element."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """The types of a run, as bytes per parameter or element."""

    name: str
    matmul: str
    """Type of the matrix products, as the catalogue names its rates."""
    element_bytes: float
    weight_bytes: float
    gradient_bytes: float
    sent_bytes: float
    """Per parameter when gradients are reduced."""
    gathered_bytes: float
    """Per parameter when sharded weights are gathered."""
    state_bytes: float
    """Adam's moments, master weights, and the fp32 copy of 16-bit gradients that the update reads, per parameter."""
    cast: bool = False
    """Weights are kept in fp32 and cast for every pass (autocast)."""

    @property
    def updated_bytes(self) -> float:
        """Touched by an update, per parameter: weights and states read and written, gradients read for a norm too."""
        return 2 * (self.weight_bytes + self.state_bytes) + 3 * self.gradient_bytes


NUMBERS = {
    n.name: n
    for n in (
        Numbers("fp64", "fp64", 8, 8, 8, 8, 8, 16),
        Numbers("fp32", "fp32", 4, 4, 4, 4, 4, 8),
        Numbers("tf32", "tf32", 4, 4, 4, 4, 4, 8),
        Numbers("amp_fp16", "fp16", 2, 4, 4, 4, 2, 8, cast=True),
        Numbers("amp_bf16", "bf16", 2, 4, 4, 4, 2, 8, cast=True),
        Numbers("amp_fp8", "fp8", 2, 4, 4, 4, 2, 8, cast=True),
        Numbers("fp16", "fp16", 2, 2, 2, 2, 2, 16),
        Numbers("bf16", "bf16", 2, 2, 4, 4, 2, 12),
        Numbers("fp8", "fp8", 2, 2, 4, 4, 2, 12),
        Numbers("pure_bf16", "bf16", 2, 2, 2, 2, 2, 4),
    )
}
