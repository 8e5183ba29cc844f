"""Names of the metrics that the loggers, metrics.jsonl, the progress bar and the plots share.

A record of metrics.jsonl is one flat object: `STEP`, `TOKENS` and any of the others.
"""

STEP = "step"  # optimizer steps done
TOKENS = "progress/tokens"  # tokens trained on so far, over all ranks
TRAIN_LOSS = "train/loss"  # nats per token, without auxiliary losses
VAL_LOSS = "val/loss"  # nats per token
TOKENS_PER_SECOND = "perf/tokens_per_sec"  # over all ranks
LOAD = "moe/max_over_mean"  # rows of the busiest expert over the mean, worst layer; 1.0 = even
AUX_LOSS = "moe/aux_loss"  # summed over layers, without its coefficient; 1.0 per layer = even
GRAD_NORM = "train/grad_norm"  # before clipping
LR = "train/lr"
STEP_MS = "perf/step_ms"  # median since the last record
BYTES_ON_WIRE = "perf/bytes_on_wire"  # of one step, all ranks, rows sent to other ranks
