"""Packed documents: the plan, the rows, and that a model treats a packed document like one on its own."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sidestream.config.errors import ConfigError
from sidestream.data import document_packing
from sidestream.data.batch import IGNORE, Batch
from sidestream.data.corpus import Corpus
from sidestream.data.document_packing import document_ends, packed_dataset, plan_rows
from sidestream.data.loaders import train_loader, val_loader
from sidestream.model.context import TokenContext
from tests.core.build_tiny import Setup, full, make_model, make_optimizer, make_step
from tests.rank_pool import ranks

EOS, VOCAB, L = 0, 64, 16
LENGTHS = [5, 40, 1, 9, 17, 2, 16, 33, 12, 3, 8, 25, 7, 4, 11, 6, 30, 10, 2, 19] * 3


def make_corpus(folder=None, *, last_is_whole=True):
    """Documents of `LENGTHS` tokens, each ended by `EOS`; two of them are longer than two rows, one is empty."""
    generator = np.random.default_rng(3)
    documents = [[*generator.integers(1, VOCAB, n - 1), EOS] for n in LENGTHS]
    tokens = np.concatenate(documents).astype(np.uint8)
    tokens = tokens if last_is_whole else tokens[:-1]
    return Corpus("x", VOCAB, tokens, tokens, "sum", folder=folder, eos_token=EOS)


def loader(corpus, rank=0, world=1, **changes):
    common = {"seq_length": L, "global_batch_size": 8, "shuffle": True, "seed": 7, "packing": "documents"}
    return train_loader(corpus, rank=rank, world_size=world, **(common | changes))


def test_the_picture_in_the_module():
    corpus = replace(make_corpus(), train_tokens=np.array([1, 2, 3, 0, 4, 5, 6, 7, 0], np.uint8))
    row = packed_dataset(corpus, "train", 8)[0]
    assert row.inputs.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert row.targets.tolist() == [[2, 3, 0, 5, 6, 7, 0, IGNORE]]
    assert row.segments.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1]]
    assert TokenContext.of(row.segments).positions[0, :7].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert (row.inputs.dtype, row.segments.dtype) == (torch.int64, torch.int32)


def test_ends_of_documents_are_found_across_chunks(monkeypatch):
    tokens = make_corpus(last_is_whole=False).train_tokens
    expected = np.cumsum(LENGTHS)
    expected[-1] -= 1
    for chunk in (1, 7, 2**24):
        monkeypatch.setattr(document_packing, "_CHUNK", chunk)
        assert document_ends(tokens, EOS).tolist() == expected.tolist()
    assert document_ends(tokens[:0], EOS).tolist() == []


@pytest.mark.parametrize("open_rows", [1, 4, 64])
@pytest.mark.parametrize("seq_length", [1, 7, 16, 100])
def test_every_prediction_is_in_exactly_one_row_and_no_row_is_overfull(seq_length, open_rows):
    ends = np.cumsum(LENGTHS)
    pieces = plan_rows(ends, seq_length, open_rows)
    predicted = np.concatenate([np.arange(start + 1, start + 1 + length) for _, start, length in pieces])
    first_tokens = np.concatenate([[0], ends[:-1]])
    assert sorted(predicted) == sorted(set(range(ends[-1])) - set(first_tokens.tolist()))
    held = np.bincount(pieces[:, 0], weights=pieces[:, 2])
    assert (held > 0).all() and (held <= seq_length).all()
    assert (np.diff(pieces[:, 0]) >= 0).all()


def test_first_fit():
    # Predictions 5, 3, 4, 2, 8, 1 in rows of 8: the long one does not close a row that still has space.
    pieces = plan_rows(np.cumsum([6, 4, 5, 3, 9, 2]), 8)
    assert pieces[:, [0, 2]].tolist() == [[0, 5], [0, 3], [1, 4], [1, 2], [1, 1], [2, 8]]


def test_no_documents_no_rows():
    assert plan_rows(np.empty(0, np.int64), 8).shape == (0, 3)
    assert plan_rows(np.array([1, 2]), 8).shape == (0, 3)  # end tokens alone predict nothing
    with pytest.raises(ConfigError, match=r"data\.packing=documents: .*no document"):
        packed_dataset(replace(make_corpus(), train_tokens=np.zeros(3, np.uint8)), "train", 8)
    with pytest.raises(ConfigError, match=r"data\.packing=documents: .*where documents end"):
        packed_dataset(replace(make_corpus(), eos_token=None), "train", 8)


def test_fill_is_the_share_of_places_that_predict():
    rows = packed_dataset(make_corpus(), "train", L)
    places = torch.cat([rows[i].targets for i in range(len(rows))])
    assert rows.fill == pytest.approx(float((places != IGNORE).float().mean()))
    assert rows.fill > 0.9
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_the_plan_is_kept_and_not_trusted_when_damaged_or_of_other_data(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "cache")
    expected = packed_dataset(corpus, "train", L).pieces.tolist()
    (path,) = (tmp_path / "cache").glob("packing-train-*")
    with monkeypatch.context() as patch:
        patch.setattr(document_packing, "plan_rows", lambda *_: pytest.fail("planned again"))
        assert packed_dataset(corpus, "train", L).pieces.tolist() == expected
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-24], whole[:-2] + b"ab", b""):
        path.write_bytes(damaged)
        assert packed_dataset(corpus, "train", L).pieces.tolist() == expected
        assert path.read_bytes() == whole
    packed_dataset(replace(corpus, checksum="other"), "train", L)
    assert path.read_bytes() != whole


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    assert len(packed_dataset(make_corpus(tmp_path / "file" / "below"), "train", L)) > 10


def test_batches_do_not_depend_on_the_world_size():
    def rows(batches):
        return [torch.cat([b.inputs, b.targets, b.segments.long()], dim=1) for b in islice(batches, 12)]

    corpus = make_corpus()
    whole = rows(loader(corpus))
    for world in (2, 4):
        parts = zip(*(rows(loader(corpus, rank, world)) for rank in range(world)))
        assert all(torch.equal(torch.cat(part), batch) for part, batch in zip(parts, whole))
    evaluated = val_loader(
        corpus, seq_length=L, global_batch_size=4, rank=0, world_size=1, packing="documents"
    )
    assert all(batch.segments is not None for batch in evaluated)


def test_the_loader_resumes_through_its_state():
    corpus = make_corpus()
    batches = list(islice(loader(corpus), 10))
    first = loader(corpus)
    list(islice(first, 8))
    first.commit(6)
    second = loader(corpus, 0, 2)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(b.inputs, a.inputs[:4]) for a, b in zip(batches[6:], islice(second, 4)))


def packed_losses(rank, world, balance):
    """Sum of losses of each document, packed in batches and alone; documents as in `LENGTHS`, at most L predictions."""
    corpus = make_corpus()
    model = make_model(Setup(dispatcher="local", balance=balance)).eval()
    rows = packed_dataset(corpus, "train", L)
    packed, alone = [], []
    with torch.no_grad():
        for index in range(len(rows)):
            row = rows[index]
            logits = model(row.inputs, TokenContext.of(row.segments))
            losses = F.cross_entropy(logits[0].float(), row.targets[0], ignore_index=IGNORE, reduction="none")
            for segment in range(int(row.segments.max()) + 1):
                place = row.segments[0] == segment
                packed.append(float(losses[place].sum()))
                piece = Batch(row.inputs[:, place], row.targets[:, place])
                alone.append(float(model.loss_sums(piece).nll))
    return packed, alone


def test_a_packed_document_has_the_loss_it_has_alone():
    packed, alone = ranks(1).run(packed_losses, balance="none")[0]
    assert len(packed) == sum(-(-(length - 1) // L) for length in LENGTHS)  # pieces of at most L predictions
    assert packed == pytest.approx(alone, rel=1e-5)


def train_packed(rank, world, setup, padding=0):
    """Steps on packed documents; `padding` is what padded places hold."""
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    found = {"loss": [], "targets": [], "padded": []}
    for index, batch in enumerate(islice(loader(make_corpus(), rank, world), setup.steps)):
        batch = replace(batch, inputs=batch.inputs.masked_fill(batch.segments < 0, padding))
        step.attempt(batch)
        if index == 0:
            found["grads"] = {name: full(p.grad) for name, p in model.named_parameters()}
        report = step.check()
        found["targets"].append(int(batch.num_targets()))
        found["padded"].append(int((batch.segments < 0).sum()))
        found["counts"] = report.counts
        found["norm"] = float(step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm))
        found["loss"].append(report.loss)
    found["params"] = {name: full(p) for name, p in model.named_parameters()}
    step.reduction.close()
    model.parts.dispatcher.close()
    return found


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_what_padding_holds_changes_nothing(world, ep):
    # Loss, gradients, counts and parameters after two steps, to the last bit.
    setup = Setup(ep=ep, steps=2)
    zero, other = (ranks(world).run(train_packed, setup=setup, padding=token) for token in (0, 41))
    for a, b in zip(zero, other):
        assert (a["loss"], a["norm"], a["targets"]) == (b["loss"], b["norm"], b["targets"])
        assert torch.equal(a["counts"], b["counts"])
        for kind in ("grads", "params"):
            assert all(torch.equal(value, b[kind][name]) for name, value in a[kind].items())
    for step in range(setup.steps):
        padded, targets = (sum(a[kind][step] for a in zero) for kind in ("padded", "targets"))
        assert padded > 0 and padded + targets == 8 * L  # every place either predicts or is padding
    # The last step's counts: padding takes no expert.
    assert (zero[0]["counts"].sum(dim=1) == targets * setup.top_k).all()


def close(a, b, scale=None):
    return (a - b).abs().max() <= 5e-6 * (b.abs().max() if scale is None else scale)


CASES = [(w, ep, acc) for w, ep in [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)] for acc in (1, 2)]
SAMPLE = [(1, 1, 2), (2, 1, 1), (2, 2, 2), (4, 2, 1)]


@pytest.mark.parametrize(
    ("world", "ep", "accumulation"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full) for case in CASES],
)
def test_packed_parity(world, ep, accumulation):
    # SGD: AdamW turns rounding into whole steps where a gradient is almost zero.
    setup = Setup(steps=2, optimizer="sgd")
    reference = ranks(1).run(train_packed, setup=setup.with_(dispatcher="local", fusion="loop"))[0]
    found = ranks(world).run(train_packed, setup=setup.with_(ep=ep, accumulation=accumulation))
    targets = [sum(step) for step in zip(*(rank["targets"] for rank in found))]
    assert targets == reference["targets"]
    for rank in found:
        assert rank["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert rank["norm"] == pytest.approx(reference["norm"], rel=5e-6)
        assert torch.equal(rank["counts"], reference["counts"])
        for kind in ("grads", "params"):
            different = [n for n, value in reference[kind].items() if not close(rank[kind][n], value)]
            assert not different, (kind, different)
