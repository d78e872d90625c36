"""Dreamer: its networks, distributions, losses and returns against numbers worked out by other
means."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dreamer_helpers import (
    BINS,
    NANO,
    drawn,
    mixture_of_n_steps,
    nano_networks,
    one_hot,
    randomise,
    sequence,
    symexp,
    two_hot,
)
from torch import nn

from algos import dreamer

pytestmark = pytest.mark.usefixtures("nano")

# ---- the state is forgotten at the start of an episode

PARTS = [(part, start) for start in (0, 3) for part in ("last_action", "h", "z")]


@pytest.mark.parametrize(("part", "start"), [*PARTS, ("embed", 3)])
def test_D1_after_is_first_no_part_of_the_past_matters(part, start):
    """What was seen and done before, the states at the start of the sequence, and the action at
    is_first itself: each alone makes a difference without is_first, and none with it."""
    rssm = nano_networks()[0].rssm
    where, one = ["embed", "last_action", "is_first", "h", "z"].index(part), sequence()
    other = [x.clone() for x in one]
    if part == "embed":
        other[where][:, :start] *= -10
    elif part == "last_action":
        other[where][:, : start + 1] = one[where][:, : start + 1].roll(1, dims=2)
    else:
        other[where] = one[where].roll(1, dims=1)
    for is_first, differs in ((0, True), (1, False)):
        for inputs in (one, other):
            inputs[2][:, start] = is_first
        left, right = rssm.observe(*one, drawn()), rssm.observe(*other, drawn())
        assert ((left[0] - right[0])[:, start:].abs().max() > 1e-4) == differs
    for x, y in zip(left, right):  # h, z, q
        assert torch.equal(x[:, start:], y[:, start:])
    assert start == 0 or not torch.equal(left[0][:, :start], right[0][:, :start])


def test_D1_an_episode_in_the_middle_is_like_one_at_the_start(monkeypatch):
    """h, z and posteriors from is_first on are those of a sequence that starts there, from zeros,
    after no action. Only in the rows that have it."""
    rssm = nano_networks()[0].rssm
    embed, last_action, is_first, h, z = sequence()
    monkeypatch.setattr(dreamer, "sample", lambda log_probs, _: dreamer.most_likely(log_probs))
    plain = rssm.observe(embed, last_action, is_first, h, z, None)
    is_first[1, 2] = 1
    whole = rssm.observe(embed, last_action, is_first, h, z, None)
    for x, y in zip(whole, plain):
        assert torch.equal(x[[0, 2]], y[[0, 2]]) and torch.equal(x[1, :2], y[1, :2])
    assert (whole[0][1, 2:] - plain[0][1, 2:]).abs().max() > 1e-3
    last_action[1, 2] = 0
    zeros = [torch.zeros_like(x) for x in (is_first[:, 2:], h, z)]
    alone = rssm.observe(embed[:, 2:], last_action[:, 2:], *zeros, None)
    for x, y in zip(whole, alone):
        torch.testing.assert_close(x[1, 2:], y[1], rtol=1e-5, atol=1e-6)


def test_D1_acting_forgets_as_well(walk):
    """An agent that has just been switched on remembers nothing; where an episode starts in a run,
    it remembers as little, h, z and action, and elsewhere all of what act() gave back."""
    for x, dim in zip(nano_networks()[0].rssm.initial(4), (6, 6, 3)):
        assert x.shape == (4, dim) and not x.any()
    calls, kept, forgot = [], 0, 0
    act = dreamer.act

    def noted(model, actor, obs, memory, choose):
        before = [x.clone() for x in memory]
        after = act(model, actor, obs, memory, choose)
        if choose is not dreamer.most_likely:  # of training, not of an evaluation
            calls.append((obs[:, 1].tolist(), before, [x.clone() for x in after]))
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dreamer, "act", noted)
        dreamer.train(replace(walk, env_id="Tally-v0"))
    assert len(calls) == 20 and not any(x.any() for x in calls[0][1])
    for (_, _, given), (times, taken, _) in itertools.pairwise(calls):
        for i, time in enumerate(times):
            if time == 0:
                forgot += 1
                assert not any(x[i].any() for x in taken)
            else:
                kept += 1
                assert all(torch.equal(x[i], y[i]) for x, y in zip(given, taken))
    assert kept > 10 and forgot > 5


# ---- the model, by hand


def doubles(module):
    return {name: x.detach().double().numpy() for name, x in module.state_dict().items()}


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2) + 1e-4) * scale


def dense_by_hand(p, name, x):
    linear = p[f"{name}.0.weight"] @ x + p[f"{name}.0.bias"]
    return silu(rms_norm(linear, p[f"{name}.1.weight"]))


def gru_by_hand(p, h, z, a):
    """One row, one output at a time; p of an RSSM of NANO size, the blocks being 3 x 3."""
    parts = [dense_by_hand(p, f"from_{name}", x) for name, x in (("h", h), ("z", z), ("action", a))]
    inputs, mixed = np.concatenate(parts), np.zeros(6)
    for j in range(6):
        block, inner = divmod(j, 3)
        own, shared = np.split(p["mix.weight"][block, :, inner], [3])  # of 3 parts of h; of inputs
        mixed[j] = own @ h[3 * block : 3 * block + 3] + shared @ inputs
        mixed[j] += p["mix.bias"][block, 0, inner]
    mixed = silu(rms_norm(mixed, p["mix_norm.0.weight"]))
    new = np.zeros(6)
    for j in range(6):
        block, inner = divmod(j, 3)
        reset, candidate, update = (
            sum(mixed[3 * block + i] * p["gates.weight"][block, i, k] for i in range(3))
            + p["gates.bias"][block, 0, k]
            for k in (inner, 3 + inner, 6 + inner)
        )
        candidate, update = np.tanh(sigmoid(reset) * candidate), sigmoid(update - 1)
        new[j] = update * candidate + (1 - update) * h[j]
    return new


def test_gru_step_by_hand():
    rssm = randomise(nano_networks()[0].rssm)
    p, h, z = doubles(rssm), torch.randn(5, 6), torch.rand(5, 6)
    action = torch.rand(5, 3)
    with torch.no_grad():
        actual = rssm.recur(h, z, action)
    rows = zip(*(x.double().numpy() for x in (h, z, action)))
    expected = np.stack([gru_by_hand(p, *row) for row in rows])
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_gru_remembers_at_first():
    """With all gates at 0 the update gate is sigmoid(-1) = 0.269 and the candidate 0."""
    rssm = nano_networks()[0].rssm
    with torch.no_grad():
        rssm.gates.weight.zero_()
    h = torch.randn(4, 6)
    new = rssm.recur(h, torch.rand(4, 6), torch.randn(4, 3))
    torch.testing.assert_close(new, h * (1 - 1 / (1 + math.e)))


@pytest.mark.parametrize(("input_dim", "output_dim", "blocks"), [(6, 9, 3), (8, 4, 2), (5, 7, 1)])
def test_D16_block_linear_is_a_block_diagonal_matrix(input_dim, output_dim, blocks):
    layer = dreamer.BlockLinear(input_dim, output_dim, blocks)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(11, input_dim)
    matrix = torch.block_diag(*layer.weight.detach())
    assert matrix.shape == (input_dim, output_dim)
    expected = x @ matrix + layer.bias.detach().flatten()
    actual = layer(x.unflatten(1, (blocks, -1)))
    assert actual.shape == (11, blocks, output_dim // blocks)
    torch.testing.assert_close(actual.flatten(1).detach(), expected)
    assert sum(p.numel() for p in layer.parameters()) == matrix.numel() // blocks + output_dim


def mixed_softmax(logits):
    """0.99 softmax + 0.01 / C, one vector."""
    e = np.exp(logits - logits.max())
    return 0.99 * e / e.sum() + 0.01 / len(logits)


def test_prior_and_posterior_by_hand():
    """p(z|h): two layers; q(z|h, x): one layer of both. Groups of 3 classes, each mixed alone."""
    rssm = randomise(nano_networks()[0].rssm)
    p, h, embed = doubles(rssm), torch.randn(4, 6), torch.randn(4, 5)
    with torch.no_grad():
        log_p, log_q = rssm.prior(h), rssm.posterior(h, embed)
        stacked = rssm.prior(torch.stack([h, 2 * h]))  # any leading shape
    assert log_p.shape == log_q.shape == (4, 2, 3)
    torch.testing.assert_close(stacked[0], log_p)
    for n in range(4):
        x, e = h[n].double().numpy(), embed[n].double().numpy()
        hidden = dense_by_hand(p, "prior_net.1", dense_by_hand(p, "prior_net.0", x))
        logits = p["prior_net.2.weight"] @ hidden + p["prior_net.2.bias"]
        hidden = dense_by_hand(p, "posterior_net.0", np.concatenate([x, e]))
        others = p["posterior_net.1.weight"] @ hidden + p["posterior_net.1.bias"]
        for group in range(2):
            part = slice(3 * group, 3 * group + 3)
            for log_probs, by_hand in ((log_p, logits[part]), (log_q, others[part])):
                actual = log_probs[n, group].double().exp().numpy()
                np.testing.assert_allclose(actual, mixed_softmax(by_hand), rtol=1e-3, atol=1e-6)


def test_heads_by_hand():
    """Reward and continue have one hidden layer; actor, critic and the decoder of vectors three."""
    model, actor, critic = (randomise(x, 0.3) for x in nano_networks())
    features = torch.randn(4, 3, 12)
    heads = {"reward": (model, 1), "cont": (model, 1), "decoder.net": (model, 3)}
    heads |= {"actor": (actor, 3), "critic": (critic, 3)}
    with torch.no_grad():
        outputs = {"reward": model.reward(features), "cont": model.cont(features)}
        outputs["decoder.net"] = model.decoder(features.flatten(0, 1)).unflatten(0, (4, 3))
        outputs |= {"actor": actor(features).exp(), "critic": critic(features)}
    widths = {"reward": 255, "cont": 1, "decoder.net": 2, "actor": 3, "critic": 255}
    for name, (network, num_layers) in heads.items():
        p, prefix = doubles(network), "net" if name in ("actor", "critic") else name
        assert outputs[name].shape == (4, 3, widths[name])
        x = features[2, 1].double().numpy()
        for k in range(num_layers):
            x = dense_by_hand(p, f"{prefix}.{k}", x)
        x = p[f"{prefix}.{num_layers}.weight"] @ x + p[f"{prefix}.{num_layers}.bias"]
        expected = mixed_softmax(x) if name == "actor" else x
        np.testing.assert_allclose(outputs[name][2, 1].numpy(), expected, rtol=1e-4, atol=1e-4)


def convolve(image, weight, bias):
    """4 x 4 with stride 2 and one pixel of zeros around, one output at a time. [W, W, C]"""
    width = len(image)
    padded = np.zeros((width + 2, width + 2, image.shape[2]))
    padded[1:-1, 1:-1] = image
    output = np.zeros((width // 2, width // 2, len(weight)))
    for i, j, k in np.ndindex(output.shape):
        patch = padded[2 * i : 2 * i + 4, 2 * j : 2 * j + 4]  # [4, 4, C]
        output[i, j, k] = (patch * weight[k].transpose(1, 2, 0)).sum() + bias[k]
    return output


def test_encoder_of_images_by_hand():
    """16 x 16 pixels: 4 x 4 after two stages of 2 and 4 channels, each normed over its channels."""
    size = NANO._replace(image_size=16)
    encoder = randomise(nano_networks((16, 16, 3), 3, size)[0].encoder, 0.3)
    p, image = doubles(encoder), torch.rand(2, 16, 16, 3) - 0.5
    with torch.no_grad():
        actual = encoder(image)
    assert actual.shape == (2, 4 * 4 * 4) and encoder.embed_dim == 64
    x = image[1].double().numpy()
    for k in (0, 3):
        x = convolve(x, p[f"net.{k}.weight"], p[f"net.{k}.bias"])
        for i, j in np.ndindex(x.shape[:2]):
            x[i, j] = silu(rms_norm(x[i, j], p[f"net.{k + 1}.weight"]))
    np.testing.assert_allclose(actual[1].numpy(), x.flatten(), rtol=1e-3, atol=1e-4)


def deconvolve(image, weight, bias):
    """The transpose: every input pixel adds its 4 x 4 patch."""
    width = len(image)
    padded = np.zeros((2 * width + 2, 2 * width + 2, weight.shape[1]))
    for i, j, k in np.ndindex(image.shape):
        padded[2 * i : 2 * i + 4, 2 * j : 2 * j + 4] += image[i, j, k] * weight[k].transpose(
            1, 2, 0
        )
    return padded[1:-1, 1:-1] + bias


def test_decoder_of_images_by_hand():
    """The way back, with no norm before the sigmoid."""
    size = NANO._replace(image_size=16)
    decoder = randomise(nano_networks((16, 16, 3), 3, size)[0].decoder, 0.3)
    p, features = doubles(decoder), torch.randn(2, 12)
    with torch.no_grad():
        actual = decoder(features)
    assert actual.shape == (2, 16, 16, 3) and 0 < actual.min() < actual.max() < 1
    x = p["input.weight"] @ features[1].double().numpy() + p["input.bias"]
    x = x.reshape(4, 4, 4)
    for k in (0, 3):  # norm, SiLU, transposed convolution
        for i, j in np.ndindex(x.shape[:2]):
            x[i, j] = silu(rms_norm(x[i, j], p[f"net.{k}.weight"]))
        x = deconvolve(x, p[f"net.{k + 2}.weight"], p[f"net.{k + 2}.bias"])
    np.testing.assert_allclose(actual[1].numpy(), sigmoid(x), rtol=1e-3, atol=1e-4)


def test_encoder_of_vectors_by_hand():
    encoder = randomise(nano_networks((2,))[0].encoder, 0.3)
    p, x = doubles(encoder), torch.randn(3, 2)
    expected = x[1].double().numpy()
    for k in range(3):
        expected = dense_by_hand(p, f"net.{k}", expected)
    assert encoder.embed_dim == 5
    np.testing.assert_allclose(encoder(x)[1].detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_imagination_by_hand():
    """Actions of the policy at the state that they leave, z of the prior, inverse distribution
    functions of the same uniform numbers; H + 1 states, H actions, and no gradient."""
    model, actor, _ = nano_networks()
    h, z = torch.tanh(torch.randn(4, 6)), one_hot(torch.randint(3, (4, 2)), 3).flatten(1)
    features, actions = dreamer.imagine(model, actor, h, z, 3, drawn())
    assert features.shape == (4, 4, 12) and actions.shape == (4, 3, 3)
    assert not features.requires_grad and not actions.requires_grad
    uniforms = drawn()
    assert torch.equal(features[:, 0], torch.cat([h, z], dim=1))
    p, p_actor = doubles(model.rssm), doubles(actor)
    h, z = h.double().numpy(), z.double().numpy()
    for t in range(3):
        u_action = torch.rand(4, 1, generator=uniforms).numpy()
        u_state = torch.rand(4, 2, 1, generator=uniforms).numpy()
        for n in range(4):
            x = np.concatenate([h[n], z[n]])
            for k in range(3):
                x = dense_by_hand(p_actor, f"net.{k}", x)
            pi = mixed_softmax(p_actor["net.3.weight"] @ x + p_actor["net.3.bias"])
            action = np.eye(3)[np.searchsorted(pi.cumsum(), u_action[n, 0])]
            assert actions[n, t].tolist() == action.tolist()
            h[n] = gru_by_hand(p, h[n], z[n], action)
            hidden = dense_by_hand(p, "prior_net.1", dense_by_hand(p, "prior_net.0", h[n]))
            logits = p["prior_net.2.weight"] @ hidden + p["prior_net.2.bias"]
            for group in range(2):
                prior = mixed_softmax(logits[3 * group : 3 * group + 3])
                drawn_class = np.searchsorted(prior.cumsum(), u_state[n, group, 0])
                z[n, 3 * group : 3 * group + 3] = np.eye(3)[drawn_class]
            expected = np.concatenate([h[n], z[n]])
            np.testing.assert_allclose(features[n, t + 1].numpy(), expected, rtol=1e-4, atol=1e-5)


# ---- initial weights


@pytest.fixture(scope="module")
def small_networks():
    """Large enough for a standard deviation to be told: D 512, 8 blocks, units 256, 64 x 64."""
    torch.manual_seed(0)
    return dreamer.build_networks((64, 64, 3), 6, dreamer.SIZES["small"])


FEATURES = 512 + 16 * 16
FAN_INS = {  # by hand
    "encoder.net.0": 3 * 16,
    "encoder.net.3": 16 * 16,
    "encoder.net.6": 32 * 16,
    "encoder.net.9": 64 * 16,
    "rssm.from_h.0": 512,
    "rssm.from_z.0": 256,
    "rssm.from_action.0": 6,
    "rssm.mix": 512 // 8 + 3 * 256,
    "rssm.gates": 512 // 8,
    "rssm.prior_net.0.0": 512,
    "rssm.prior_net.1.0": 256,
    "rssm.prior_net.2": 256,
    "rssm.posterior_net.0.0": 512 + 128 * 4 * 4,
    "rssm.posterior_net.1": 256,
    "decoder.input": FEATURES,
    "decoder.net.2": 128 * 4,
    "decoder.net.5": 64 * 4,
    "decoder.net.8": 32 * 4,
    "decoder.net.11": 16 * 4,
    "reward.0.0": FEATURES,
    "cont.0.0": FEATURES,
    "cont.1": 256,
}
HEAD_FAN_INS = {"net.0.0": FEATURES, "net.1.0": 256, "net.2.0": 256}


def test_D16_initial_weights_are_truncated_normal_of_variance_one_over_fan_in(small_networks):
    """At +-2 sigma of the normal that was cut, whose sigma is that of the result over 0.8796."""
    model, actor, critic = small_networks
    expected = {("model", name): fan_in for name, fan_in in FAN_INS.items()}
    for network in ("actor", "critic"):
        expected |= {(network, name): fan_in for name, fan_in in HEAD_FAN_INS.items()}
    networks = {"model": model, "actor": actor, "critic": critic}
    seen = set()
    for (network, name), fan_in in expected.items():
        weight = networks[network].get_submodule(name).weight.detach()
        seen.add(id(networks[network].get_submodule(name).weight))
        std, num = fan_in**-0.5, weight.numel()
        limit = 2 * std / 0.87962566
        assert weight.std().item() == pytest.approx(std, rel=0.01 + 3 / math.sqrt(num)), name
        assert abs(weight.mean().item()) < 5 * std / math.sqrt(num), name
        assert weight.abs().max() <= limit * (1 + 1e-4), name
        if num > 10_000:  # the cut is where it should be, and no clamp: few are close to it
            assert weight.abs().max() > 0.97 * limit, name
            assert (weight.abs() > 0.999 * limit).float().mean() < 1e-3, name
    # every other weight is a scale of a norm, or a head that starts at zero
    others = {"reward.1", "net.3"}
    for network in networks.values():
        for name, module in network.named_modules():
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(module, nn.RMSNorm):
                assert (weight == 1).all()
            elif weight is not None and id(weight) not in seen:
                assert name in others and not weight.any(), name
            assert bias is None or not bias.any()


def test_D16_fan_ins_keep_the_variance(small_networks):
    """Inputs of variance 1 make sums of variance 1: of blocks, and of a transposed convolution,
    2 x 2 of whose 4 x 4 weights meet in a pixel."""
    model = small_networks[0]
    rssm = model.rssm
    with torch.no_grad():
        mixed = rssm.mix(torch.randn(200, 8, 64 + 768))
        posterior = rssm.posterior_net[0][0](torch.randn(200, 512 + 2048))
        gates = rssm.gates(torch.randn(200, 8, 64))
        convolved = model.encoder.net[3](torch.randn(20, 16, 32, 32))[:, :, 1:-1, 1:-1]
        transposed = model.decoder.net[2](torch.randn(20, 128, 4, 4))[:, :, 1:-1, 1:-1]
    for x in (mixed, posterior, gates, convolved, transposed):
        assert x.var().item() == pytest.approx(1, abs=0.1)


def test_D16_every_norm_is_rms_with_eps_1e_4(small_networks):
    norms = [
        module
        for network in small_networks
        for module in network.modules()
        if isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.BatchNorm2d)
    ]
    assert len(norms) == 4 + 3 + 1 + 2 + 1 + 4 + 2 + 3 + 3
    for norm in norms:
        assert type(norm) in (nn.RMSNorm, dreamer.ChannelNorm) and norm.eps == 1e-4
    x = torch.full((1, 8), 1e-2)  # x^2 = eps
    torch.testing.assert_close(nn.RMSNorm(8, 1e-4)(x), torch.full((1, 8), 0.5**0.5))


def test_D16_channel_norm_is_over_the_channels_of_a_pixel():
    norm, x = dreamer.ChannelNorm(3, 1e-4), torch.randn(2, 3, 4, 4)
    nn.init.normal_(norm.weight)
    actual = norm(x)
    assert actual.shape == x.shape
    for n, i, j in np.ndindex(2, 4, 4):
        pixel = x[n, :, i, j].double().numpy()
        expected = rms_norm(pixel, norm.weight.detach().double().numpy())
        np.testing.assert_allclose(actual[n, :, i, j].detach().numpy(), expected, rtol=1e-5)


def test_D13_before_it_learns_everything_is_worth_exactly_nothing(small_networks):
    """Rewards and values are 0.0, not almost; all actions are equally likely."""
    model, actor, critic = small_networks
    features = 10 * torch.randn(64, 3, FEATURES)
    with torch.no_grad():
        for logits in (model.reward(features), critic(features)):
            assert logits.shape == (64, 3, 255)
            assert (dreamer.two_hot_mean(logits) == 0.0).all()
        pi = actor(features).exp()
    torch.testing.assert_close(pi, torch.full((64, 3, 6), 1 / 6))


def test_sizes_have_the_weights_of_their_names():
    """The paper counts 12, 50 and 200 million with other convolutions; ours are within a quarter.
    Made without memory."""
    with torch.device("meta"):
        counts = {
            name: sum(
                p.numel()
                for network in dreamer.build_networks((64, 64, 3), 18, dreamer.SIZES[name])
                for p in network.parameters()
            )
            for name in ("12m", "50m", "paper")
        }
    expected = {"12m": 12e6, "50m": 50e6, "paper": 200e6}
    assert counts == pytest.approx(expected, rel=0.25)


def test_sizes_in_millions():
    """As the file tells them, here for 18 actions: all weights, and the decoder's input."""
    text = Path(dreamer.__file__).read_text()
    for name, size in dreamer.SIZES.items():
        if size != NANO:
            with torch.device("meta"):
                shape = (size.image_size, size.image_size, 3)
                networks = dreamer.build_networks(shape, 18, size)
            total = sum(x.numel() for network in networks for x in network.parameters()) / 1e6
            first = networks[0].decoder.input.weight.numel() / 1e6
            assert re.search(rf'"{name}": Size\(.*\),  # {total:.1f}, {first:.1f}\n', text)


# ---- categorical distributions


def test_D12_unimix_by_hand():
    logits = torch.tensor([[0.0, math.log(3), -200.0, 200.0], [0.0, 0.0, 0.0, 0.0]])
    expected = [[0.0025, 0.0025, 0.0025, 0.9925], [0.25] * 4]
    torch.testing.assert_close(dreamer.unimix(logits).exp(), torch.tensor(expected))
    logits = 3 * torch.randn(7, 5, 4)
    expected = 0.99 * torch.softmax(logits, -1) + 0.01 / 4
    torch.testing.assert_close(dreamer.unimix(logits), torch.log(expected))


def test_D12_no_class_is_impossible_in_prior_posterior_and_actor():
    """However sure the networks are: 0.01 / C at least, and some come close to that."""
    model, actor, _ = nano_networks()
    with torch.no_grad():
        for layer in (model.rssm.prior_net[-1], model.rssm.posterior_net[-1], actor.net[-1]):
            layer.weight.mul_(1000)
        h, features = torch.randn(50, 6), torch.randn(50, 12)
        q = model.rssm.posterior(h, torch.randn(50, 5)).exp()
        for probs in (model.rssm.prior(h).exp(), q, actor(features).exp()):
            assert probs.min() >= 0.01 / 3 * (1 - 1e-5) and probs.min() < 0.01 / 3 * 1.01
            torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:-1]))


def test_samples_have_their_probabilities():
    """Exact one-hot vectors, each class as often as it should be, two groups independently."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.05, 0.45]])
    num = 20_000
    draws = dreamer.sample(probs.log().expand(num, 2, 3), drawn())
    assert draws.shape == (num, 2, 3)
    assert ((draws == 0) | (draws == 1)).all() and (draws.sum(-1) == 1).all()
    sigma = (probs * (1 - probs) / num).sqrt()
    assert ((draws.mean(0) - probs).abs() < 5 * sigma).all()
    both = torch.einsum("ni,nj->ij", draws[:, 0], draws[:, 1]) / num
    joint = probs[0][:, None] * probs[1]
    assert ((both - joint).abs() < 5 * (joint * (1 - joint) / num).sqrt()).all()


def test_samples_by_inverse_distribution_function(monkeypatch):
    """At the edges, too: a uniform number beyond a sum that rounding left short of 1."""
    log_probs = torch.tensor([0.25, 0.5, 0.25]).log()
    edges = [(0.0, 0), (0.2, 0), (0.3, 1), (0.7, 1), (0.8, 2), (1 - 2**-24, 2)]
    for uniform, expected in edges:
        monkeypatch.setattr(torch, "rand", lambda *_, u=uniform, **__: torch.full((1,), u))
        assert dreamer.sample(log_probs, drawn()).argmax().item() == expected
    short = torch.tensor([0.25, 0.5, 0.2]).log()
    assert dreamer.sample(short, drawn()).tolist() == [0, 0, 1]


def test_most_likely():
    log_probs = torch.log_softmax(torch.randn(100, 2, 5), -1)
    assert torch.equal(dreamer.most_likely(log_probs), one_hot(log_probs.argmax(-1), 5))


def test_gradient_goes_straight_through_samples():
    """As if they were the probabilities; here d(p . c) / d logits = p (c - p . c)."""
    logits, c = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    (dreamer.sample(torch.log_softmax(logits, -1), drawn()) * c).sum().backward()
    p = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(logits.grad, p * (c - (p * c).sum(-1, keepdim=True)))
    assert logits.grad.abs().max() > 0.01


# ---- symlog, and two-hot


def test_symlog_by_hand_and_back():
    """sign(x) log(1 + |x|)."""
    x = torch.tensor([0.0, 1.0, -1.0, math.e - 1, 1 - math.e**5, 1e-8])
    expected = torch.tensor([0.0, math.log(2), -math.log(2), 1.0, -5.0, 1e-8])
    torch.testing.assert_close(dreamer.symlog(x), expected)
    x = torch.logspace(-6, 8, 57, dtype=torch.float64)
    x = torch.cat([-x.flip(0), torch.zeros(1), x])
    torch.testing.assert_close(symexp(dreamer.symlog(x)), x, rtol=1e-10, atol=0)
    assert (dreamer.symlog(x).diff() > 0).all()
    x = torch.linspace(-20, 20, 41, dtype=torch.float64)
    torch.testing.assert_close(dreamer.symlog(symexp(x)), x)


def test_D13_bins_are_symmetric_and_exponential():
    bins = dreamer.BINS
    assert bins.shape == (255,) and dreamer.NUM_BINS == 255 and bins[127] == 0
    assert torch.equal(bins, -bins.flip(0)) and (bins.diff() > 0).all()
    np.testing.assert_allclose(bins.numpy(), BINS, rtol=1e-5)
    assert bins[-1].item() == pytest.approx(math.exp(20) - 1, rel=1e-6)


def weights_of(target):
    """The gradient of a cross-entropy is p - t: read t off at equal logits."""
    logits = torch.zeros(len(target), 255, dtype=torch.float64, requires_grad=True)
    dreamer.two_hot_loss(logits, target).sum().backward()
    return 1 / 255 - logits.grad


TARGETS = [0.0, 1.0, -1.0, 0.03, -0.4, 12.3, -700.0, 1e5, -3.3e7, 4.8e8, 1e-9]


def test_D13_two_hot_weights_by_hand():
    """At most two, neighbours, none below 0; they sum to 1 and their mean is the target."""
    actual = weights_of(torch.tensor(TARGETS, dtype=torch.float64)).numpy()
    bins = dreamer.BINS.double().numpy()
    for weight, target in zip(actual, TARGETS):
        np.testing.assert_allclose(weight, two_hot(target), atol=2e-4)
        where = np.flatnonzero(np.abs(weight) > 1e-12)
        assert len(where) <= 2 and where[-1] - where[0] <= 1 and weight.min() > -1e-12
        assert weight.sum() == pytest.approx(1)
        assert weight @ bins == pytest.approx(target, rel=1e-9, abs=1e-12)


def test_D13_two_hot_is_linear_between_bins():
    share = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    for k in (0, 100, 126, 127, 253):
        low, high = dreamer.BINS[k].double(), dreamer.BINS[k + 1].double()
        actual = weights_of(low + share * (high - low))
        torch.testing.assert_close(actual[:, k + 1], share)
        torch.testing.assert_close(actual[:, k], 1 - share)


def test_D13_a_target_on_a_bin_is_that_bin_alone():
    """All 255, 0 among them, to the last bit."""
    logits = torch.randn(255, 255)
    loss = dreamer.two_hot_loss(logits, dreamer.BINS)
    expected = -torch.log_softmax(logits, -1).diagonal()
    assert torch.equal(loss, expected)


def test_D13_targets_out_of_range_are_the_last_bins():
    far = torch.tensor([1e12, math.inf, -1e12, -math.inf, 3e38], dtype=torch.float64)
    actual = weights_of(far)
    for weight, k in zip(actual, (254, 254, 0, 0, 254)):
        torch.testing.assert_close(weight, one_hot(k, 255).double())


def test_D13_two_hot_loss_is_cross_entropy_by_brute_force():
    logits = 3 * torch.randn(3, len(TARGETS), 255)
    target = torch.tensor(TARGETS).expand(3, -1)
    actual = dreamer.two_hot_loss(logits, target)
    assert actual.shape == (3, len(TARGETS))
    log_probs = torch.log_softmax(logits.double(), -1).numpy()
    for i, j in np.ndindex(actual.shape):
        expected = -(two_hot(TARGETS[j]) * log_probs[i, j]).sum()
        assert actual[i, j].item() == pytest.approx(expected, rel=1e-3)


def test_D13_equal_probabilities_are_exactly_zero():
    """A sum from left to right is not: that of float32 is off by more than a half."""
    for constant in (0.0, 3.7, -80.0):
        assert (dreamer.two_hot_mean(torch.full((5, 2, 255), constant)) == 0.0).all()
    naive = sum((b / 255 for b in dreamer.BINS), torch.zeros(()))
    assert abs(naive.item()) > 0.5
    symmetric = torch.randn(4, 128)
    logits = torch.cat([symmetric.flip(1)[:, :-1], symmetric], dim=1)
    assert dreamer.two_hot_mean(logits).abs().max() < 20  # of 4.8e8


def test_D13_two_hot_there_and_back():
    logits = torch.tensor(np.stack([two_hot(x) for x in TARGETS])).log().float()
    actual = dreamer.two_hot_mean(logits)
    np.testing.assert_allclose(actual.numpy(), TARGETS, rtol=1e-4, atol=1e-6)


def test_D13_the_mean_is_taken_in_real_space():
    """Half at symexp(0.157 * 20), half at its mirror's neighbour: no mean of exponents."""
    logits = torch.full((1, 255), -math.inf)
    logits[0, [147, 106]] = 0.0
    expected = (BINS[147] + BINS[106]) / 2
    assert dreamer.two_hot_mean(logits).item() == pytest.approx(expected, rel=1e-4)
    logits = torch.randn(6, 255).double() - (torch.arange(255) - 127).abs()
    expected = torch.softmax(logits, -1).numpy() @ BINS
    np.testing.assert_allclose(dreamer.two_hot_mean(logits.float()), expected, rtol=1e-3, atol=1e-5)


def test_D13_the_loss_is_least_at_the_mean_of_what_comes():
    """Targets -1 and 7 by turns: a network without input learns 3."""
    logits = torch.zeros(255, requires_grad=True)
    opt = torch.optim.Adam([logits], lr=0.3)
    target = torch.tensor([-1.0, 7.0])
    for _ in range(150):
        opt.zero_grad()
        dreamer.two_hot_loss(logits.expand(2, 255), target).mean().backward()
        opt.step()
    assert dreamer.two_hot_mean(logits.detach()).item() == pytest.approx(3, abs=0.05)


# ---- losses of the model


def test_reconstruction_loss_by_hand():
    """A sum over pixels in [0, 1], or over symlog of a vector; one number per step."""
    obs = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).reshape(1, 1, 2, 2, 1)
    decoded = torch.tensor([0.5, 0.2, 0.0, 0.5]).reshape(1, 1, 2, 2, 1)
    assert dreamer.reconstruction_loss(decoded, obs).tolist() == [[pytest.approx(0.25 + 1 + 0.01)]]
    obs = torch.tensor([[[math.e - 1, 0.0], [1 - math.e**2, 3.0]]])
    decoded = torch.tensor([[[0.0, 2.0], [-2.5, math.log(4)]]])
    actual = dreamer.reconstruction_loss(decoded, obs)
    torch.testing.assert_close(actual, torch.tensor([[5.0, 0.25]]))
    obs = torch.randint(256, (3, 2, 4, 4, 3), dtype=torch.uint8)
    decoded = torch.rand(3, 2, 4, 4, 3)
    actual = dreamer.reconstruction_loss(decoded, obs)
    expected = ((decoded.numpy() - obs.numpy() / 255) ** 2).reshape(3, 2, -1).sum(-1)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5)


def test_D3_continue_loss_by_hand():
    """-log c where it went on, -log(1 - c) where it ended; gradient c - target."""
    probs = torch.tensor([[0.9, 0.2, 0.5]])
    logit = torch.log(probs / (1 - probs)).requires_grad_()
    loss = dreamer.continue_loss(logit, torch.tensor([[0.0, 1.0, 1.0]]))
    expected = torch.tensor([[-math.log(0.9), -math.log(0.8), math.log(2)]])
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(logit.grad, torch.tensor([[-0.1, 0.2, 0.5]]))


def random_latents(*shape):
    return torch.log_softmax(torch.randn(*shape, 2, 3, dtype=torch.float64), -1)


def test_D11_kl_is_that_of_torch():
    """Summed over the groups. Not symmetric, 0 for equals."""
    log_q, log_p = random_latents(4, 3), random_latents(4, 3)

    def joint(log_probs):
        groups = torch.distributions.OneHotCategorical(logits=log_probs)
        return torch.distributions.Independent(groups, 1)

    divergence = torch.distributions.kl_divergence
    torch.testing.assert_close(dreamer.kl(log_q, log_p), divergence(joint(log_q), joint(log_p)))
    assert (dreamer.kl(log_q, log_p) - dreamer.kl(log_p, log_q)).abs().max() > 0.05
    assert dreamer.kl(log_q, log_q).abs().max() == 0
    torch.testing.assert_close(dreamer.entropy_of(log_q).sum(-1), joint(log_q).entropy())


def test_D11_each_side_of_the_kl_has_its_own_gradient():
    """Both have the value KL(q || p), here without free nats; dynamics moves p alone, and by
    p - q in logits, representation q alone."""
    q_logits = torch.randn(4, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    p_logits = torch.randn(4, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    log_q, log_p = torch.log_softmax(q_logits, -1), torch.log_softmax(p_logits, -1)
    dynamics, representation = dreamer.kl_losses(log_q, log_p, 0.0)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    q, p = log_q.detach().exp(), log_p.detach().exp()
    for b, t, s, c in np.ndindex(4, 3, 2, 3):
        expected[b, t] += q[b, t, s, c] * (q[b, t, s, c] / p[b, t, s, c]).log()
    for loss in (dynamics, representation):
        assert loss.shape == (4, 3)
        torch.testing.assert_close(loss.detach(), expected)
    options = {"allow_unused": True, "retain_graph": True}
    to_q, to_p = torch.autograd.grad(dynamics.sum(), (q_logits, p_logits), **options)
    assert to_q is None
    torch.testing.assert_close(to_p, p - q)
    to_q, to_p = torch.autograd.grad(representation.sum(), (q_logits, p_logits), **options)
    assert to_p is None
    ratio = (q / p).log()
    torch.testing.assert_close(to_q, q * (ratio - (q * ratio).sum(-1, keepdim=True)))


def latents_of_kl(*kls):
    """q and p of one group that matters and one that does not, [1, T, 2, 2]: q is (1, 0) almost,
    p gives that class exp(-kl)."""
    q = torch.tensor([1 - 1e-12, 1e-12], dtype=torch.float64)
    rows = [torch.tensor([math.exp(-x), 1 - math.exp(-x)], dtype=torch.float64) for x in kls]
    even = torch.full((2,), 0.5, dtype=torch.float64)
    log_q = torch.stack([torch.stack([q, even]) for _ in kls])[None].log()
    log_p = torch.stack([torch.stack([row, even]) for row in rows])[None].log()
    return log_q.requires_grad_(), log_p.requires_grad_()


def test_D11_free_nats_are_of_a_step_before_any_mean():
    """KLs of 0.2 and 3: losses of 1 and 3, and only the second has a gradient."""
    log_q, log_p = latents_of_kl(0.2, 3.0)
    for loss, moved in zip(dreamer.kl_losses(log_q, log_p, 1.0), (log_p, log_q)):
        assert loss[0].tolist() == pytest.approx([1.0, 3.0], abs=1e-6)
        (gradient,) = torch.autograd.grad(loss.mean(), moved, retain_graph=True)
        assert not gradient[0, 0].any() and gradient[0, 1].abs().max() > 0.1


def test_D11_free_nats_are_of_all_groups_together():
    """Two groups of 0.7 each are 1.4, not 2 and not 1."""
    log_q, log_p = latents_of_kl(0.7)
    log_q, log_p = (torch.cat([x[:, :, :1], x[:, :, :1]], dim=2) for x in (log_q, log_p))
    for loss in dreamer.kl_losses(log_q, log_p, 1.0):
        assert loss.item() == pytest.approx(1.4, abs=1e-6)


def test_D11_weights_of_the_two_sides():
    """The revision of 2024; in 2023 the first was 0.5."""
    assert (dreamer.DYNAMICS_COEF, dreamer.REPRESENTATION_COEF) == (1.0, 0.1)
    assert dreamer.Args().free_nats == 1.0


# ---- returns


def test_D5_lambda_returns_by_hand_with_an_end_in_the_middle():
    """gamma 1/2, lambda 1/4, three steps, and state 2 is terminal:
    R_2 = 16 + 1/2 * 12 = 22;  R_1 = 8, since nothing follows;
    R_0 = 4 + 1/2 (3/4 * 40 + 1/4 * 8) = 20. What came with state 0 does not matter."""
    nan = math.nan
    reward = torch.tensor([[nan, 4.0, 8.0, 16.0]])
    cont = torch.tensor([[nan, 1.0, 0.0, 1.0]])
    value = torch.tensor([[nan, 40.0, 80.0, 12.0]])
    returns = dreamer.td_lambda_returns(reward, cont, value, 0.5, torch.full((1, 4), 0.25))
    assert returns.tolist() == [[20.0, 8.0, 22.0]]


def test_D5_D15_lambda_returns_by_hand_with_a_cut_in_the_middle():
    """The same, truncated at state 2: R_1 = 8 + 1/2 * 80 = 48, and R_0 = 4 + 1/2 (30 + 12) = 25.
    State 3 is the first of another episode; R_2 would mix the two, and is to be masked."""
    reward = torch.tensor([[0.0, 4.0, 8.0, 16.0]])
    value = torch.tensor([[0.0, 40.0, 80.0, 12.0]])
    mix = torch.tensor([[0.25, 0.25, 0.0, 0.25]])  # the chance to look past a state
    returns = dreamer.td_lambda_returns(reward, torch.ones(1, 4), value, 0.5, mix)
    assert returns.tolist() == [[25.0, 48.0, 22.0]]


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.5, 0.997])
def test_D5_lambda_returns_are_mixtures_of_n_step_returns(gamma, mix):
    """Terminated, truncated, and neither; continues between 0 and 1."""
    shape = (7, 9)
    reward, value = torch.randn(shape).double(), 5 * torch.randn(shape).double()
    cont = torch.rand(shape).double()
    cont[torch.rand(shape) < 0.2] = 0
    is_last = (torch.rand(shape) < 0.3).double()
    actual = dreamer.td_lambda_returns(reward, cont, value, gamma, mix * (1 - is_last))
    assert actual.shape == (7, 8)
    rows = [x.numpy() for x in (reward, cont, is_last, value)]
    for n, t in np.ndindex(7, 8):
        expected = mixture_of_n_steps(*(x[n] for x in rows), gamma, mix, t)
        assert actual[n, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_S1_S3_nothing_leaks_from_the_next_episode():
    """Before a last step, returns do not change with anything after it; before a terminal one, not
    even with its value. Truncated, the value of the last state counts in full."""
    torch.manual_seed(1)
    reward, value, cont = torch.randn(1, 6), torch.randn(1, 6), torch.ones(1, 6)
    mix = torch.tensor([[0.95, 0.95, 0.95, 0.0, 0.95, 0.95]])
    changed = [x.clone() for x in (reward, value)]
    for x in changed:
        x[:, 4:] += 100
    for is_terminal in (False, True):
        cont[:, 3] = 1 - float(is_terminal)
        left = dreamer.td_lambda_returns(reward, cont, value, 0.9, mix)
        right = dreamer.td_lambda_returns(changed[0], cont, changed[1], 0.9, mix)
        assert torch.equal(left[:, :3], right[:, :3])
        expected = reward[0, 3] + (0.0 if is_terminal else 0.9 * value[0, 3])
        assert left[0, 2].item() == pytest.approx(expected.item(), rel=1e-5)


# ---- losses of actor and critic


def actor_inputs(num=5, horizon=4, num_actions=3):
    logits = torch.randn(num, horizon, num_actions, dtype=torch.float64, requires_grad=True)
    action = one_hot(torch.randint(num_actions, (num, horizon)), num_actions).double()
    advantage, weight = torch.randn(num, horizon).double(), torch.rand(num, horizon).double()
    return logits, action, advantage, weight


def test_D6_D10_actor_loss_and_gradient_by_brute_force():
    """-mean w (A log pi(a) + c H): a mean over all N H steps, the entropy once. d log pi / d logits
    is a - pi, dH / d logits is -pi (log pi + H)."""
    logits, action, advantage, weight = actor_inputs()
    log_probs = torch.log_softmax(logits, -1)
    loss = dreamer.dreamer_actor_loss(log_probs, action, advantage, weight, 0.3)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected, pi = 0.0, torch.distributions.Categorical(logits=logits.detach())
    log_prob, entropy = pi.log_prob(action.argmax(-1)), pi.entropy()
    for n, t in np.ndindex(5, 4):
        objective = advantage[n, t] * log_prob[n, t] + 0.3 * entropy[n, t]
        expected -= weight[n, t] * objective / 20
        p, H = pi.probs[n, t], entropy[n, t]
        slope = advantage[n, t] * (action[n, t] - p) - 0.3 * p * (p.log() + H)
        torch.testing.assert_close(gradient[n, t], -weight[n, t] * slope / 20)
    assert loss.item() == pytest.approx(expected.item())


def test_D9_actor_gradient_is_that_of_finite_differences():
    """Through the 1 % that is uniform, as the actor has it, with and without entropy."""
    logits, action, advantage, weight = actor_inputs(num=2, horizon=2)

    def loss(x, entropy_coef):
        log_probs = dreamer.unimix(x)
        return dreamer.dreamer_actor_loss(log_probs, action, advantage, weight, entropy_coef)

    for entropy_coef in (0.0, 0.5):
        (gradient,) = torch.autograd.grad(loss(logits, entropy_coef), logits)
        assert gradient.abs().max() > 0.01
        for where in np.ndindex(logits.shape):
            step = torch.zeros_like(logits)
            step[where] = 1e-5
            with torch.no_grad():
                rise = loss(logits + step, entropy_coef) - loss(logits - step, entropy_coef)
            assert gradient[where].item() == pytest.approx(rise.item() / 2e-5, abs=1e-8)


def test_D9_actions_that_paid_become_more_likely():
    """REINFORCE, with an entropy of 0: one step up where A > 0, down where A < 0, by A w."""
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    action = one_hot(torch.tensor([[0, 2]]), 3)
    advantage, weight = torch.tensor([[2.0, -3.0]]), torch.tensor([[1.0, 0.5]])
    loss = dreamer.dreamer_actor_loss(torch.log_softmax(logits, -1), action, advantage, weight, 0.0)
    loss.backward()
    up = -logits.grad[0]
    expected = torch.tensor([[2 / 3, -1 / 3, -1 / 3], [0.25, 0.25, -0.5]])
    torch.testing.assert_close(up, expected * torch.tensor([[1.0], [1.0]]))


def test_D10_entropy_pulls_to_equal_probabilities():
    """Without advantages, the policy of least loss is uniform, and its loss -c log A."""
    logits = torch.randn(1, 1, 4, requires_grad=True)
    opt = torch.optim.Adam([logits], lr=0.1)
    zero, one, action = torch.zeros(1, 1), torch.ones(1, 1), one_hot(torch.tensor([[0]]), 4)
    for _ in range(200):
        loss = dreamer.dreamer_actor_loss(torch.log_softmax(logits, -1), action, zero, one, 0.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert loss.item() == pytest.approx(-0.5 * math.log(4), abs=1e-3)


def test_S9_advantage_and_weight_are_numbers():
    logits, action, advantage, weight = actor_inputs()
    advantage.requires_grad_()
    weight.requires_grad_()
    dreamer.dreamer_actor_loss(
        torch.log_softmax(logits, -1), action, advantage, weight, 0.1
    ).backward()
    assert logits.grad is not None and advantage.grad is None and weight.grad is None


def critic_inputs(num=4, horizon=3):
    logits = torch.randn(num, horizon, 255, requires_grad=True)
    returns, slow_value = 5 * torch.randn(num, horizon), 5 * torch.randn(num, horizon)
    return logits, returns, slow_value, torch.rand(num, horizon)


def test_D14_critic_loss_by_brute_force():
    """mean w (CE(R) + CE(slow)): both count in full."""
    logits, returns, slow_value, weight = critic_inputs()
    loss = dreamer.dreamer_critic_loss(logits, returns, slow_value, weight)
    log_probs, expected = torch.log_softmax(logits.detach().double(), -1).numpy(), 0.0
    for n, t in np.ndindex(4, 3):
        target = two_hot(returns[n, t].item()) + two_hot(slow_value[n, t].item())
        expected -= weight[n, t].item() * (target * log_probs[n, t]).sum() / 12
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_S9_targets_of_the_critic_are_numbers():
    logits, *targets = critic_inputs()
    for x in targets:
        x.requires_grad_()
    dreamer.dreamer_critic_loss(logits, *targets).backward()
    assert logits.grad is not None and all(x.grad is None for x in targets)


def test_S8_no_broadcast():
    """[N, H] with [N, H, 1], [1, H] or [H, N] is refused by every loss."""
    logits, action, advantage, weight = actor_inputs(num=3, horizon=4)
    log_probs = torch.log_softmax(logits, -1)
    good = [log_probs, action, advantage, weight]
    wrong = {1: action[:1], 2: advantage[:1], 3: weight[..., None]}
    wrong_too = {1: action.argmax(-1), 2: advantage.T, 3: weight[:, :1]}
    for where, x in [*wrong.items(), *wrong_too.items()]:
        with pytest.raises(AssertionError):
            dreamer.dreamer_actor_loss(*good[:where], x, *good[where + 1 :], 0.1)
    good = [*critic_inputs()]
    for where, x in itertools.product((1, 2, 3), (good[1][:1], good[1].T, good[1][..., None])):
        with pytest.raises(AssertionError):
            dreamer.dreamer_critic_loss(*good[:where], x, *good[where + 1 :])
    with pytest.raises(AssertionError):
        dreamer.two_hot_loss(torch.zeros(3, 4, 255), torch.zeros(3, 1))
    with pytest.raises(AssertionError):
        dreamer.two_hot_loss(torch.zeros(3, 254), torch.zeros(3))
    with pytest.raises(AssertionError):
        dreamer.continue_loss(torch.zeros(3, 4, 1), torch.zeros(3, 4))
    with pytest.raises(AssertionError):
        dreamer.reconstruction_loss(torch.zeros(3, 4, 2), torch.zeros(3, 1, 2))
    with pytest.raises(AssertionError):
        dreamer.kl_losses(random_latents(3, 4), random_latents(3, 1), 1.0)
    with pytest.raises(AssertionError):
        dreamer.kl_losses(random_latents(3), random_latents(3), 1.0)
    for where, x in itertools.product(range(4), (torch.zeros(3, 1), torch.zeros(4, 3))):
        columns = [torch.zeros(3, 4)] * 4
        columns[where] = x
        with pytest.raises(AssertionError):
            dreamer.td_lambda_returns(*columns[:3], 0.9, columns[3])
    with pytest.raises(AssertionError):
        dreamer.td_lambda_returns(*[torch.zeros(4)] * 3, 0.9, torch.zeros(4))


def test_S8_losses_are_means_of_rows():
    """Of one row alone, of all together; and a weight belongs to its own row."""
    logits, action, advantage, weight = actor_inputs()
    log_probs = torch.log_softmax(logits.detach(), -1)
    rows = (log_probs, action, advantage, weight)
    whole = dreamer.dreamer_actor_loss(*rows, 0.1)
    parts = [dreamer.dreamer_actor_loss(*(x[n : n + 1] for x in rows), 0.1) for n in range(5)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    assert abs(whole - dreamer.dreamer_actor_loss(*rows[:3], weight.roll(1, 0), 0.1)) > 1e-3
    rows = [x.detach() for x in critic_inputs()]
    whole = dreamer.dreamer_critic_loss(*rows)
    parts = [dreamer.dreamer_critic_loss(*(x[n : n + 1] for x in rows)) for n in range(4)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    assert abs(whole - dreamer.dreamer_critic_loss(*rows[:3], rows[3].roll(1, 0))) > 1e-3
