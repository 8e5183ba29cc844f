"""The progress of a run on the terminal: a bar, or plain lines where stdout is no terminal."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from sidestream.tracking import names

REDRAW_SECONDS = 0.2
MINUTE = 60.0  # seconds
# Shown on lines of their own, or of no interest to somebody who watches a run.
UNLISTED = ("model", "data", "dispatcher", "link", "paths", "callbacks", "trainer", "logger", "experiment")


class RichProgress(Callback):
    """Shows what it is told through `show...`; of the trainer it only reads `max_steps`.

    Use it with `Trainer(enable_progress_bar=False)`. Every method does nothing on ranks above 0.

    Args:
        rank: global rank.
        log_every_n_steps: distance of the plain lines; the bar shows every step it is told.
        enabled: False: nothing is printed by this class on any rank.
        patience: seconds of the first minute after which a step has a plain line of its own.
        console: where to print; default stdout.
    """

    def __init__(
        self,
        *,
        rank: int,
        log_every_n_steps: int,
        enabled: bool = True,
        patience: float = math.inf,
        console: Console | None = None,
    ) -> None:
        self._silent = rank > 0 or not enabled
        self._every, self._patience = log_every_n_steps, patience
        self._console = console or Console()
        # Not `is_terminal`: FORCE_COLOR makes it true for a file, which would then fill up with redraws.
        self._live = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._unit = "nats"
        self._max_steps: int | None = None
        self._metrics: dict[str, float | None] = {}
        self._val_loss: float | None = None
        self._first: tuple[int, float] | None = None  # step and time of the first `show`
        self._step = 0
        self._baselines = ""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._drawn = 0.0
        self._spoke = time.monotonic()

    def show_start(
        self,
        *,
        choices: Mapping[str, str],
        world_size: int,
        expert_parallel_size: int,
        transport: str | None,
        params_total: int,
        params_active: int,
        data_name: str,
        baselines: Mapping[str, float],
        unit: str = "nats/byte",
        folder: Path,
    ) -> None:
        """Says what is about to run.

        Args:
            choices: Hydra group -> option.
            transport: what moves rows between ranks, None if nothing does.
            baselines: name -> validation loss of a reference, e.g. bigram and trigram counts.
            unit: of every loss.
        """
        self._unit = unit
        self._baselines = ", ".join(f"{name} {value:.3f}" for name, value in baselines.items())
        if self._silent:
            return
        params = f"{_count(params_total)} parameters"
        if params_active != params_total:
            params += f", {_count(params_active)} active"
        moves = f"dispatcher={choices.get('dispatcher', '-')}"
        if transport:
            moves += f" ({transport})"
        if choices.get("link", "native") != "native":
            moves += f" link={choices['link']}"
        listed = {g: o for g, o in choices.items() if o and g not in UNLISTED and not g.startswith("hydra/")}
        rows = {
            "model": f"{choices.get('model', '-')}: {params}",
            "data": data_name,
            "counts": f"{self._baselines} {unit}" if self._baselines else "-",
            "ranks": f"{world_size}, expert parallel {expert_parallel_size}, {moves}",
            "choices": " ".join(f"{group}={option}" for group, option in listed.items()),
            "folder": str(folder),
        }
        if not self._live:
            for name, text in rows.items():
                self._line(f"{name:<8}{text}")
            return
        table = Table.grid(padding=(0, 2))
        for name, text in rows.items():
            table.add_row(Text(name, style="dim"), Text(text, overflow="fold"))
        self._console.print(
            Panel(table, title="sidestream", title_align="left", border_style="cyan", width=self._width)
        )

    def show(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Shows a finished optimizer step.

        Args:
            step: optimizer steps done, counting those before a resume.
            metrics: the names of `sidestream.tracking.names`; what is missing keeps its last value.
        """
        if self._silent:
            return
        self._metrics.update(metrics)
        self._step = step
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        if self._bar is None:
            # Who starts a run with long steps wants to see early that it moves.
            waits = now - self._first[1] < MINUTE and now - self._spoke >= self._patience
            if step % self._every == 0 or step == self._max_steps or waits:
                self._line(f"{self._steps()}  {self._status().plain}")
        elif now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._redraw(self._bar)

    def show_validation(self, step: int, val_loss: float) -> None:
        """Shows the validation loss after `step` optimizer steps."""
        if self._silent:
            return
        self._val_loss = val_loss
        self._step = step
        if self._bar is not None:
            self._redraw(self._bar)
        else:
            self._line(f"{self._steps()}  val loss {val_loss:.4f} {self._unit}")

    def show_end(
        self,
        *,
        val_loss: float | None,
        folder: Path,
        mfu: float | None = None,
        status: str = "finished",
        overlap: str | None = None,
    ) -> None:
        """Says where a run ended; `mfu` is a share of 1, `status` that of result.json, `overlap` a line of its own."""
        self._stop()
        if self._silent:
            return
        if overlap is not None:
            self._line(overlap)
        if status != "finished":
            return  # whoever started the run says how to go on, also where this process could not
        loss = "finished" if val_loss is None else f"val loss {val_loss:.4f} {self._unit}"
        beside = f"  ({self._baselines})" if self._baselines else ""
        used = "" if mfu is None else f"  mfu {100 * mfu:.1f}%"
        text = Text.assemble((loss, "bold green"), (beside, "dim"), used, f"\n{folder}")
        if self._live:
            self._console.print(text, soft_wrap=True)
        else:
            self._line(text.plain)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens the bar."""
        self._max_steps = trainer.max_steps
        if self._silent or not self._live:
            return
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            expand=True,
            # Drawn by `show`: a thread of rich would take time from the kernels 10 times a second.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=self._max_steps, status=Text(""))
        self._bar.start()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Shows in the bar how far a validation is."""
        now = time.monotonic()
        if self._bar is not None and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            status = Text(f"validating {batch_idx + 1}/{trainer.num_val_batches[dataloader_idx]}")
            self._bar.update(self._task, completed=self._step, status=status)
            self._bar.refresh()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the bar, which stays on the screen."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Closes the bar, so that the error is printed below it and the cursor comes back."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._redraw(self._bar)
            self._bar.stop()
            self._bar = None

    def _redraw(self, bar: Progress) -> None:
        bar.update(self._task, completed=self._step, status=self._status())
        bar.refresh()

    def _status(self) -> Text:
        """Everything right of the bar, without what is not known yet."""
        parts = []
        if (loss := self._metrics.get(names.TRAIN_LOSS)) is not None:
            parts.append(("loss", f"{loss:.3f}"))
        if self._val_loss is not None and self._bar is not None:
            parts.append(("val", f"{self._val_loss:.3f}"))
        if (speed := self._metrics.get(names.TOKENS_PER_SECOND)) is not None:
            parts.append(("tok/s", _count(speed)))
        if (load := self._metrics.get(names.LOAD)) is not None:
            parts.append(("load", f"{load:.2f}"))
        parts.append(("eta", self._remaining()))
        pieces = [Text.assemble((f"{name} ", "dim"), value) for name, value in parts]
        return Text("  ").join(pieces)

    def _remaining(self) -> str:
        """Time to the last step at the mean pace so far, validation included."""
        if self._first is None or self._max_steps is None or self._step <= self._first[0]:
            return "-"
        first_step, first_time = self._first
        pace = (time.monotonic() - first_time) / (self._step - first_step)
        return _duration(pace * max(self._max_steps - self._step, 0))

    def _steps(self) -> str:
        total = "?" if self._max_steps is None else str(self._max_steps)
        return f"step {self._step:>{len(total)}}/{total}"

    def _line(self, text: str) -> None:
        # Soft wrap: a line in a file has no width. Markup would swallow the brackets of a path.
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()
        self._spoke = time.monotonic()

    @property
    def _width(self) -> int:
        return min(self._console.width, 100)


def _count(number: float) -> str:
    """1234567 -> 1.23M, 1200 -> 1.20k: always three digits, so that a changing number keeps its width."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:#.3g}".rstrip(".") + suffix
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    """3725 -> 1:02:05, 65 -> 1:05"""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
