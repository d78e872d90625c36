"""python limit_dreamer.py dreamer: only the matrix products and convolutions that an update of
Dreamer cannot do without, and fused Adam. No bias, norm, activation, sampling, loss or autograd.

The sizes are those of ours_dreamer.py. Products of the recurrent state follow each other, 16 rows
at a time for 64 steps when it sees, 1,024 rows for 15 steps when it imagines; all others are made
at once. Backward there are two products for each one forward, but none through what is
imagined: actor and critic alone, and no gradient of their input.
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from timing import ARGS, clock, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import keep_freed_memory

if ARGS.algo != "dreamer":
    raise SystemExit(f"limit_dreamer.py has no setting {ARGS.algo!r}")
B, T, H, D, Z, UNITS, ACTIONS, BINS, BLOCKS = 16, 64, 15, 512, 256, 256, 6, 255, 8
N, FEATURES, EMBED = B * T, D + Z, 4 * 4 * 128
keep_freed_memory()


def weight(*shape: int) -> torch.nn.Parameter:
    x = 0.05 * torch.randn(shape)
    x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    return torch.nn.Parameter(x)


def mlp(*widths: int) -> list[torch.nn.Parameter]:
    return [weight(outer, inner) for inner, outer in pairwise(widths)]


GRU = [weight(UNITS, D), weight(UNITS, Z), weight(D, 3 * UNITS)]  # from h, from z, mixed
BLOCK = [weight(BLOCKS, D // BLOCKS, D // BLOCKS), weight(BLOCKS, D // BLOCKS, 3 * D // BLOCKS)]
POSTERIOR = [weight(UNITS, D), weight(Z, UNITS)]
FROM_ACTION, POSTERIOR_EMBED = mlp(ACTIONS, UNITS), mlp(EMBED, UNITS)
PRIOR = mlp(D, UNITS, UNITS, Z)
REWARD, CONTINUE = mlp(FEATURES, UNITS, BINS), mlp(FEATURES, UNITS, 1)
DECODER_INPUT = mlp(FEATURES, EMBED)
ACTOR, CRITIC = (mlp(FEATURES, UNITS, UNITS, UNITS, out) for out in (ACTIONS, BINS))
CHANNELS = (3, 16, 32, 64, 128)
ENCODER = [weight(outer, inner, 4, 4) for inner, outer in pairwise(CHANNELS)]
DECODER = [weight(inner, outer, 4, 4) for outer, inner in pairwise(CHANNELS)][::-1]
trained = [*GRU, *BLOCK, *POSTERIOR, *FROM_ACTION, *POSTERIOR_EMBED, *PRIOR, *REWARD, *CONTINUE]
trained += [*DECODER_INPUT, *ACTOR, *CRITIC, *ENCODER, *DECODER]
opt = torch.optim.Adam(trained, 1e-4, fused=True)
for parameter in trained:
    parameter.grad = torch.zeros_like(parameter)


def dense(layers: list, rows: int, backward: bool, to_input: bool = True, times: int = 1) -> None:
    """Every layer on inputs of its own width: a product forward, one or two backward."""
    inputs = [torch.ones(rows, layer.shape[1]) for layer in layers]
    for _ in range(times):
        for layer, x in zip(layers, inputs):
            x @ layer.T
    for _ in range(times if backward else 0):
        for i, (layer, x) in enumerate(zip(layers, inputs)):
            grad = torch.ones(rows, layer.shape[0])
            grad.T @ x
            if to_input or i > 0:
                grad @ layer


def blocks(rows: int, backward: bool, times: int) -> None:
    inputs = torch.ones(BLOCKS, rows, D // BLOCKS)
    for _ in range(times):
        for layer in BLOCK:
            out = torch.bmm(inputs, layer)
            if backward:
                torch.bmm(inputs.transpose(1, 2), out)
                torch.bmm(out, layer.transpose(1, 2))


def convolutions(layers: list, side: int, transposed: bool) -> None:
    for i, layer in enumerate(layers):
        x = torch.ones(N, layer.shape[0 if transposed else 1], side, side)
        x = x.to(memory_format=torch.channels_last)
        if transposed:
            out = torch.conv_transpose2d(x, layer, stride=2, padding=1)
        else:
            out = torch.conv2d(x, layer, stride=2, padding=1)
        needs = [transposed or i > 0, True, False]  # the gradient of an image is not needed
        torch.ops.aten.convolution_backward(
            out, x, layer, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1, needs
        )
        side = side * 2 if transposed else side // 2


@torch.no_grad()
def update() -> None:
    convolutions(ENCODER, 64, transposed=False)
    for layers in (FROM_ACTION, POSTERIOR_EMBED, PRIOR, REWARD, CONTINUE, DECODER_INPUT):
        dense(layers, N, backward=True)
    dense([*GRU, *POSTERIOR], B, backward=True, times=T)
    blocks(B, backward=True, times=T)
    convolutions(DECODER, 4, transposed=True)
    dense([*GRU, *FROM_ACTION, *PRIOR, *ACTOR], N, backward=False, times=H)
    blocks(N, backward=False, times=H)
    for layers in (REWARD, CONTINUE):
        dense(layers, N * (H + 1), backward=False)
    dense(CRITIC, N * H, backward=False)  # the slow one
    dense(CRITIC, N * (H + 1), backward=True, to_input=False)
    dense(ACTOR, N * H, backward=True, to_input=False)
    opt.step()


update()  # an update takes seconds: one is enough to warm up
marks = [clock()]
for _ in range(ARGS.windows):
    for _ in range(ARGS.updates):
        update()
    marks.append(clock())
report(marks)
