"""What Mixture-of-Kittens (MoK) takes. Pure: the check of a config and `MoKLibrary.wire` ask the same function.

Legend: T tokens per rank, K routes per token, L local experts, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

UNIT = 256  # of tokens, features and widths; every expert's rows are padded to it
MIN_TOKENS = 512
RANKS = (1, 4, 8, 16, 32, 64)
CAPABILITIES = ((10, 0), (10, 3))
MAX_TOP_K = 55  # more do not fit the shared memory in which the routes of a token are summed
UNFUSED = "fusion=grouped"


@dataclass(frozen=True)
class Tuning:
    """Fields of `MoKConfig` that change speed and memory, with the library's defaults.

    Attributes:
        fwd_num_comm_sms, bwd_num_comm_sms: Multiprocessors that only move rows.
        minibatch_size: Rows after which the others may begin to compute.
        macrobatch_size: Rows whose activations are kept for backward; those past it are computed again.
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072


@dataclass(frozen=True)
class MoKSizes:
    """A layer and its ranks. None: not known here, and not checked.

    Attributes:
        ranks: That share the experts.
        tokens: Tokens of a rank in one call; every rank has as many.
        sequence: Length of a sequence where a call has whole ones, for the advice.
        experts: In total.
        width: Width of an expert.
        num_shared: Shared experts.
        shared_width: Width of all shared experts together.
        shared_gate: Tokens scale the shared expert's output.
        precision: A value of `trainer.precision`, or the name of a dtype.
        alignment: Rows per expert, as `fusion.alignment`.
        on_gpu: The ranks compute on NVIDIA GPUs.
        capability: Of these.
    """

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    sequence: int | None = None
    width: int | None = None
    num_shared: int | None = None
    shared_width: int | None = None
    shared_gate: bool | None = None
    precision: str = "bf16-mixed"
    alignment: int | str = "auto"
    on_gpu: bool = True
    capability: tuple[int, int] | None = None


class Violation(NamedTuple):
    """What `ConfigError` takes, in its order."""

    key: str
    value: object
    why: str
    expected: str
    fix: str


def first_violation(sizes: MoKSizes, tuning: Tuning | None = None) -> Violation | None:
    """The first limit of MoK that is passed: of the machine, the ranks, the model, the call, the tuning."""
    for check in (_machine, _ranks, _model, _shared, _call):
        for violation in check(sizes):
            return violation
    return next(_tuning(Tuning() if tuning is None else tuning), None)


def _machine(sizes: MoKSizes) -> Iterator[Violation]:
    names = " or ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
    expected = f"an NVIDIA GPU of compute capability {names}"
    if not sizes.on_gpu:
        yield Violation("fusion.library", "mok", "the ranks have no NVIDIA GPU", expected, UNFUSED)
    elif sizes.capability is not None and sizes.capability not in CAPABILITIES:
        major, minor = sizes.capability
        why = f"a GPU of compute capability {major}.{minor}, for which MoK has no kernels"
        yield Violation("fusion.library", "mok", why, expected, UNFUSED)


def _ranks(sizes: MoKSizes) -> Iterator[Violation]:
    ranks, experts = sizes.ranks, sizes.experts
    if ranks not in RANKS:
        *most, last = (str(n) for n in RANKS)
        best = max((n for n in RANKS if ranks % n == 0), default=1)
        yield Violation(
            "strategy.expert_parallel_size",
            ranks,
            f"MoK has no kernels for {ranks} ranks",
            # Upstream's own list begins at 4.
            f"one of {', '.join(most)} or {last}; 1 only where the installed build has it, MoK itself lists 4 to 64",
            UNFUSED if best == 1 else f"strategy.expert_parallel_size={best}",
        )
    if experts % ranks:
        fix = f"model.num_experts={up(experts, ranks)}"
        why = f"{experts} experts on {ranks} ranks"
        yield Violation("model.num_experts", experts, why, f"a multiple of {ranks}", fix)


def _model(sizes: MoKSizes) -> Iterator[Violation]:
    if not sizes.precision.removeprefix("torch.").startswith(("bf16", "bfloat16")):
        yield Violation(
            "trainer.precision",
            sizes.precision,
            "MoK computes in bf16 here",
            "bf16-mixed or bf16-true",
            "trainer.precision=bf16-mixed",
        )
    for key, value, what in (
        ("model.hidden_size", sizes.hidden, "features"),
        ("model.expert_hidden_size", sizes.width, "features inside an expert"),
    ):
        if value is not None and (value <= 0 or value % UNIT):
            why = f"MoK's tiles are {UNIT} wide, and there are {value} {what}"
            yield Violation(key, value, why, f"a multiple of {UNIT}", f"{key}={up(max(1, value), UNIT)}")
    if not 1 <= sizes.top_k <= MAX_TOP_K:
        why = f"MoK sums the routes of a token in shared memory, which holds {MAX_TOP_K}"
        yield Violation(
            "router.top_k", sizes.top_k, why, f"1 to {MAX_TOP_K}", f"router.top_k={min(MAX_TOP_K, 2)}"
        )


def _shared(sizes: MoKSizes) -> Iterator[Violation]:
    count, width, shared = sizes.num_shared, sizes.width, sizes.shared_width
    expected = "one shared expert, as wide as a routed one"
    if count == 0:
        why = "MoK computes a shared expert in the same kernel and cannot leave it out"
        yield Violation("model.num_shared_experts", 0, why, expected, "model.num_shared_experts=1")
    if width is not None and shared is not None and shared != width:
        why = f"a shared expert {shared} wide beside experts {width} wide, and MoK has one width for both"
        if count is not None and count > 1 and shared == count * width:
            fix = "model.num_shared_experts=1"
            yield Violation("model.num_shared_experts", count, why, expected, fix)
        fix = f"model.shared_expert_hidden_size={width}"
        yield Violation("model.shared_expert_hidden_size", shared, why, expected, fix)
    if sizes.shared_gate:
        why = "MoK adds the shared expert's output as it is"
        fix = "model.shared_expert_gate=false"
        yield Violation("model.shared_expert_gate", True, why, "a shared expert without a gate", fix)


def _call(sizes: MoKSizes) -> Iterator[Violation]:
    tokens, align = sizes.tokens, sizes.alignment
    if tokens < MIN_TOKENS or tokens % UNIT:
        yield Violation(
            *_tokens_as_typed(sizes),
            f"MoK gets {tokens} tokens of a rank in a call",
            f"a multiple of {UNIT}, at least {MIN_TOKENS}, the same on every rank",
            _more_tokens(tokens, sizes.sequence),
        )
    if isinstance(align, int) and (align < 1 or UNIT % align):
        why = f"MoK pads the rows of an expert to multiples of {UNIT}, whatever is asked"
        yield Violation(
            "fusion.alignment", align, why, f"auto, or a divisor of {UNIT}", "fusion.alignment=auto"
        )


def _tokens_as_typed(sizes: MoKSizes) -> tuple[str, int]:
    if sizes.sequence is None:
        return "tokens per rank", sizes.tokens
    return "data.micro_batch_size", sizes.tokens // sizes.sequence


def _more_tokens(tokens: int, sequence: int | None) -> str:
    if sequence is None:
        wanted = f"{up(max(tokens, MIN_TOKENS), UNIT)} tokens"
        return f"set data.micro_batch_size and data.seq_length to a product of {wanted}"
    unit = math.lcm(sequence, UNIT) // sequence  # sequences that make whole units
    return f"data.micro_batch_size={up(max(-(-tokens // sequence), -(-MIN_TOKENS // sequence)), unit)}"


def _tuning(tuning: Tuning) -> Iterator[Violation]:
    for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
        value = getattr(tuning, name)
        if value <= 0 or value % 2:
            why, fix = "MoK's blocks come in pairs", f"fusion.{name}={up(max(1, value), 2)}"
            yield Violation(f"fusion.{name}", value, why, "a positive even number", fix)
    mini, macro = tuning.minibatch_size, tuning.macrobatch_size
    if mini <= 0 or mini % UNIT:
        why, fix = f"MoK's tiles are {UNIT} rows high", f"fusion.minibatch_size={up(max(1, mini), UNIT)}"
        yield Violation("fusion.minibatch_size", mini, why, f"a multiple of {UNIT}", fix)
    elif macro <= 0 or macro % mini:
        why, fix = f"minibatches of {mini} rows", f"fusion.macrobatch_size={up(max(1, macro), mini)}"
        yield Violation("fusion.macrobatch_size", macro, why, f"a multiple of {mini}", fix)


# What the library is asked for.


def up(value: int, unit: int) -> int:
    """The next multiple."""
    return -(-value // unit) * unit


def most_rows(*, ranks: int, tokens: int, top_k: int, local: int) -> int:
    """Rows that can come to a rank at worst: every route of every rank, and each expert's padding.

    That a token's routes differ is not used: it does not hold where missing ones are sent somewhere.
    """
    routes = ranks * tokens * top_k
    return (routes + min(local, routes) * (UNIT - 1)) // UNIT * UNIT


def schedule_factor(*, ranks: int, tokens: int, top_k: int, local: int) -> int:
    """The least n for which a schedule of `n T K` rows holds the worst case, and which MoK can be asked for."""
    return max(2, -(-most_rows(ranks=ranks, tokens=tokens, top_k=top_k, local=local) // (tokens * top_k)))


def chunk_bytes(*, tokens: int, top_k: int) -> int:
    """Bytes of routes that are sent at a time: 2048 as MoK would, or the largest part that divides all of them."""
    return math.gcd(tokens * top_k * 4, 2048)
