"""python sheeprl_dreamer.py dreamer: a gradient step of sheeprl's DreamerV3, by the calls that its
main loop makes: a uint8 batch to float, EMA of the target critic, train(). That one updates the
world model, imagines, then updates the actor and the critic. Neither replay buffer nor logs, not
compiled (its default). One warm-up step, whose losses have to be finite.

16 sequences x 64 steps of 64 x 64 x 3 bytes, 6 discrete actions. Deterministic state 512, 16 x 16
categorical latents, 256 units everywhere, also in the RSSM. Imagination of 15 steps from all 1,024
posteriors. 3 layers in actor and critic, 1 in reward and continue, 255 bins. All of them are
settings of its own. 32-bit floats, Fabric on one CPU device, Adam (fused) for each of the three.

It is the algorithm of 2023, ours the revision of 2024 (which sheeprl has as dreamer_v3_5, with
5 x 5 convolutions of stride 1): LayerNorm, no biases before it, and a learned first state.
Its convolutions are ours: 16, 32, 64, 128 channels, 4 x 4, stride 2.
It does less: 1 layer in the prior instead of 2. No loss of the critic on replayed states.
It does more: the GRU is dense and needs 1.7 times the products of ours, which has 8 blocks. The
actor acts in the last imagined state, too, and for its loss sees 16 x 1,024 states, not 15 x 1,024,
and samples actions that nothing reads. The critic sees them once for the values and again for its
loss. Targets of two bins are dense, made from integer one-hots. The EMA goes over the parameters
one by one, and every call of a module passes through a wrapper of Fabric.
"""

import sys

import gymnasium as gym
import hydra
import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf
from sheeprl.algos.dreamer_v3.agent import build_agent
from sheeprl.algos.dreamer_v3.dreamer_v3 import train
from sheeprl.algos.dreamer_v3.utils import Moments
from sheeprl.utils.metric import MetricAggregator
from sheeprl.utils.utils import dotdict
from timing import ARGS, clock, report
from torch import nn

NUM_SEQUENCES, NUM_STEPS, NUM_ACTIONS = 16, 64, 6
SETTINGS = [
    "exp=dreamer_v3",
    "env.screen_size=64",
    "algo.cnn_keys.encoder=[rgb]",
    "algo.cnn_keys.decoder=[rgb]",
    "algo.mlp_keys.encoder=[]",
    "algo.mlp_keys.decoder=[]",
    f"algo.per_rank_batch_size={NUM_SEQUENCES}",
    f"algo.per_rank_sequence_length={NUM_STEPS}",
    "algo.horizon=15",
    "algo.dense_units=256",  # of all that do not say otherwise
    "algo.mlp_layers=1",
    "algo.actor.mlp_layers=3",
    "algo.critic.mlp_layers=3",
    "algo.critic.bins=255",
    "algo.world_model.reward_model.mlp_layers=1",
    "algo.world_model.reward_model.bins=255",
    "algo.world_model.discount_model.mlp_layers=1",
    "algo.world_model.encoder.cnn_channels_multiplier=16",
    "algo.world_model.observation_model.cnn_channels_multiplier=16",
    "algo.world_model.recurrent_model.recurrent_state_size=512",
    "algo.world_model.recurrent_model.dense_units=256",
    "algo.world_model.transition_model.hidden_size=256",
    "algo.world_model.representation_model.hidden_size=256",
    "algo.world_model.stochastic_size=16",
    "algo.world_model.discrete_size=16",
]
if ARGS.algo != "dreamer":
    raise SystemExit(f"sheeprl_dreamer.py has no setting {ARGS.algo!r}")

with hydra.initialize_config_module("sheeprl.configs", version_base="1.3"):
    composed = hydra.compose("config", SETTINGS)
cfg = dotdict(OmegaConf.to_container(composed, resolve=True))
torch.distributions.Distribution.set_default_validate_args(cfg.distribution.validate_args)  # False
torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
fabric.launch()

frames = gym.spaces.Box(0, 255, (3, 64, 64), "uint8")
world_model, actor, critic, target_critic, _ = build_agent(
    fabric, [NUM_ACTIONS], False, cfg, gym.spaces.Dict({"rgb": frames})
)


def optimizer(settings: dotdict, module: nn.Module) -> torch.optim.Optimizer:
    adam = hydra.utils.instantiate(settings, params=module.parameters(), _convert_="all")
    return fabric.setup_optimizers(adam)


world_optimizer = optimizer(cfg.algo.world_model.optimizer, world_model)
actor_optimizer = optimizer(cfg.algo.actor.optimizer, actor)
critic_optimizer = optimizer(cfg.algo.critic.optimizer, critic)
scale = cfg.algo.actor.moments
moments = Moments(scale.decay, scale.max, scale.percentile.low, scale.percentile.high)

shape = NUM_STEPS, NUM_SEQUENCES
actions = torch.randint(NUM_ACTIONS, shape)
batch = {
    "rgb": torch.randint(256, (*shape, 3, 64, 64), dtype=torch.uint8),
    "actions": nn.functional.one_hot(actions, NUM_ACTIONS),
    "rewards": torch.randn(*shape, 1),
    "terminated": torch.rand(*shape, 1) < 0.01,
    "truncated": torch.zeros(*shape, 1),
}
batch["is_first"] = batch["terminated"].roll(1, 0)


def update(tau: float = cfg.algo.critic.tau, metrics: MetricAggregator | None = None) -> None:
    data = {key: value.float() for key, value in batch.items()}
    for mine, slow in zip(critic.module.parameters(), target_critic.parameters()):
        slow.data.copy_(tau * mine.data + (1 - tau) * slow.data)
    train(
        fabric,
        world_model,
        actor,
        critic,
        target_critic,
        world_optimizer,
        actor_optimizer,
        critic_optimizer,
        data,
        metrics,
        cfg,
        False,  # not continuous
        [NUM_ACTIONS],
        moments,
    )


metrics = hydra.utils.instantiate(cfg.metric.aggregator, _convert_="all")
update(1.0, metrics)  # its main loop, too, begins with a copy of the critic
losses = metrics.compute()
MetricAggregator.disabled = True  # as with metric.log_level=0
modules = {"world model": world_model, "actor": actor, "critic": critic}
sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
print(sizes, losses, file=sys.stderr)
assert {"Loss/world_model_loss", "Loss/policy_loss", "Loss/value_loss"} <= losses.keys()
assert torch.isfinite(torch.tensor(list(losses.values()))).all()

marks = [clock()]
for _ in range(ARGS.windows):
    for _ in range(ARGS.updates):
        update()
    marks.append(clock())
assert all(p.isfinite().all() for module in modules.values() for p in module.parameters())
report(marks)
