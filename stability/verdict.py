"""What became of a run, in one word and one sentence.

- `diverged`: the loss or the gradient was not finite for 3 steps in a row (`patience`; or at the last step, or in validation), or
  the loss stayed more than 0.1 above that of the first step for max(20, a tenth of the run) steps in a row.
- `stalled`: the mean loss of the last max(10, a tenth of the run) steps is above the unigram entropy of the training
  text minus 0.1, and not still on its way there: the run learnt which tokens are frequent and nothing of their order.
  This is how post-norm fails: no explosion, a plateau with a vanishing gradient.
- `spiky`: at least two steps with a loss 7 standard deviations above the mean of the steps before (the last tenth of a
  run, 30 to 1,000 of them), or a step that was skipped because its gradient was not finite.
- `too_short`: under 50 steps, where none of this can be told; or the loss is more than 0.1 above the unigram entropy and
  has fallen by more than 0.1 from the last stretch but one to the last: it has not got as far as the plateau.
- `stable`: none of these.
- `interrupted`: a signal ended it; `failed`: an error did.

A stall is not judged where the text's known entropy (a synthetic source) lies within 0.1 of the unigram entropy: there
is then nothing to learn beyond it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

FAILED, REFUSED, DIVERGED = 1, 2, 3  # exit codes; 128 + n for a run that signal n ended
PATIENCE = 3  # non-finite steps in a row that end a run
ABOVE = 0.1  # nats above the first loss that count as above
MARGIN = 0.1  # nats below the unigram entropy that count as learning
SHORTEST = 50  # steps under which nothing is judged
SIGMAS, WINDOW, ENOUGH = 7.0, 1000, 30  # of OLMo 2's spike score; the fewest steps that make a mean


@dataclass
class Watch:
    """The judgement that can stop a run: fed each step in order, it answers with a sentence once the run diverged.

    `patience`: how many non-finite steps in a row that takes; 0: they are skipped and counted to the end.
    """

    steps: int
    patience: int = PATIENCE
    first_loss: float | None = None
    first_bad_step: int | None = None
    bad: int = 0
    above: int = 0

    def see(self, step: int, loss: float, finite: bool) -> str | None:
        """`finite`: whether loss and gradient were. `first_bad_step` is where the present stretch began."""
        if not finite:
            self.first_bad_step = step if self.bad == 0 else self.first_bad_step
            self.bad += 1
            if (self.patience and self.bad >= self.patience) or step >= self.steps:
                return f"loss or gradient not finite from step {self.first_bad_step} on"
            return None
        self.bad = 0
        if self.first_loss is None:
            self.first_loss = loss
        stretch = max(20, self.steps // 10)
        self.above = self.above + 1 if loss > self.first_loss + ABOVE else 0
        if self.above >= stretch:
            self.first_bad_step = step - stretch + 1
            return (
                f"loss above its start ({self.first_loss:.3f}) for {stretch} steps from step {self.first_bad_step} on"
            )
        return None


def spikes(loss: np.ndarray) -> np.ndarray:
    """Which values stand at least 7 standard deviations above the mean of the finite values in the window before them:
    the marks of OLMo 2's spike score (arXiv 2501.00656, section 3.1), the deviation taken over the same window, which
    the paper leaves open. Its window of 1,000 is a sliver of its runs; here it is a tenth of the run, from 30 to 1,000
    steps, since a window that holds the fall of the loss would hide every spike. Shape as `loss`; a value that is not
    finite is no spike."""
    window = min(WINDOW, max(ENOUGH, len(loss) // 10))
    padded = np.concatenate([np.full(window, np.nan), loss.astype(np.float64)])
    before, chunk = sliding_window_view(padded, window)[: len(loss)], 4096  # a chunk at a time: the view is large
    marks = [_far_above(before[i : i + chunk], loss[i : i + chunk]) for i in range(0, len(loss), chunk)]
    return np.concatenate(marks) if marks else np.zeros(0, bool)


def _far_above(before: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Row i of `before` is the window before loss[i]. Not from running sums: one loss of 1e7 would leave them no digits."""
    finite = np.isfinite(before)
    n = np.maximum(finite.sum(1), 1)
    mean = np.where(finite, before, 0).sum(1) / n
    std = np.sqrt((np.where(finite, before - mean[:, None], 0) ** 2).sum(1) / n)
    return np.isfinite(loss) & (finite.sum(1) >= ENOUGH) & (std > 0) & (loss > mean + SIGMAS * std)


def tail(loss: np.ndarray, steps: int) -> float:
    """The mean of the finite losses among the last max(10, a tenth of the run); nan where there is none."""
    last = loss[-max(10, steps // 10) :]
    last = last[np.isfinite(last)]
    return float(last.mean()) if last.size else float("nan")


def judge(
    loss: np.ndarray,
    skipped: np.ndarray,
    *,
    steps: int,
    unigram_entropy: float,
    floor: float | None = None,
    diverged: str | None = None,
) -> tuple[str, str]:
    """(verdict, reason) of a finished run: `loss` and `skipped` by step, `diverged` what `Watch` said."""
    if diverged:
        return "diverged", diverged
    if len(loss) < SHORTEST:
        return "too_short", f"{len(loss)} steps; {SHORTEST} are needed to tell"
    final = tail(loss, steps)
    learnable = floor is None or floor < unigram_entropy - MARGIN
    earlier = tail(loss[: -max(10, steps // 10)], steps)
    if learnable and final > unigram_entropy + MARGIN and earlier - final > MARGIN:
        return (
            "too_short",
            f"final loss {final:.3f} is above the unigram entropy {unigram_entropy:.3f} and still falling",
        )
    if learnable and not final < unigram_entropy - MARGIN:
        return "stalled", f"final loss {final:.3f} is not below the unigram entropy {unigram_entropy:.3f} by {MARGIN}"
    count, lost = int(spikes(loss).sum()), int(skipped.sum())
    if count >= 2 or lost:
        return "spiky", f"{count} loss spikes and {lost} skipped steps in {len(loss)}"
    below = f", {unigram_entropy - final:.3f} below the unigram entropy" if learnable else ""
    return "stable", f"final loss {final:.3f}{below}; no spikes"
