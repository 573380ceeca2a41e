"""What a model of the library is spared on a CUDA device: waiting for it, the logits of all tokens, and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from paceline.nn.attention import FASTEST_FIRST
from paceline.nn.chunked_loss import compute_chunked_losses
from paceline.nn.transformers_recording import patch_for_recording


@contextmanager
def make_masks_on_device(packed: bool = False) -> Iterator[None]:
    """Let the library make masks without reading values back, which a step that is recorded cannot do.

    It would ask whether a mask hides anything, and whether a row holds several texts, as it does if `packed`. Without a
    mask the faster kernel for causal attention is taken.
    """
    from transformers import masking_utils as masks

    before = masks.find_packed_sequence_indices
    if not packed:
        masks.find_packed_sequence_indices = lambda ids: None
    try:
        with patch_for_recording():
            yield
    finally:
        masks.find_packed_sequence_indices = before


PACKED = "paceline_packed"
BOUNDS = "cu_seq_lens_q"
"""Of the texts in a row, by the name that the library passes on to attention."""
MAX_DIFFERENCE = 0.05  # of the norm of logits in 16 bits, if the texts of a row do not see each other


def attend_within_texts(
    module: nn.Module, q_1HTd: Tensor, k_1HTd: Tensor, v_1HTd: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the attention of texts that lie end to end in one row."""
    bounds, longest, scale = options[BOUNDS], options["max_length_q"], options.get("scaling")
    if not q_1HTd.is_cuda:
        texts = torch.bucketize(torch.arange(q_1HTd.shape[2]), bounds[1:], right=True)
        within = texts[:, None] == texts
        found = F.scaled_dot_product_attention(q_1HTd, k_1HTd, v_1HTd, within, scale=scale, enable_gqa=True)
        return found.transpose(1, 2), None
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HTd, k_1HTd, v_1HTd))
    attend = torch.ops.aten._flash_attention_forward
    return attend(q, k, v, bounds, bounds, longest, longest, 0.0, False, False, scale=scale)[0][None], None


class PackedTexts:
    """Lets a model classify texts that lie end to end in one row, by the first token of each."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(PACKED, attend_within_texts)
        self.bounds: Tensor | None = None
        parents = (m for m in model.modules() for list_ in m.children() if blocks[0] in list_.children())
        next(parents).register_forward_hook(self._take_first_tokens)

    def _take_first_tokens(self, module: nn.Module, inputs: Any, found: Any) -> Any:
        if self.bounds is not None:
            found.last_hidden_state = found.last_hidden_state[0, self.bounds[:-1], None]
        return found

    @contextmanager
    def calling(self, model: Any, bounds: Tensor) -> Iterator[None]:
        config = getattr(model, "module", model).config
        before, config._attn_implementation = config._attn_implementation, PACKED
        self.bounds = bounds
        try:
            yield
        finally:
            config._attn_implementation, self.bounds = before, None

    def agrees(self, model: nn.Module, packed: dict[str, Any], padded: dict[str, Tensor]) -> bool:
        """Return whether the logits are those of padded texts."""
        with torch.no_grad():
            try:
                with self.calling(model, packed[BOUNDS]):
                    found = model(**packed).logits
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the library's own code, which expected a row for each text
                return False
            expected = model(**padded).logits
        found = found[: len(expected)].float()
        return found.shape == expected.shape and bool((found - expected).norm() <= MAX_DIFFERENCE * expected.norm())


def call_on_device(
    model: nn.Module, inputs: dict[str, Tensor], packing: PackedTexts | None = None, **options: Any
) -> Any:
    """Call a model of the library without padding, or with masks made on the device and the fastest attention."""
    if packing is not None and BOUNDS in inputs:
        with packing.calling(model, inputs[BOUNDS]):
            return model(**inputs, **options)
    if not next(iter(inputs.values())).is_cuda:
        return model(**inputs, **options)
    packed = "position_ids" in inputs
    with make_masks_on_device(packed):
        if packed or "attention_mask" in inputs:
            return model(**inputs, **options)
        with sdpa_kernel(FASTEST_FIRST, set_priority=True):
            return model(**inputs, **options)


def compute_losses_in_head(call: Callable[[], Any], model: Any, labels_BS: Tensor) -> Tensor | None:
    """Call a model whose head computes losses, summed per sample, in place of logits.

    None if its head is not a matrix alone, or if it does more with its logits than to return them.
    """
    head = getattr(model, "module", model).get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return None
    made: list[Tensor] = []

    def compute(x_BSD: Tensor) -> Tensor:
        made.append(compute_chunked_losses(x_BSD, head.weight, labels_BS))
        return made[-1]

    head.forward = compute
    try:
        found = call().logits
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the library's own code, which met another shape: the usual way tells whether it is that
        return None
    finally:
        del head.forward
    return made[0] if len(made) == 1 and found is made[0] else None
