"""Learning-rate schedules: step -> factor of `optimizer.lr`. Step 0 is the first optimizer step."""

from __future__ import annotations

import math

from sidestream.config.compatibility import auto_warmup


class Constant:
    """Linear warm-up, then constant.

    Args:
        max_steps: Steps of the run.
        warmup_steps: The factor reaches 1 at this step; "auto": a tenth of the run, at most 50.
    """

    decays = False

    def __init__(self, *, max_steps: int, warmup_steps: int | str) -> None:
        self.max_steps = max_steps
        self.warmup_steps = auto_warmup(max_steps) if warmup_steps == "auto" else int(warmup_steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        return 1.0


class Cosine(Constant):
    """Linear warm-up, then a half cosine down to `min_ratio` at the last step."""

    decays = True

    def __init__(self, *, max_steps: int, warmup_steps: int | str, min_ratio: float) -> None:
        super().__init__(max_steps=max_steps, warmup_steps=warmup_steps)
        self.min_ratio = min_ratio

    def after_warmup(self, step: int) -> float:
        span = max(1, self.max_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps + 1) / span)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class WSD(Cosine):
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM): linear to `min_ratio` over the last `decay_fraction`."""

    def __init__(
        self, *, max_steps: int, warmup_steps: int | str, min_ratio: float, decay_fraction: float
    ) -> None:
        super().__init__(max_steps=max_steps, warmup_steps=warmup_steps, min_ratio=min_ratio)
        self.decay_steps = max(1, round(max_steps * decay_fraction))

    def after_warmup(self, step: int) -> float:
        left = max(0, self.max_steps - step - 1)
        return self.min_ratio + (1 - self.min_ratio) * min(1.0, left / self.decay_steps)
