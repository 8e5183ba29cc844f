"""Names of the metrics that the loggers, metrics.jsonl, the progress bar and the plots share.

A record of metrics.jsonl is one flat object: `STEP`, `TOKENS`, and all names of `TRAINING`, of `VALIDATION` or of
`OVERLAP`, null where a value is not known. docs/tracking.md explains each.
"""

STEP = "step"  # optimizer steps done
TOKENS = "progress/tokens"  # tokens trained on so far, over all ranks

TRAIN_LOSS = "train/loss"  # nats per token, without auxiliary losses
GRAD_NORM = "train/grad_norm"  # before clipping
LR = "train/lr"

AUX_LOSS = "moe/aux_loss"  # summed over layers, without its coefficient; 1.0 per layer = even
Z_LOSS = "moe/z_loss"  # summed over layers, without its coefficient
DROPPED = "moe/dropped"  # routes dropped in the step, all layers and ranks
LOAD = "moe/max_over_mean"  # routes of the busiest expert over the mean, worst layer; 1.0 = even
LOAD_CV = "moe/load_cv"  # standard deviation of the experts' routes over the mean, worst layer; 0 = even
DEAD_EXPERTS = "moe/dead_experts"  # experts without a route in the step, summed over layers
RANK_LOAD = "moe/rank_max_over_mean"  # the same as LOAD, for the ranks that share the experts

# One number per MoE layer, in a list; loggers get one metric per layer, `<name>/<layer>`.
LAYER_LOAD = "moe/layers/max_over_mean"
LAYER_LOAD_CV = "moe/layers/load_cv"
LAYER_DEAD_EXPERTS = "moe/layers/dead_experts"
LAYER_RANK_LOAD = "moe/layers/rank_max_over_mean"

TOKENS_PER_SECOND = "perf/tokens_per_sec"  # over all ranks, since the last record
MFU = "perf/mfu"  # model FLOPs per second over the peak of all devices
STEP_MS = "perf/step_ms"  # median since the last record
SLOWEST_STEP_MS = "perf/step_ms_slowest"  # of the slowest rank of each step; one step behind
BYTES_ON_WIRE = "perf/bytes_on_wire"  # of one step, all ranks, sent to other ranks by the dispatcher
METADATA_BYTES = "perf/bytes_metadata"  # of these: counts and routing weights

MEMORY = "mem/current_bytes"  # largest of all ranks, after the step
PEAK_MEMORY = "mem/peak_bytes"  # largest of all ranks, since the run began

# Of one MoE unit, forward and backward, slowest rank, medians; docs/overlap.md defines them.
OVERLAP_COMPUTE_MS = "perf/overlap/compute_ms"
OVERLAP_COMM_MS = "perf/overlap/comm_ms"
OVERLAP_SERIAL_MS = "perf/overlap/serial_ms"
OVERLAP_OVERLAPPED_MS = "perf/overlap/overlapped_ms"
OVERLAP_E_HIDE = "perf/overlap/e_hide"
OVERLAP_E_COMM = "perf/overlap/e_comm"
OVERLAP_BOUND = "perf/overlap/bound"  # the largest e_hide that the schedule can reach

VAL_LOSS = "val/loss"  # nats per token

LOAD_PICTURE = "moe/expert_load"  # expert_load.png; loggers only
OVERLAP_PICTURE = "perf/overlap/timeline"  # overlap.png; loggers only

PER_LAYER = (LAYER_LOAD, LAYER_LOAD_CV, LAYER_DEAD_EXPERTS, LAYER_RANK_LOAD)
TRAINING = (
    TRAIN_LOSS,
    GRAD_NORM,
    LR,
    AUX_LOSS,
    Z_LOSS,
    DROPPED,
    LOAD,
    LOAD_CV,
    DEAD_EXPERTS,
    RANK_LOAD,
    *PER_LAYER,
    TOKENS_PER_SECOND,
    MFU,
    STEP_MS,
    SLOWEST_STEP_MS,
    BYTES_ON_WIRE,
    METADATA_BYTES,
    MEMORY,
    PEAK_MEMORY,
)
VALIDATION = (VAL_LOSS,)
OVERLAP = (
    OVERLAP_COMPUTE_MS,
    OVERLAP_COMM_MS,
    OVERLAP_SERIAL_MS,
    OVERLAP_OVERLAPPED_MS,
    OVERLAP_E_HIDE,
    OVERLAP_E_COMM,
    OVERLAP_BOUND,
)
