"""Optimizers that run side by side and ask for their objectives in one message.

An optimizer of SciPy calls its objective and waits. Here each runs in a thread of its own; when all
that still run have asked, their points are evaluated together, in one exchange with the clients.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmcmc.surrogates import Stopped

Evaluate = Callable[[np.ndarray], list[Any]]
"""Points ``[num, d]`` to one result per point."""


def lockstep(
    evaluate: Evaluate,
    starts: np.ndarray,
    optimize: Callable[[Callable[[np.ndarray], Any], np.ndarray], Any],
    most: int,
) -> tuple[list[Any], int]:
    """Run one optimizer per start and return what each returned, and how often was evaluated.

    Parameters
    ----------
    evaluate
        Called with as many points as there are starts, ``[num, d]``; those whose optimizers have
        ended repeat their last points.
    starts
        ``[num, d]``.
    optimize
        ``(objective, start) -> result``; after `most` evaluations the objective raises `Stopped`,
        which it may catch.
    most
        Evaluations of all points together, at most.
    """
    num = len(starts)
    points = np.array(starts, float)
    answers: list[Any] = [None] * num
    results: list[Any] = [None] * num
    errors: list[BaseException] = []
    changed = threading.Condition()
    running, waiting = set(range(num)), set()
    over = False

    def worker(index: int) -> None:
        def objective(point: np.ndarray) -> Any:
            with changed:
                if over:
                    raise Stopped
                points[index] = point
                waiting.add(index)
                changed.notify_all()
                changed.wait_for(lambda: index not in waiting)
                if answers[index] is None:
                    raise Stopped
                return answers[index]

        try:
            results[index] = optimize(objective, starts[index])
        except BaseException as error:  # told by the main thread
            errors.append(error)
        with changed:
            running.discard(index)
            changed.notify_all()

    threads = [threading.Thread(target=worker, args=(i,), daemon=True) for i in range(num)]
    for thread in threads:
        thread.start()
    count = 0
    with changed:
        while running:
            changed.wait_for(lambda: waiting == running)
            if not running:
                break
            found: list[Any] = [None] * num
            if count < most and not over and not errors:
                try:
                    found = evaluate(points.copy())
                    count += 1
                except BaseException as error:
                    errors.append(error)
            over = over or found[0] is None
            for index in waiting:
                answers[index] = found[index]
            waiting.clear()
            changed.notify_all()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, count
