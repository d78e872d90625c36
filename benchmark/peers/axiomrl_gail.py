"""python axiomrl_gail.py gail-loop: axiomrl's train_gail() on CartPole, with its rollouts, both
learners and its logs after every rollout, but without the evaluation that it makes there. A step of
one environment is what counts.

8 environments (Gymnasium's SyncVectorEnv) x 128 steps, then 16 updates of the discriminator with
256 rows of the expert and 256 of the policy, then PPO, 8 epochs of mini-batches of 256. All
networks are 64 x 64 with tanh. The expert's 10 episodes and the learning rates are ours, too.

It does less: no gradient penalty, no entropy of D, no normaliser of observations, no bootstrap from
the last state of a truncated episode. An environment resets in a step of its own, which counts and
from which it learns as if it were a real one.
It does more: V and the discriminator see 8 rows at every step of the rollout, ours all 1,024 after
it. Every update makes statistics, which ours makes once per rollout. Adam is not fused.
"""

import tempfile
from pathlib import Path

import numpy as np
from axiomrl.experiment.config import TrainConfig
from axiomrl.runtime import gail_trainer
from axiomrl.runtime.callbacks import Callback
from timing import ARGS, clock, report

NUM_ENVS, NUM_STEPS = 8, 128
if ARGS.algo != "gail-loop":
    raise SystemExit(f"axiomrl_gail.py has no setting {ARGS.algo!r}")
assert ARGS.updates % (NUM_ENVS * NUM_STEPS) == 0  # windows are whole rollouts
marks = []


class Marks(Callback):
    """Its trainer evaluates after every rollout, and calls this after the logs of that."""

    def on_eval_end(self, trainer: object, metrics: dict) -> None:
        if trainer.global_step % ARGS.updates == 0:
            marks.append(clock())


gail_trainer._evaluate_policy = lambda *args, **kwargs: {}
data = Path(__file__).resolve().parents[1] / "data" / "CartPole-v1-expert.npz"
with tempfile.TemporaryDirectory() as folder:
    with np.load(data) as file:
        ours = dict(file)
    ours |= {"obs": ours.pop("observations"), "next_obs": ours.pop("next_observations")}
    np.savez(f"{folder}/expert.npz", **ours)  # the names that it wants
    config = TrainConfig(
        algo="gail",
        env_id="CartPole-v1",
        seed=1,
        total_timesteps=(1 + ARGS.windows) * ARGS.updates,  # the first window warms up
        output_dir=Path(folder),
        device="cpu",
        num_envs=NUM_ENVS,
        algo_kwargs={
            "num_steps": NUM_STEPS,
            "update_epochs": 8,
            "minibatch_size": 256,
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
            "clip_coef": 0.2,
            "ent_coef": 0.01,
            "vf_coef": 1.0,  # it halves the squared error itself
            "max_grad_norm": 0.5,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "discriminator_learning_rate": 1e-3,
            "discriminator_updates": 16,
            "discriminator_batch_size": 256,
            "expert_dataset_kind": "npz",
            "expert_dataset_path": f"{folder}/expert.npz",
        },
    )
    gail_trainer.train_gail(config, callbacks=[Marks()])
report(marks)
