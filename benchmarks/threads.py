"""Whether the rule for threads chooses well, and whether runs side by side beat runs one after another."""

from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial

import torch

from benchmarks.process import workers
from benchmarks.ratios import Measurement, Row, Work, by_turns, neighbours, now
from benchmarks.step import Shape, cores, network, training_step

# the rule's bound is 2^14 elements of the stream a thread: from far below to far above
GRID = (
    Shape(depth=24, dim=64, batch=1),
    Shape(depth=24, dim=64, batch=8),
    Shape(depth=12, dim=64, batch=16),
    Shape(depth=12, dim=128, batch=4),
    Shape(depth=12, dim=256, batch=4),
    Shape(depth=4, dim=128, batch=16, context=128),
    Shape(depth=4, dim=64, batch=64),
    Shape(depth=4, dim=512, batch=8, context=128),
)
SIDE_BY_SIDE = (Shape(depth=12, dim=64, batch=4), Shape(depth=4, dim=128, batch=16, context=128))


def measurements(rounds: int, quick: bool) -> list[Measurement]:
    tiny = (Shape(depth=1, dim=16, batch=1, context=8),)
    return [
        *(
            Measurement(
                Row(
                    "threads",
                    f"step with the rule's {_threads(shape.threads)}, {shape}",
                    "fastest of 1 and all cores",
                    0,
                ),
                partial(rule, shape, rounds=rounds),
            )
            for shape in (tiny if quick else GRID)
        ),
        *(
            Measurement(
                Row("threads", f"throughput of two runs with 1 thread each, {shape}", "one run with 2 threads", 0),
                partial(side_by_side, shape, rounds=rounds, seconds=0.2 if quick else 2.0),
            )
            for shape in (tiny if quick else SIDE_BY_SIDE)
        ),
    ]


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def rule(shape: Shape, *, rounds: int) -> list[float]:
    """Time of a step with the rule's number of threads over the shortest of each round, its own included."""
    step = training_step(network(shape), shape)

    def with_threads(count: int) -> Work:
        def work() -> None:
            torch.set_num_threads(count)
            step()

        return work

    counts = sorted({1, cores(), shape.threads})
    times = by_turns([with_threads(count) for count in counts], rounds=rounds)
    chosen = times[counts.index(shape.threads)]
    return [own / min(of_round) for own, *of_round in zip(chosen, *times, strict=True)]


def side_by_side(shape: Shape, *, rounds: int, seconds: float) -> list[float]:
    """Steps per second of two processes together with a thread each over those of one process with two threads."""
    with workers(2) as pool:
        _together(pool, shape, [1, 1], seconds)  # both have a network now
        turns = [[_together(pool, shape, threads, seconds) for threads in ([1, 1], [2])] for _ in range(rounds)]
    return neighbours(*zip(*turns, strict=True))


def _together(pool: ProcessPoolExecutor, shape: Shape, threads: list[int], seconds: float) -> float:
    """Steps per second of all runs, one for each number of threads, at the same time."""
    runs = [pool.submit(steps_per_second, shape, count, seconds) for count in threads]
    return sum(run.result() for run in runs)


def steps_per_second(shape: Shape, threads: int, seconds: float) -> float:
    """Of one run in this process, over about as many seconds."""
    torch.set_num_threads(threads)
    step, done, began = _step(shape), 0, now()
    while (took := now() - began) < seconds:
        step()
        done += 1
    return done / took


@cache
def _step(shape: Shape) -> Work:
    step = training_step(network(shape), shape)
    step()
    return step
