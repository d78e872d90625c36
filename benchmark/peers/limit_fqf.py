"""python limit_fqf.py SETTING: only the matrix products (and convolutions) that an update of FQF
cannot do without, and fused Adam for the quantile network. No bias, activation, cosine, product of
torso and embedding, loss, autograd, sampling, target update, or optimiser of the proposal.

32 fractions. "fqf" is batch 128, torso 4-128-128, embedding 64-128, head 128-128-2 and proposal
128-32. "fqf-atari" is batch 32, the convolutions of the Nature network (4 x 84 x 84 to 3,136, of
floats, with the channels last, which is faster), embedding 64-3136, head 3136-512-4 and proposal
3136-32.

What counts: the online network at the 32 mid-points, forward and backward, and at the 31 fractions
between them, forward only, for the gradient of the fractions; the target network at the next
state's 32 mid-points; the proposal for both states, and the gradient of its weights.
"""

import sys
from pathlib import Path

import torch
from timing import ARGS, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import keep_freed_memory

N, COSINES = 32, 64
if ARGS.algo == "fqf":
    B, FEATURES, HIDDEN, ACTIONS, OBS = 128, 128, 128, 2, (4,)
    TORSO = [(128, 4), (128, 128)]
elif ARGS.algo == "fqf-atari":
    B, FEATURES, HIDDEN, ACTIONS, OBS = 32, 3136, 512, 4, (4, 84, 84)
    TORSO = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
else:
    raise SystemExit(f"limit_fqf.py has no setting {ARGS.algo!r}")
STRIDES = (4, 2, 1)  # of the convolutions
keep_freed_memory()


def random(*shape: int) -> torch.Tensor:
    x = 0.05 * torch.randn(shape)
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


def weights(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Outputs first, as in torch.nn.Linear, which is faster for the thin last layer."""
    return [torch.nn.Parameter(random(*shape)) for shape in shapes]


def forward(layers: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    activations = [x]
    for i, weight in enumerate(layers):
        x = torch.conv2d(x, weight, stride=STRIDES[i]) if weight.ndim == 4 else x @ weight.T
        activations.append(x)
    return activations


def backward(layers: list[torch.Tensor], activations: list[torch.Tensor], to_input: bool) -> None:
    """Gradients of the weights and, if wanted, of the input."""
    grad = torch.ones_like(activations[-1])
    for i in reversed(range(len(layers))):
        x, weight, goes_on = activations[i], layers[i], to_input or i > 0
        if weight.ndim == 4:
            stride, wants = 2 * [STRIDES[i]], [goes_on, True, False]
            grad, *_ = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, [0, 0], [1, 1], False, [0, 0], 1, wants
            )
        else:
            torch.mm(grad.T, x)
            grad = grad @ weight if goes_on else None


(torso, target_torso), (embedding, target_embedding), (head, target_head) = (
    (weights(shapes), weights(shapes))
    for shapes in (TORSO, [(FEATURES, COSINES)], [(HIDDEN, FEATURES), (ACTIONS, HIDDEN)])
)
proposal = weights([(N, FEATURES)])
learned = [*torso, *embedding, *head]
for parameter in learned:
    parameter.grad = 1e-3 * torch.randn_like(parameter)
optimiser = torch.optim.Adam(learned, 5e-5, fused=True)

obs, next_obs = random(B, *OBS), random(B, *OBS)
cosines, next_cosines = random(B * N, COSINES), random(B * N, COSINES)  # of the mid-points
cosines_between = random(B * (N - 1), COSINES)


@torch.no_grad()
def update() -> None:
    next_features = forward(target_torso, next_obs)[-1].flatten(1)
    forward(proposal, next_features)
    forward(target_head, forward(target_embedding, next_cosines)[-1])  # the targets

    features = forward(torso, obs)
    backward(proposal, forward(proposal, features[-1].flatten(1)), to_input=False)
    embedded = forward(embedding, cosines)
    quantiles = forward(head, embedded[-1])
    forward(head, forward(embedding, cosines_between)[-1])  # for the gradient of the fractions

    backward(head, quantiles, to_input=True)
    backward(embedding, embedded, to_input=False)
    backward(torso, features, to_input=False)
    optimiser.step()


measure(update)
