"""python ours_gail.py gail-loop [--variant no-penalty]: algos/gail.py as a user runs it,
that is train() itself on CartPole, with its rollouts, both learners and its logs (metrics.csv and
TensorBoard, after every rollout and every episode); without evaluations and checkpoints. A step of
one environment is what counts.

8 environments x 128 steps, then 16 updates of the discriminator with 256 rows of the expert and 256
of the policy, then PPO, 8 epochs of mini-batches of 256. All networks are 64 x 64 with tanh.
"no-penalty" is --gradient-penalty 0: the peers have none.
"""

import sys
import tempfile
from pathlib import Path

from timing import ARGS, marks_at_entries, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import gail

NUM_ENVS, NUM_STEPS = 8, 128
if ARGS.algo != "gail-loop":
    raise SystemExit(f"ours_gail.py has no setting {ARGS.algo!r}")
assert ARGS.updates % (NUM_ENVS * NUM_STEPS) == 0  # windows are whole rollouts

marks = marks_at_entries("losses/discriminator", lambda step: step % ARGS.updates == 0)
with tempfile.TemporaryDirectory() as folder:
    gail.train(
        gail.Args(  # what the peers share is written out: it must not follow our defaults
            env_id="CartPole-v1",
            total_timesteps=(1 + ARGS.windows) * ARGS.updates,  # the first window warms up
            num_envs=NUM_ENVS,
            num_steps=NUM_STEPS,
            batch_size=256,
            num_epochs=8,
            discriminator_updates=16,
            hidden_dim=64,
            learning_rate=1e-3,
            discriminator_learning_rate=1e-3,
            gamma=0.99,
            gae_lambda=0.95,
            max_ratio_change=0.2,
            policy_entropy_coef=0.01,
            max_grad_norm=0.5,
            reward_type="softplus",
            absorbing=False,
            gradient_penalty=0.0 if ARGS.variant == "no-penalty" else gail.Args.gradient_penalty,
            log_interval=NUM_ENVS * NUM_STEPS,
            eval_interval=10**9,
            eval_episodes=1,
            checkpoint_interval=10**9,
            run_dir=f"{folder}/run",
            device="cpu",
            torch_threads=ARGS.threads,
            quiet=True,
        )
    )
report(marks)
