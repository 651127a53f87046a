"""Kill a real process at random times, and start it again."""

import os
import random
import signal
import subprocess
import time


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
