"""python limit_mbpo.py SETTING: only the matrix products that a piece of MBPO cannot do without,
and fused Adam. No bias, activation, loss, autograd, sampling, buffer, normaliser or target update.

17 observations and 6 actions. "mbpo-model" is a step of 7 members 23-200-200-200-200-36, 256 rows
each. "mbpo-rollout" is one transition of 10,000 in a call: an actor 17-256-256-12 for all of them,
then 5 members for 2,000 each. "mbpo-sac" is an update of that actor and of 2 critics 23-256-256-1
in a stack, batch 256.
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from timing import ARGS, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import keep_freed_memory

OBS, ACTION, B, ROLLOUTS = 17, 6, 256, 10_000
MEMBERS, ELITES = 7, 5
keep_freed_memory()


def weights(num_members: int, *dims: int) -> list[torch.Tensor]:
    return [torch.nn.Parameter(0.05 * torch.randn(num_members, *shape)) for shape in pairwise(dims)]


def adam(layers: list[torch.Tensor], learning_rate: float) -> torch.optim.Adam:
    for parameter in layers:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return torch.optim.Adam(layers, learning_rate, fused=True)


def forward(layers: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    activations = [x.expand(len(layers[0]), -1, -1)]
    for weight in layers:
        activations.append(torch.bmm(activations[-1], weight))
    return activations


def backward(layers: list[torch.Tensor], activations: list[torch.Tensor], wants: str) -> None:
    """Gradients of the weights, or of the input."""
    grad = torch.ones_like(activations[-1])
    for layer in reversed(range(len(layers))):
        if wants == "weights":
            torch.bmm(activations[layer].mT, grad)
        if layer > 0 or wants == "input":
            grad = torch.bmm(grad, layers[layer].mT)


def model_layers(num_members: int) -> list[torch.Tensor]:
    return weights(num_members, OBS + ACTION, *4 * [200], 2 * (OBS + 1))


actor = weights(1, OBS, 256, 256, 2 * ACTION)

if ARGS.algo == "mbpo-model":
    model, obs_action = model_layers(MEMBERS), torch.randn(MEMBERS, B, OBS + ACTION)
    model_opt = adam(model, 1e-3)

    @torch.no_grad()
    def update() -> None:
        backward(model, forward(model, obs_action), "weights")
        model_opt.step()

    measure(update)
elif ARGS.algo == "mbpo-rollout":
    elites, obs = model_layers(ELITES), torch.randn(1, ROLLOUTS, OBS)
    obs_action = torch.randn(ELITES, ROLLOUTS // ELITES, OBS + ACTION)

    @torch.no_grad()
    def update() -> None:
        forward(actor, obs)
        forward(elites, obs_action)

    measure(update, ROLLOUTS)
elif ARGS.algo == "mbpo-sac":
    critics, targets = (weights(2, OBS + ACTION, 256, 256, 1) for _ in range(2))
    actor_opt, critic_opt = adam(actor, 3e-4), adam(critics, 3e-4)
    obs, obs_action = torch.randn(1, B, OBS), torch.randn(1, B, OBS + ACTION)

    @torch.no_grad()
    def update() -> None:
        forward(actor, obs)  # a'
        forward(targets, obs_action)  # Q'(s', a')
        backward(critics, forward(critics, obs_action), "weights")
        critic_opt.step()
        activations = forward(actor, obs)
        backward(critics, forward(critics, obs_action), "input")  # through the critics
        backward(actor, activations, "weights")
        actor_opt.step()

    measure(update)
else:
    raise SystemExit(f"limit_mbpo.py has no setting {ARGS.algo!r}")
