"""Fail samples with logits that are not finite: the argmax of NaNs is an ordinary token, and would be scored.

Only the model's own logits are checked. Processors may exclude tokens with minus infinity; the model may not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.engine.model_parts import ModelParts, hooked


class NonFiniteLogits(RuntimeError):
    """The model's logits contain NaN or infinity."""

    def __init__(self, sample: str, step: int) -> None:
        """Store the sample and the number, counted from 0, of the token to be chosen from these logits."""
        super().__init__(sample, step)
        self.sample = sample
        self.step = step
        #: Origin of the values, if determined.
        self.origin = ""

    def __str__(self) -> str:
        """Return one line."""
        where = "in the prefill" if self.step == 0 else f"in decoding step {self.step}"
        begun = f"; {self.origin}" if self.origin else ""
        return f"the logits of {self.sample} hold NaN or infinity {where}{begun}"


class FiniteLogits:
    """Records on the device, step by step, whether each row's logits are finite; read once at the end.

    A sum is finite if all its terms are; it costs one pass over the last position's logits, and no synchronisation.

    Args:
        head: the module that returns logits (B, t, V).
        all_places: whether all places of a call are checked, as in a step of a canvas, and not the last alone.
    """

    def __init__(self, head: nn.Module, all_places: bool = False) -> None:
        self._sums: list[Tensor] = []
        self._all_places = all_places
        self._handle: RemovableHandle = head.register_forward_hook(self._add_sum)

    def _add_sum(self, module: nn.Module, args: Any, output: Tensor) -> None:
        places = output.flatten(1) if self._all_places else output[:, -1]
        self._sums.append(places.sum(-1, dtype=torch.float32))

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def flags(self, rows: int) -> Tensor:
        """Return on the device which logits are not finite: (rows, T), with beams a multiple of rows."""
        if not self._sums:
            return torch.zeros(rows, 0, dtype=torch.bool)
        return ~torch.stack(self._sums, 1).isfinite()

    def check(self, samples: Sequence[str], lengths: Sequence[int], non_finite: Tensor) -> None:
        """Check every step that made an answer; logits after the end of a row's answer are ignored.

        Args:
            samples: one id for each row of the batch, beams together.
            lengths: tokens of each answer; on canvases, every step counts.
            non_finite: `flags`, on the host.

        Raises:
            NonFiniteLogits: the first step of the first row that is not finite.
        """
        for sample, rows, length in zip(
            samples, non_finite.chunk(len(samples)), lengths, strict=True
        ):
            steps = (rows if self._all_places else rows[:, :length]).any(0).nonzero()
            if len(steps):
                raise NonFiniteLogits(sample, int(steps[0]))


def non_finite_origin(adapter: ModelParts, run: Callable[[], object]) -> str:
    """Run a prefill again and return a clause that names the first module with output that is not finite.

    Cost: a check of every hidden state, with a synchronisation for each.
    """
    module_names: list[str] = []

    def check_output(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and not bool(tensor.isfinite().all()):
            module_names.append(name)

    def after(name: str) -> Any:
        return lambda module, args, output: check_output(name, output)

    def before(name: str) -> Any:
        return lambda module, args, kwargs: check_output(name, (*args, *kwargs.values()))

    layers = adapter.decoder.layers
    projector = adapter.projector
    handles = [
        projector.register_forward_pre_hook(before("the vision tower"), with_kwargs=True),
        projector.register_forward_hook(after("the projector")),
        layers[0].register_forward_pre_hook(
            before("the input of decoder layer 0"), with_kwargs=True
        ),
        *(
            layer.register_forward_hook(after(f"decoder layer {number} of {len(layers)}"))
            for number, layer in enumerate(layers)
        ),
        adapter.decoder.norm.register_forward_hook(after("the norm after the decoder")),
        adapter.model.get_output_embeddings().register_forward_hook(after("the output head")),
    ]
    with hooked(handles), suppress(NonFiniteLogits):
        run()
    if not module_names:
        return "every layer of the prefill is finite"
    return f"they began in {module_names[0]}"
