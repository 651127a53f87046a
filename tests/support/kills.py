"""Cut runs short: a real process, killed at random times, or a call in this one."""

import os
import random
import signal
import subprocess
import time

from fedmcmc.runs import _run


class Cut:
    """Interrupts a run after its ``left``-th segment from now on, and counts its rounds."""

    def __init__(self, monkeypatch):
        self.left, self.rounds = -1, 0
        take = _run.Run._record_segment

        def taken(run, segment, at, stop):
            take(run, segment, at, stop)
            self.rounds += stop - at
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(_run.Run, "_record_segment", taken)


def kill_until_done(command, env, *, is_ready, done, before, num_kills, longest, seed):
    """Run `command` until the file `done` exists; kill it on its way. Return how often.

    Each of the first attempts is killed up to `longest` seconds after ``is_ready()``, which
    ``before()`` resets; once that was so `num_kills` times, it may end.
    """
    rng, kills = random.Random(seed), 0
    env = env | {
        "JAX_COMPILATION_CACHE_DIR": str(done.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    while not done.exists():
        before()
        told = done.parent / "stderr.txt"
        with (
            told.open("w") as stderr,
            subprocess.Popen(
                command, env=env, start_new_session=True, stdout=stderr, stderr=stderr
            ) as process,
        ):
            if kills < num_kills:
                while process.poll() is None and not is_ready():
                    time.sleep(0.01)
                time.sleep(rng.uniform(0.0, longest))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    kills += 1
                    continue
            assert process.wait() == 0, told.read_text()
    return kills
