"""On a GPU, Python has to run ahead of the device: what an update asks for must never be a number
that is still being computed. CI has no GPU, so this counts the calls that would wait."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

import common

WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "multinomial"}
WAITS |= {"__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"}
FLAGS = {  # without what happens once in hundreds of updates
    "awr": {"refresh_interval": 1000, "value_warmup": 0},  # new returns are computed in NumPy
    "marwil": {"refresh_interval": 1000},
    "mbpo": {"real_ratio": 1.0},  # early stopping of a fit looks at its errors
}
ALLOWED = {  # replay lies in the memory of the CPU, and so does the choice of its rows
    "fqf": {"numpy"},
    "dreamer": {"cpu", "numpy"},
}


class Waits(TorchFunctionMode):
    """What would wait, from a step of the environment to the last step of an optimiser that follows
    it; what comes after that, such as acting and logging, has to know its numbers. Not before the
    first step of an optimiser: until then, things are set up."""

    def __init__(self):
        super().__init__()
        self.pending, self.found = None, Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        by_mask = name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool
        if self.pending is not None and (name in WAITS or by_mask):
            self.pending[name] += 1
        return function(*args, **(kwargs or {}))

    def on_optimizer_step(self, *_):
        self.found += self.pending or Counter()
        self.pending = Counter()

    def watch(self, train):
        hook = register_optimizer_step_post_hook(self.on_optimizer_step)
        try:
            with self:
                train()
        finally:
            hook.remove()
        return self.found


def test_no_update_waits_for_the_device(algo, tiny, monkeypatch):
    waits, step = Waits(), common.Checked.step

    def forget_and_step(*args):
        waits.pending = waits.pending and Counter()
        return step(*args)

    monkeypatch.setattr(common.Checked, "step", forget_and_step)
    args = replace(tiny, log_interval=1000, eval_interval=1000, **FLAGS.get(algo.ALGO, {}))
    found = waits.watch(lambda: algo.train(args))
    assert set(found) == ALLOWED.get(algo.ALGO, set())


@pytest.mark.parametrize("name", ["item", "numpy", "nonzero"])
def test_a_wait_is_seen(name):
    waits, weight = Waits(), torch.nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([weight], 0.1)
    weight.grad = torch.ones(1)

    def train():
        opt.step()
        getattr(weight.detach(), name)()
        opt.step()
        getattr(weight.detach(), name)()  # no step comes after it

    assert waits.watch(train) == {name: 1}
