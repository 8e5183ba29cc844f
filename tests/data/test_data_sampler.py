"""One global order: equal for every world size, nothing lost or repeated, exact after a restart."""

from itertools import islice

import numpy as np
import pytest
import torch

from sidestream.config.errors import ConfigError
from sidestream.data.batch import Batch
from sidestream.data.corpus import Corpus
from sidestream.data.loaders import train_loader, val_loader
from sidestream.data.sampler import StepSampler
from sidestream.data.sequences import SequenceDataset

N, B = 22, 4  # 5.5 steps an epoch: every second epoch ends inside a step


def _sampler(rank=0, world_size=1, **changes):
    common = {"global_batch_size": B, "seed": 7, "shuffle": True}
    num_sequences = changes.pop("num_sequences", N)
    return StepSampler(num_sequences, rank=rank, world_size=world_size, **(common | changes))


def _corpus(train=2000, val=1000):
    tokens = np.random.default_rng(0).integers(0, 256, train + val).astype(np.uint8)
    return Corpus("x", 256, tokens[:train], tokens[train:], "sum")


def _train(corpus, rank=0, world_size=1, **changes):
    common = {"seq_length": 16, "global_batch_size": B, "shuffle": True, "seed": 7}
    return train_loader(corpus, rank=rank, world_size=world_size, **(common | changes))


def _val(corpus, rank=0, world_size=1, **changes):
    common = {"seq_length": 16, "global_batch_size": B}
    return val_loader(corpus, rank=rank, world_size=world_size, **(common | changes))


def test_windows_share_only_their_border_token():
    dataset = SequenceDataset(np.arange(33, dtype=np.uint8), 8)
    assert len(dataset) == 4
    assert dataset[1].tolist() == list(range(8, 17))
    assert dataset[3].tolist() == list(range(24, 33))
    assert dataset[0].dtype == torch.int64
    assert len(SequenceDataset(np.zeros(32, np.uint8), 8)) == 3
    with pytest.raises(ConfigError, match=r"data\.seq_length=33"):
        SequenceDataset(np.zeros(33, np.uint8), 33)


def test_the_order_is_frozen():
    # Written down from the first version: resume and comparisons over numpy versions rest on it.
    assert _sampler(seed=1234).step_indices(0).tolist() == [8, 11, 16, 13]


def test_seed_and_epoch_change_the_order():
    epochs = [
        np.concatenate([_sampler().step_indices(s) for s in range(11)])[i * N : i * N + N] for i in (0, 1)
    ]
    assert epochs[0].tolist() != epochs[1].tolist()
    assert _sampler(seed=8).step_indices(0).tolist() != _sampler().step_indices(0).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_holds_each_sequence_once(shuffle):
    sampler = _sampler(shuffle=shuffle)
    order = np.concatenate([sampler.step_indices(s) for s in range(11)])
    for epoch in order.reshape(2, N):
        assert sorted(epoch) == list(range(N))
        assert shuffle or epoch.tolist() == list(range(N))


def test_a_step_larger_than_the_corpus_covers_several_epochs():
    order = _sampler(num_sequences=3, global_batch_size=9).step_indices(0).reshape(3, 3)
    assert np.sort(order).tolist() == [[0, 1, 2]] * 3


def test_the_order_of_asking_does_not_matter():
    sampler = _sampler()
    backwards = [sampler.step_indices(s).tolist() for s in reversed(range(12))]
    assert backwards[::-1] == [_sampler().step_indices(s).tolist() for s in range(12)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_draw_the_same_steps(world_size):
    ranks = [islice(_sampler(rank, world_size), 12) for rank in range(world_size)]
    steps = [[index for part in parts for index in part] for parts in zip(*ranks)]
    assert steps == [_sampler().step_indices(s).tolist() for s in range(12)]


def test_a_restart_continues_at_the_committed_step_with_any_world_size():
    first = _sampler(0, 2)
    list(islice(first, 9))  # fetched ahead
    first.commit(7)
    second = _sampler(0, 1)
    second.load_state_dict(first.state_dict())
    assert next(iter(second)) == _sampler().step_indices(7).tolist()


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"global_batch_size": 8}, {"num_sequences": 21}, {"shuffle": False}]
)
def test_a_checkpoint_of_another_order_is_refused(change):
    (key,) = change
    with pytest.raises(ValueError, match=f"{key}="):
        _sampler().load_state_dict(_sampler(**change).state_dict())


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="multiple of the world size 3"):
        _sampler(0, 3)
    with pytest.raises(ValueError, match="multiple of the world size 3"):
        _val(_corpus(), 0, 3)


def windows(loader):
    """The [B, L + 1] windows that the batches were made of."""
    for batch in loader:
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        yield torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)


def test_train_batches_do_not_depend_on_the_world_size():
    corpus = _corpus()
    whole = list(islice(windows(_train(corpus)), 40))
    assert whole[0].shape == (B, 17)
    assert whole[0].dtype == torch.int64
    for world_size in (2, 4):
        ranks = [islice(windows(_train(corpus, rank, world_size)), 40) for rank in range(world_size)]
        assert all(torch.equal(torch.cat(parts), batch) for parts, batch in zip(zip(*ranks), whole))


def test_the_loader_resumes_through_its_state():
    corpus = _corpus()
    batches = list(islice(windows(_train(corpus)), 10))
    loader = _train(corpus)
    list(islice(loader, 8))
    loader.commit(6)
    resumed = _train(corpus)
    resumed.load_state_dict(loader.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(islice(windows(resumed), 4), batches[6:]))


def test_loaders_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    next(iter(_train(_corpus())))
    next(iter(_val(_corpus())))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_batches", [None, 3, 1000])
def test_validation_is_the_same_set_for_every_world_size(num_batches):
    corpus = _corpus()
    whole = list(windows(_val(corpus, num_batches=num_batches)))
    assert len(whole) == (3 if num_batches == 3 else 15)  # 62 sequences
    assert all(torch.equal(a, b) for a, b in zip(whole, windows(_val(corpus, num_batches=num_batches))))
    for world_size in (2, 4):
        loaders = [_val(corpus, rank, world_size, num_batches=num_batches) for rank in range(world_size)]
        assert {len(loader) for loader in loaders} == {len(whole)}
        assert all(
            torch.equal(torch.cat(parts), batch) for parts, batch in zip(zip(*map(windows, loaders)), whole)
        )


def test_validation_is_spread_over_the_split_without_repeats():
    val = np.repeat(np.arange(50, dtype=np.uint8), 16)
    corpus = Corpus("x", 256, val, val, "sum")
    firsts = torch.cat(list(windows(_val(corpus, num_batches=3))))[:, 0].tolist()
    assert len(set(firsts)) == 12
    assert firsts == sorted(firsts)
    assert firsts[-1] > 40


@pytest.mark.parametrize("bad", [-1, 200, 70000])
def test_a_token_the_model_does_not_know_stops_the_run(bad):
    tokens = np.zeros(200, np.int64)
    tokens[100] = bad
    loader = _train(Corpus("x", 200, tokens, tokens, "sum"), shuffle=False)
    with pytest.raises(ValueError, match=f"{bad}.*expected 0 to 199"):
        list(islice(loader, 3))


def test_a_validation_split_below_one_batch_is_refused():
    with pytest.raises(ConfigError, match=r"data\.global_batch_size=4: .*3 sequences"):
        _val(_corpus(val=50))


def test_what_is_fetched_is_not_trained_yet():
    sampler = _sampler()
    drawn = iter(sampler)
    first = [next(drawn) for _ in range(3)]
    assert sampler.state_dict()["next_step"] == 0 and next(iter(sampler)) == first[0]


def test_targets_are_the_tokens_behind_and_the_rest_of_a_batch_is_a_micro_batch():
    sequences = torch.arange(25).view(5, 5)
    parts = Batch.of(sequences).split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    whole = Batch.join(parts)
    assert torch.equal(whole.inputs, sequences[:, :-1]) and torch.equal(whole.targets, sequences[:, 1:])
