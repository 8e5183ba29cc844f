"""The wire: numbers, errors, accounting. When work and transfers happen is in test_overlap.py."""

import random

import pytest
import torch

from sidestream.exchange import link
from sidestream.exchange.link import NativeLink, ThrottledLink
from sidestream.exchange.ops import Channel, new_ticket, start_, wait_
from sidestream.exchange.transfer import Transfer
from sidestream.overlap.path import RoutedPath
from tests.core.build_tiny import SHAPE, Setup, local_batch, make_model, make_step, parallel_for, run_steps
from tests.core.scale_experts import Scales, routing_of, run_path, scale_rows, wire
from tests.rank_pool import ranks

# counts[s][d]: rows that rank s sends to rank d
COUNTS = {
    "even": [[2, 2], [2, 2]],
    "uneven": [[1, 4], [3, 0]],
    "nothing to send": [[0, 0], [5, 2]],
    "nothing to receive": [[3, 0], [2, 0]],
    "nothing at all": [[0, 0], [0, 0]],
    "four ranks": [[0, 3, 1, 2], [4, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
}


def numbered_rows(counts, source):
    """Rows of `source`, `[N, 3]`, different everywhere."""
    first = 100.0 * source
    return torch.arange(first, first + 3 * sum(counts[source])).view(-1, 3)


def up_grad(counts, rank):
    """Gradient of what `rank` receives, `[R, 3]`."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(row[rank] for row in counts), 3, generator=generator)


def exchange(rank, world, counts):
    channel = Channel(parallel_for(world).ep_group)
    x = numbered_rows(counts, rank).requires_grad_()
    send, recv = torch.tensor(counts[rank]), torch.tensor([row[rank] for row in counts])
    transfer = Transfer(channel, send, recv, "test")
    out = transfer.finish(transfer.start(x, num_received=int(recv.sum())))
    out.backward(up_grad(counts, rank))
    channel.close()
    return out.detach(), x.grad, channel.bytes_sent


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_and_gradients_equal_a_gather_in_one_process(counts):
    world = len(counts)
    sources = [numbered_rows(counts, s).requires_grad_() for s in range(world)]
    pieces = [x.split(counts[s]) for s, x in enumerate(sources)]
    expected = [torch.cat([pieces[s][d] for s in range(world)]) for d in range(world)]
    torch.autograd.backward(expected, [up_grad(counts, d) for d in range(world)])
    for rank, (out, grad, sent) in enumerate(ranks(world).run(exchange, counts=counts)):
        assert torch.equal(out, expected[rank]) and torch.equal(grad, sources[rank].grad)
        elsewhere = [
            sum(counts[rank]) - counts[rank][rank],
            sum(row[rank] for row in counts) - counts[rank][rank],
        ]
        assert sent == 3 * 4 * sum(elsewhere)  # forward there, backward back


def several_in_flight(rank, world, order):
    channel = Channel(parallel_for(world).ep_group)
    counts = torch.full((world,), 2)
    leaves, transfers = [], []
    for index in range(3):
        x = (torch.arange(2.0 * world) + 10 * rank + 100 * index).unsqueeze(1).requires_grad_()
        transfer = Transfer(channel, counts, counts, f"t{index}")
        transfers.append((transfer, transfer.start(x, num_received=2 * world)))
        leaves.append(x)
    assert channel.pending == 3
    outs = [None] * 3
    for index in order:
        transfer, token = transfers[index]
        outs[index] = transfer.finish(token)
    sum((index + 1) * (rank + 1) * out.sum() for index, out in enumerate(outs)).backward()
    assert channel.pending == 0
    channel.close()
    return [out.flatten().tolist() for out in outs], [x.grad.flatten().tolist() for x in leaves]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_transfers_in_flight_finish_in_any_order(order):
    for rank, (outs, grads) in enumerate(ranks(2).run(several_in_flight, order=order)):
        for index in range(3):
            first = 100.0 * index + 2 * rank
            assert outs[index] == [first, first + 1, first + 10, first + 11]
            assert grads[index] == [index + 1.0, index + 1.0, 2.0 * (index + 1), 2.0 * (index + 1)]


# Errors.


def wrong_counts(rank, world):
    channel = Channel(parallel_for(world).ep_group)
    x, two = torch.ones(4, 1), torch.tensor([2, 2])
    if rank == 0:  # alone, so a rank that had communicated would hang
        for send, recv in [([2, 3], [2, 2]), ([2, 2], [2, 3])]:
            with pytest.raises(
                ValueError, match=r"bad: counts do not fit the buffers: send \[2, .\] from 4 rows"
            ):
                Transfer(channel, torch.tensor(send), torch.tensor(recv), "bad").start(x, num_received=4)
    assert channel.pending == 0 and channel.bytes_sent == 0
    good = Transfer(channel, two, two, "good")
    out = good.finish(good.start(x, num_received=4))
    channel.close()
    return out.sum().item()


def test_counts_that_do_not_fit_raise_before_communication():
    assert ranks(2).run(wrong_counts, limit_s=120) == [4.0, 4.0]


def partly_filled(rank, world):
    """Buffers of six rows, of which rank 0 sends three and rank 1 sends one, all to rank 1."""
    channel = Channel(parallel_for(world).ep_group)
    send, recv = (torch.tensor(n) for n in ([[0, 3], [0, 1]][rank], [[0, 0], [3, 1]][rank]))
    x = torch.arange(1.0 + 10 * rank, 7.0 + 10 * rank).unsqueeze(1).requires_grad_()
    transfer = Transfer(channel, send, recv, "partly")
    out = transfer.finish(transfer.start(x, num_received=6))
    out.backward(100 * torch.arange(1.0, 7.0).unsqueeze(1))
    channel.close()
    here, there = int(recv.sum()), int(send.sum())
    return out[:here].flatten().tolist(), x.grad[:there].flatten().tolist(), channel.bytes_sent, out.shape


def test_counts_may_leave_room_in_the_buffers():
    first, second = ranks(2).run(partly_filled)
    assert first[:3] == ([], [100.0, 200.0, 300.0], 3 * 4)
    assert second[:3] == ([1.0, 2.0, 3.0, 11.0], [400.0], 3 * 4)  # the gradient of three rows travels back
    assert first[3] == second[3] == (6, 1)


def test_close_reports_a_transfer_that_nobody_waited_for():
    channel = Channel(None)
    counts, out, ticket = torch.tensor([1]), torch.empty(1), new_ticket()
    start_(out, torch.ones(1), counts, counts, channel.id, ticket, "lost")
    with pytest.raises(AssertionError, match="1 transfers were started and never waited for"):
        channel.close()
    wait_(out, channel.id, ticket)
    channel.close()
    assert out.item() == 1.0


def test_a_token_has_one_user():
    channel = Channel(None)
    x, counts = torch.ones(2, 1, requires_grad=True), torch.tensor([2])
    transfer = Transfer(channel, counts, counts, "twice")
    token = transfer.start(x, num_received=2)
    y = transfer.finish(token)
    with pytest.raises(AssertionError, match="the token must have one user"):
        (y.sum() + token.sum()).backward()


# Odd and unequal token counts.


def unequal_tokens(rank, world, tokens, ep):
    model = Scales([2.0, 3.0, 5.0, 7.0], parallel_for(ep))
    all_x = torch.arange(1.0, sum(tokens) + 1)
    ids = torch.tensor([[random.Random(i).randrange(4)] for i in range(sum(tokens))])
    x = all_x.split(tokens)[rank].clone().requires_grad_()
    y = model(x, routing_of(ids.split(tokens)[rank].tolist()))
    model.backward((y**2).sum() / sum(tokens))
    grads = model.scale_grads()
    model.close()
    return y.tolist(), x.grad.tolist(), grads


@pytest.mark.parametrize("tokens", [(7, 7), (15, 16), (1, 0), (17, 3)])
def test_unequal_tokens_per_rank(tokens):
    ((y, x_grad, grads),) = ranks(1).run(unequal_tokens, tokens=[sum(tokens)], ep=1)
    two = ranks(2).run(unequal_tokens, tokens=list(tokens), ep=2, limit_s=120)
    assert two[0][0] + two[1][0] == pytest.approx(y)
    assert two[0][1] + two[1][1] == pytest.approx(x_grad)
    assert two[0][2] == two[1][2] == pytest.approx(grads)


# Accounting.


def bytes_on_wire(rank, world, setup):
    model = make_model(setup)
    step = make_step(setup, model, world)
    step.attempt(local_batch(setup, 0, rank, world))
    return step.check().bytes_on_wire


@pytest.mark.parametrize(("autocast", "row_bytes"), [(False, 4 * 64), (True, 2 * 64)])
def test_bytes_on_wire(autocast, row_bytes):
    # All tokens choose all experts, so half of the routes leave the rank.
    setup = Setup(ep=2, top_k=8, autocast=autocast)
    routes = 8 * 16 * 8 // 2
    per_layer = routes * (
        4 * row_bytes + (4 + 2) + 4
    )  # dispatch, combine and their reverses; weights there and back, 16-bit ids there
    counts = 2 * (1 + 4) * 8  # each tells the other how many rows come, and of which of its four experts
    expected = len(SHAPE.moe_blocks) * (per_layer + counts)
    assert ranks(2).run(bytes_on_wire, setup=setup) == [expected] * 2


def test_dispatcher_without_other_ranks_sends_nothing():
    dispatcher = wire("alltoall", num_experts=2)
    path = RoutedPath(
        torch.ones(2, 1),
        routing_of([[0], [1]]),
        dispatcher=dispatcher,
        experts=lambda received: scale_rows(received, torch.ones(2)),
    )
    assert run_path(path).flatten().tolist() == [1.0, 1.0] and dispatcher.bytes_sent() == 0
    dispatcher.close()


# The throttled link.


def test_throttled_link_queues_transfers(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(link.time, "monotonic", lambda: now[0])
    wire = ThrottledLink(gbps=0.008, latency_us=500_000)  # 1 MB/s and half a second
    assert wire.completion(sent_bytes=1_000_000, received_bytes=0) == pytest.approx(101.5)
    # Issued at once, waits for the first. Full duplex: the larger direction counts.
    assert wire.completion(sent_bytes=500_000, received_bytes=2_000_000) == pytest.approx(104.0)
    now[0] = 110.0  # the link has been free for a while
    assert wire.completion(sent_bytes=0, received_bytes=0) == pytest.approx(110.5)


def test_native_link_adds_nothing():
    assert NativeLink().completion(sent_bytes=10**9, received_bytes=10**9) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"gbps": 0.0}, "gbps=0.0"), ({"gbps": 1.0, "latency_us": -1.0}, "latency_us=-1.0")],
)
def test_throttled_link_refuses(arguments, message):
    with pytest.raises(ValueError, match=rf"link.{message}: expected"):
        ThrottledLink(**arguments)


def test_throttled_link_leaves_numbers_bit_identical():
    setup = Setup(ep=2, accumulation=2, steps=2)
    native = ranks(2).run(run_steps, setup=setup)
    throttled = ranks(2).run(run_steps, setup=setup.with_(gbps=0.5))
    for one, other in zip(native, throttled):
        assert one["loss"] == other["loss"] and one["norm"] == other["norm"]
        assert all(torch.equal(value, other["grads"][name]) for name, value in one["grads"].items())
        assert all(torch.equal(value, other["params"][name]) for name, value in one["params"].items())
