"""python axiomrl_mbpo.py SETTING: a piece of axiomrl's MBPO, by the calls that its trainer makes,
without callbacks or evaluation. 17 observations and 6 actions, its buffers of 100,000 rows.

"mbpo-model": a step of its ensemble, 7 x 4 x 200 with SiLU (its trainer: ReLU), a loop over 7 plain
MLPs. It has no normaliser, no bootstrap (all members get the same 256 rows) and no weight decay, it
clamps the log-variances, and its trainer has neither held-out rows nor early stopping nor elites.
"mbpo-rollout": one transition of 10,000 in a call, one step from each start, into the model's
buffer, which it empties first. All 7 members compute every row, and any of the 7 may be the one
that counts. It knows no termination. The rows go into the buffer one at a time in a Python loop,
about a third of the time at one thread.
"mbpo-sac": an update of actor, 2 critics and targets, 2 x 256, batch 256, all of it from the
model's buffer (its trainer: half). Its temperature is a constant. Its actor has a third 256 x 256
layer that cannot be switched off, and a target, too, which gives the actions for the critics'.
"""

import math

import torch
from axiomrl.algorithms.mbpo import MBPO
from axiomrl.data.replay_buffer import ReplayBuffer
from axiomrl.models.mlp_mopo import MLPMOPOEnsembleModel
from axiomrl.models.mlp_sac import MLPSACModel
from axiomrl.runtime.mbpo_trainer import _refresh_synthetic_buffer, _sample_mixed_batch
from timing import ARGS, measure

OBS, ACTION, ROWS, ROLLOUTS = 17, 6, 100_000, 10_000
torch.manual_seed(0)


def full_buffer() -> ReplayBuffer:
    buffer = ReplayBuffer(capacity=ROWS, obs_shape=(OBS,), action_shape=(ACTION,))
    obs = torch.randn(ROWS + 1, OBS)
    state = {"position": 0, "size": ROWS, "obs": obs[:-1], "next_obs": obs[1:]}
    state |= {"actions": 2 * torch.rand(ROWS, ACTION) - 1, "rewards": -torch.rand(ROWS)}
    buffer.load_state_dict(state | {"dones": torch.zeros(ROWS)})
    return buffer


replay_buffer, model_buffer = full_buffer(), full_buffer()
algo = MBPO(
    policy_model=MLPSACModel(obs_dim=OBS, action_dim=ACTION, hidden_sizes=(256, 256)),
    dynamics_model=MLPMOPOEnsembleModel(
        obs_dim=OBS,
        action_dim=ACTION,
        hidden_sizes=(200, 200, 200, 200),
        num_ensembles=7,
        activation=torch.nn.SiLU,
    ),
    policy_learning_rate=3e-4,
    model_learning_rate=1e-3,
    gamma=0.99,
    alpha=0.2,
    tau=0.005,
)


def update_model() -> dict:
    return algo.update_model(replay_buffer.sample(256), global_step=0).metrics


def roll_out() -> dict:
    return _refresh_synthetic_buffer(
        algorithm=algo,
        replay_buffer=replay_buffer,
        synthetic_buffer=model_buffer,
        rollout_batch_size=ROLLOUTS,
        rollout_horizon=1,
        device=torch.device("cpu"),
    )


def update_sac() -> dict:
    batch = _sample_mixed_batch(
        replay_buffer, model_buffer, batch_size=256, synthetic_batch_ratio=1.0
    )
    return algo.update(batch, global_step=0).metrics


piece = {"mbpo-model": update_model, "mbpo-rollout": roll_out, "mbpo-sac": update_sac}[ARGS.algo]


def update() -> None:
    assert all(math.isfinite(value) for value in piece().values())


measure(update, ROLLOUTS if piece is roll_out else 1)
