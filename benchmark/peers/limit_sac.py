"""python limit_sac.py SETTING: only the matrix products that an update of SAC cannot do without,
and fused Adam. No bias, activation, layer norm, loss, autograd, sampling or target update.

17 observations and 6 actions, batch 256, an actor 17-256-256-12, critics 23-256-256-1 in stacks.
"rlpd" has 10 critics, 2 of them in a target, and one actor update per 20 critic updates, "sac" has
2 critics and one per update. A critic update is what counts.
"""

import sys
from pathlib import Path

import torch
from timing import ARGS, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import keep_freed_memory

OBS, ACTION, B, H = 17, 6, 256, 256
NUM_CRITICS, UPDATES_PER_CALL = {"sac": (2, 1), "rlpd": (10, 20)}[ARGS.algo]
keep_freed_memory()


def weights(num_members: int, input_dim: int, output_dim: int) -> list[torch.Tensor]:
    shapes = ((input_dim, H), (H, H), (H, output_dim))
    return [torch.nn.Parameter(0.05 * torch.randn(num_members, *shape)) for shape in shapes]


actor, critics, targets = (
    weights(1, OBS, 2 * ACTION),
    weights(NUM_CRITICS, OBS + ACTION, 1),
    weights(2, OBS + ACTION, 1),
)
actor_opt, critic_opt = (torch.optim.Adam(layers, 3e-4, fused=True) for layers in (actor, critics))
for parameter in (*actor, *critics):
    parameter.grad = 1e-3 * torch.randn_like(parameter)
obs, obs_action = torch.randn(1, B, OBS), torch.randn(1, B, OBS + ACTION)


def forward(layers: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    activations = [x.expand(len(layers[0]), -1, -1)]
    for weight in layers:
        activations.append(torch.bmm(activations[-1], weight))
    return activations


def backward(layers: list[torch.Tensor], activations: list[torch.Tensor], wants: str) -> None:
    """Gradients of the weights, or of the input."""
    grad = torch.ones_like(activations[-1])
    for layer in reversed(range(3)):
        if wants == "weights":
            torch.bmm(activations[layer].mT, grad)
        if layer > 0 or wants == "input":
            grad = torch.bmm(grad, layers[layer].mT)


@torch.no_grad()
def update() -> None:
    for _ in range(UPDATES_PER_CALL):
        forward(actor, obs)  # a'
        forward(targets, obs_action)  # Q'(s', a') of two
        backward(critics, forward(critics, obs_action), "weights")
        critic_opt.step()
    activations = forward(actor, obs)
    backward(critics, forward(critics, obs_action), "input")  # through the critics
    backward(actor, activations, "weights")
    actor_opt.step()


measure(update, UPDATES_PER_CALL)
