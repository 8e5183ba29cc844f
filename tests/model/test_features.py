"""Every feature of the model against its transcription: loss and the gradient of each parameter, fp32."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from sidestream.data.batch import IGNORE, Batch
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.layers import Embedding
from tests.core.build_tiny import Setup, full, local_batch, make_model, make_step, run_steps
from tests.model.shapes import SHAPES
from tests.model.transcription import log_likelihood
from tests.rank_pool import ranks

SEQ = 16


def batch_of(data):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (2, SEQ + 1), generator=generator)
    if data == "rows":
        return Batch.of(tokens)
    segments = torch.tensor([[0] * 6 + [1] * 1 + [2] * 9, [0] * 9 + [-1] * 2 + [1] * 3 + [-1] * 2])
    targets = torch.where(segments < 0, IGNORE, tokens[:, 1:])
    return Batch(tokens[:, :-1], targets, segments.to(torch.int32))


def documents(batch):
    """(row, first, past the last) of each document."""
    for row in range(len(batch)):
        segments = torch.zeros(SEQ) if batch.segments is None else batch.segments[row]
        for document in segments[segments >= 0].unique():
            where = (segments == document).nonzero().flatten()
            yield row, int(where[0]), int(where[-1]) + 1


def both(rank, world, setup, data):
    """Loss and gradients of the model and of its transcription."""
    model = make_model(setup)
    generator = torch.Generator().manual_seed(6)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):  # ones would hide a norm that forgets its weight
            p.data += 0.3 * torch.randn(p.shape, generator=generator)
    batch = batch_of(data)
    loss = model.loss_sums(batch).nll
    loss.backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}

    weights = {name: full(p).requires_grad_() for name, p in model.named_parameters()}
    expected = torch.zeros(())
    for row, first, last in documents(batch):
        tokens, targets = batch.inputs[row, first:last], batch.targets[row, first:last]
        chosen = log_likelihood(weights, setup.shape, tokens, top_k=setup.top_k)
        expected = expected - chosen.gather(1, targets.unsqueeze(1)).sum()
    expected.backward()
    return loss.item(), grads, expected.item(), {name: w.grad for name, w in weights.items()}


@lru_cache
def compared(feature, data):
    setup = Setup(dispatcher="local", balance="none", shape=SHAPES[feature])
    return ranks(1).run(both, setup=setup, data=data)[0]


# The largest difference seen is 6e-6 of a tensor's largest gradient.
@pytest.mark.parametrize("data", ["rows", "documents"])
@pytest.mark.parametrize("feature", SHAPES)
@pytest.mark.sample(12)
def test_a_feature_equals_its_transcription(feature, data):
    loss, grads, expected, expected_grads = compared(feature, data)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        worst = (grads[name] - grad).abs().max() / grad.abs().max()
        assert worst < 5e-5, f"{name}: {worst:.1e} of the largest entry"


def test_a_feature_changes_the_model():
    """The comparison above would also hold for a feature that both forget."""
    losses = {feature: compared(feature, "rows")[2] for feature in SHAPES}
    assert losses.pop("window_longer_than_the_sequence") == losses["plain"]
    assert len(set(losses.values())) == len(losses)


def test_a_window_counts_the_token_itself_and_stays_in_its_document():
    context = PLAIN.within(3, seq_length=5, device=torch.device("cpu"))
    assert context.mask[0, 0].sum(1).tolist() == [1, 2, 3, 3, 3]
    assert context.mask[0, 0, 4].tolist() == [False, False, True, True, True]
    assert PLAIN.within(5, seq_length=5, device=torch.device("cpu")) is PLAIN
    packed = TokenContext.of(torch.tensor([[0, 0, 1, 1, 1]]))
    within = packed.within(2, seq_length=5, device=torch.device("cpu"))
    assert within.mask[0, 0].sum(1).tolist() == [1, 2, 1, 2, 2]
    assert within.positions is packed.positions
    assert within.valid is packed.valid


def test_parameters_have_the_names_that_conversion_uses():
    names = ranks(1).run(names_of, setup=Setup(shape=SHAPES["everything"]))[0]
    assert "head.weight" not in names  # tied: one parameter, one name
    assert {n.removeprefix("blocks.1.") for n in names if n.startswith("blocks.1.")} == {
        "attention_norm.weight",
        "self_attention.qkv.weight",
        "self_attention.q_norm.weight",
        "self_attention.k_norm.weight",
        "self_attention.out.weight",
        "norm.weight",
        "moe.gate",
        "moe.selection_bias",
        "moe.experts.w_gate_up",
        "moe.experts.w_down",
        "moe.shared_expert.gate_up.weight",
        "moe.shared_expert.down.weight",
        "moe.shared_expert.output_gate.weight",
    }
    names = ranks(1).run(names_of, setup=Setup(shape=SHAPES["latent"]))[0]
    attention = {n.removeprefix("blocks.0.self_attention.") for n in names if "blocks.0.self_attention" in n}
    latent = {"q_a", "q_norm", "q_b", "kv_a", "kv_norm", "kv_b", "out"}
    assert attention == {f"{name}.weight" for name in latent}


def names_of(rank, world, setup):
    return list(make_model(setup).state_dict())


@pytest.mark.parametrize("feature", ["everything", "everything_latent"])
def test_recomputation_changes_nothing(feature):
    setup = Setup(dispatcher="local", shape=SHAPES[feature])
    plain = ranks(1).run(run_steps, setup=setup)[0]
    recomputed = replace(setup, shape=replace(setup.shape, activation_checkpointing=True))
    result = ranks(1).run(run_steps, setup=recomputed)[0]
    assert result["loss"] == plain["loss"]
    for name, grad in plain["grads"].items():
        assert torch.equal(result["grads"][name], grad), name


def dtypes_in_bf16(rank, world, setup):
    model = make_model(setup)
    seen = {}
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(
                lambda module, args, out, name=name: seen.update(
                    {name: torch.equal(out, _normed_in_fp32(module, args[0]))}
                )
            )
    step = make_step(setup, model, world)
    step.attempt(local_batch(setup, 0, rank, world))
    step.check()
    return seen


def _normed_in_fp32(norm, x):
    x32 = x.detach().float()
    return (x32 * (x32.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.float()).to(x.dtype)


@pytest.mark.parametrize("feature", ["everything", "everything_latent"])
@pytest.mark.parametrize("precision", [{"autocast": True}, {"dtype": torch.bfloat16}], ids=str)
def test_statistics_of_norms_are_fp32_in_bf16(feature, precision):
    seen = ranks(1).run(dtypes_in_bf16, setup=Setup(shape=SHAPES[feature], alignment=16, **precision))[0]
    assert len(seen) == 3 * 4 + 1  # per block two norms and two of attention
    # One rounding to bf16 of the same fp32 numbers; the fp32 sums differ in order.
    assert sum(seen.values()) >= len(seen) - 1


def test_the_gradient_of_a_bf16_embedding_is_summed_in_fp32():
    table = Embedding(3, 8, dtype=torch.bfloat16)
    tokens = torch.tensor([[1] * 256, [2, 2] + [0] * 254])
    grad = torch.ones(2, 256, 8).bfloat16()
    grad[0, 0] = grad[1, 0] = 256.0
    table(tokens).backward(grad)
    assert table.weight.grad[:, 0].tolist() == [254.0, 512.0, 256.0]  # 256 + 255 lies between 510 and 512


def test_halves_keep_the_padding_of_their_sequences():
    valid = torch.rand(3, 7) < 0.5  # the first half has two of the three sequences
    first, second = TokenContext(valid=valid.reshape(-1)).halves(3)
    assert torch.equal(first.valid, valid[:2].reshape(-1)) and torch.equal(second.valid, valid[2])


def test_residual_projections_start_smaller():
    model = ranks(1).run(initial_scales)[0]
    assert set(model) == {"residual", "other"}
    expected = (2 * Setup().shape.num_layers) ** -0.5
    assert model["residual"] / model["other"] == pytest.approx(expected, rel=0.05)


def initial_scales(rank, world):
    """Standard deviation of what writes to the residual stream, and of what reads it."""
    weights = {name: full(p) for name, p in make_model(Setup()).named_parameters() if p.dim() > 1}
    residual = [name for name in weights if name.endswith(("out.weight", "down.weight", "w_down"))]
    groups = {"residual": residual, "other": [name for name in weights if name not in residual]}
    return {
        kind: float(torch.cat([weights[name].reshape(-1) for name in names]).std())
        for kind, names in groups.items()
    }
