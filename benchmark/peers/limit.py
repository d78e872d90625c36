"""python limit.py ALGO: only the matrix products that an update cannot do without, and fused Adam.

No bias, no activation, no loss, no autograd, no sampling. Networks as in algos/ on Pendulum: an
actor 3-256-256-2, a value 3-256-256-1, two critics 4-256-256-1; batch 256, 4 sampled actions.
"""

import sys
from pathlib import Path

import torch
from timing import ARGS, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import keep_freed_memory

B, H, M = 256, 256, 4
keep_freed_memory()


def weights(input_dim: int, output_dim: int) -> list[torch.Tensor]:
    shapes = ((input_dim, H), (H, H), (H, output_dim))
    return [0.05 * torch.randn(shape) for shape in shapes]


actor, value, critics = weights(3, 2), weights(3, 1), [weights(4, 1), weights(4, 1)]
trained = [*actor, *critics[0], *critics[1]] if ARGS.algo == "crr" else [*actor, *value]
parameters = [torch.nn.Parameter(weight) for weight in trained]
for parameter in parameters:
    parameter.grad = 1e-3 * torch.randn_like(parameter)
opt = torch.optim.Adam(parameters, 3e-4, fused=True)
obs, obs_action, candidates = torch.randn(B, 3), torch.randn(B, 4), torch.randn((1 + M) * B, 4)


def forward(layers: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    activations = [x]
    for weight in layers:
        activations.append(activations[-1] @ weight)
    return activations


def forward_backward(layers: list[torch.Tensor], x: torch.Tensor) -> None:
    activations = forward(layers, x)
    grad = torch.ones_like(activations[-1])
    for layer in reversed(range(3)):
        activations[layer].T @ grad  # of the weight
        if layer > 0:
            grad = grad @ layers[layer].T  # of the layer's input


def awr() -> None:
    forward_backward(value, obs)  # the value's loss
    forward_backward(actor, obs)  # the actor's loss


marwil = awr  # one loss for both


def crr() -> None:
    forward(actor, obs)  # a' of the target actor
    for critic in critics:
        forward(critic, obs_action)  # Q'(s', a')
        forward_backward(critic, obs_action)  # the critics' loss
        forward(critic, candidates)  # Q(s, a) and Q(s, a_j)
    forward_backward(actor, obs)  # the actor's loss


matmuls = {"awr": awr, "marwil": marwil, "crr": crr}[ARGS.algo]


@torch.no_grad()
def update() -> None:
    matmuls()
    opt.step()


measure(update)
