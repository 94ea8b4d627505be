"""torch.compile by blocks: what compiling took is counted, and only that."""

from __future__ import annotations

import torch
from torch import nn

from toque.models.forward.blocks import CompileSeconds, compile_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_seconds_come_with_a_shape_that_is_new():
    torch.compiler.reset()
    model = nn.Sequential(nn.ModuleList([Block()]))
    compile_blocks(model, backend="aot_eager")
    (block,) = model[0]
    seconds = CompileSeconds()
    assert seconds() == 0.0
    block(torch.ones(2, 4))
    assert seconds() > 0.0
    block(torch.ones(2, 4))
    assert seconds() == 0.0
    block(torch.ones(3, 4))
    assert seconds() > 0.0
