"""python mbrl_mbpo.py SETTING: a piece of mbrl's MBPO, by the calls that its train() makes, with
its numpy replay buffers of 100,000 rows; no environment, no output of the logs. 17 observations and
6 actions. Its configuration for HalfCheetah, but for what is said here.

"mbpo-model": a step of its ensemble, 7 x 4 x 200 with SiLU, 256 rows of its bootstrap iterator per
member, without the evaluation on the 20% that it holds out. As configured, the bounds of the
log-variances are constants. It also computes the norm of the gradients, which nothing reads.
"mbpo-rollout": one transition of 10,000 in a call, one step from each start, into the model's
buffer, 5 elites. It deals the rows out evenly at random, so that one member computes each of them.
"mbpo-sac": an update of actor, 2 critics, temperature and targets, 2 x 256 (configured: 512), batch
256, all of it from the model's buffer (configured, too), with the records of its logger.

Buffers and normaliser have single precision, the default of its classes: configured is double,
which takes up to 2% longer.
"""

import math
import tempfile

import gymnasium as gym
import numpy as np
import torch
from mbrl.algorithms.mbpo import rollout_model_and_populate_sac_buffer
from mbrl.env.termination_fns import no_termination
from mbrl.models import GaussianMLP, ModelEnv, ModelTrainer, OneDTransitionRewardModel
from mbrl.planning.sac_wrapper import SACAgent
from mbrl.third_party.pytorch_sac_pranz24 import SAC
from mbrl.util import Logger, ReplayBuffer
from mbrl.util.common import get_basic_buffer_iterators
from omegaconf import OmegaConf
from timing import ARGS, measure

OBS, ACTION, ROWS, ROLLOUTS = 17, 6, 100_000, 10_000
torch.manual_seed(0)
rng = np.random.default_rng(0)


class Spaces(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,))
    action_space = gym.spaces.Box(-1, 1, (ACTION,))


def full_buffer() -> ReplayBuffer:
    buffer = ReplayBuffer(ROWS, (OBS,), (ACTION,), rng=rng)
    obs = rng.standard_normal((ROWS + 1, OBS), dtype=np.float32)
    action = rng.uniform(-1, 1, (ROWS, ACTION)).astype(np.float32)
    never = np.zeros(ROWS, dtype=bool)
    buffer.add_batch(obs[:-1], action, obs[1:], -rng.random(ROWS), never, never)
    return buffer


replay_buffer, model_buffer = full_buffer(), full_buffer()
model = OneDTransitionRewardModel(
    GaussianMLP(
        in_size=OBS + ACTION,
        out_size=OBS + 1,
        device="cpu",
        num_layers=4,  # hidden ones
        ensemble_size=7,
        hid_size=200,
        propagation_method="random_model",
        activation_fn_cfg={"_target_": "torch.nn.SiLU"},
    ),
    target_is_delta=True,
    normalize=True,
    num_elites=5,
)
model.update_normalizer(replay_buffer.get_all())
sac = SAC(
    num_inputs=OBS,
    action_space=Spaces.action_space,
    args=OmegaConf.create(
        {
            "gamma": 0.99,
            "tau": 0.005,
            "alpha": 0.2,
            "policy": "Gaussian",
            "target_update_interval": 1,
            "automatic_entropy_tuning": True,
            "target_entropy": -1,
            "hidden_size": 256,
            "device": "cpu",
            "lr": 3e-4,
        }
    ),
)

if ARGS.algo == "mbpo-model":
    trainer = ModelTrainer(model, optim_lr=1e-3, weight_decay=1e-5)
    train_rows, _ = get_basic_buffer_iterators(
        replay_buffer, batch_size=256, val_ratio=0.2, ensemble_size=7, shuffle_each_epoch=True
    )

    def epochs():
        while True:
            yield from train_rows  # in a new order each time

    batches = epochs()

    def update() -> None:
        loss, _ = model.update(next(batches), trainer.optimizer)
        assert math.isfinite(loss)

    measure(update)
elif ARGS.algo == "mbpo-rollout":
    model.set_elite(range(5))
    model_env = ModelEnv(Spaces(), model, no_termination, generator=torch.Generator())

    def update() -> None:
        rollout_model_and_populate_sac_buffer(
            model_env,
            replay_buffer,
            SACAgent(sac),
            model_buffer,
            sac_samples_action=True,
            rollout_horizon=1,
            batch_size=ROLLOUTS,
        )
        assert math.isfinite(model_buffer.reward[model_buffer.cur_idx - 1])

    measure(update, ROLLOUTS)
elif ARGS.algo == "mbpo-sac":
    with tempfile.TemporaryDirectory() as folder:
        logger = Logger(folder, enable_back_compatible=True)

        def update() -> None:
            losses = sac.update_parameters(model_buffer, 256, 0, logger, reverse_mask=True)
            assert all(math.isfinite(loss) for loss in losses)

        measure(update)
else:
    raise SystemExit(f"mbrl_mbpo.py has no setting {ARGS.algo!r}")
