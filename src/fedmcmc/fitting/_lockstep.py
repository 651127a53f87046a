"""Optimizers that run in parallel and evaluate their objectives in shared messages.

A SciPy optimizer calls its objective and waits for the value. Each optimizer runs in a separate
thread; when all running threads wait, their points are evaluated in one exchange with the clients.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmcmc.surrogates import Stopped

Evaluate = Callable[[np.ndarray], list[Any]]
"""Function from points ``[num, d]`` to one result per point."""


def lockstep(
    evaluate: Evaluate,
    starts: np.ndarray,
    optimize: Callable[[Callable[[np.ndarray], Any], np.ndarray], Any],
    max_evaluations: int,
) -> tuple[list[Any], int]:
    """Run one optimizer per start, ``[num, d]``; return the results and the number of evaluations.

    Each evaluation has one point per start, so that one compiled program serves all calls: an
    optimizer that has ended repeats its last point. After `max_evaluations` the objective raises
    `Stopped`; the optimizer may catch it.
    """
    num = len(starts)
    points = np.array(starts, float)
    answers: list[Any] = [None] * num
    results: list[Any] = [None] * num
    errors: list[BaseException] = []
    changed = threading.Condition()
    running, waiting = set(range(num)), set()
    stopped = False

    def worker(index: int) -> None:
        def objective(point: np.ndarray) -> Any:
            with changed:
                if stopped:
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
        except BaseException as error:  # the main thread raises it again
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
            values: list[Any] = [None] * num
            if count < max_evaluations and not stopped and not errors:
                try:
                    values = evaluate(points.copy())
                    count += 1
                except BaseException as error:
                    errors.append(error)
            stopped = stopped or values[0] is None
            for index in waiting:
                answers[index] = values[index]
            waiting.clear()
            changed.notify_all()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, count
