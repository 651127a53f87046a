"""Experiments: one data set, model and kernel, and the published settings of each system.

``python -m experiments.run data=... model=... kernel=...`` runs any kernel on any model and data
set, or sweeps over their settings (``configs/README.md``): `arguments` reads the command line,
`wiring` checks and builds what a config names, `loaders` and `models` are the data sets and models,
`setup` computes what kernels need before their first round, `metrics` measures, and `sweeping` runs
the jobs of a sweep.

The published settings are run by ``experiment=<paper>/<name>`` (`settings_run`), until each is a
study of the above. Such an experiment is a module ``experiments/<paper>/<name>.py`` with

- ``Config``, a frozen dataclass of plain fields (``int``, ``float``, ``bool``, ``str``, or
  ``tuple[int, ...]`` and the like) whose defaults are the paper's own settings. Its
  ``__post_init__`` checks ranges and raises `ValueError` with a message that names the field;
- ``run(config, out) -> dict``, which writes figures and draws into the folder ``out`` and returns
  metrics that JSON can hold. Two keys are known to the harness: ``table``, a list of rows (dicts
  with equal keys) that is printed and goes into the report, and ``figures``, a list of
  ``{"file": ..., "caption": ...}``;
- for the report, optionally ``TITLE``, ``PAPER`` (what the paper shows, in our words, with its
  tables; Markdown), ``about(config, metrics) -> str`` (what a run was made on, and what of it
  cannot be compared; `config` is a dict; Markdown), ``commentary(metrics) -> str`` (where our run
  differs, and why; Markdown) and ``draw(metrics, out) -> figures``, which draws a run's figures
  from its metrics alone, so that they can be drawn anew. Of a section's runs the paper's own comes
  first; a caption is told once. ``SHOWS_TABLE = True`` where the commentary has the whole table.

What a paper claims, and how a run's metrics judge it, is in ``experiments/<paper>/claims.py``.

With ``checkpoint_seconds=60`` a killed run goes on: calls of `fedmcmc.sample` by themselves, and
other long parts where they are run by `experiments.restarts.once`. Both are known by their order.

A module without ``Config`` is a helper. ``configs/README.md`` says how a new one gets its
settings files; ``python -m experiments.run experiment=<paper>/<name>`` runs it.
"""
