"""Experiments: one data set, model and kernel, and the published settings of each system.

``python -m experiments.run data=... model=... kernel=...`` runs any kernel on any model and data
set, or sweeps over their settings (``configs/README.md``): `arguments` reads the command line,
`wiring` checks and builds what a config names, `loaders` and `models` are the data sets and models,
`setup` computes what kernels need before their first round, `metrics` measures, and `sweeping` runs
the jobs of a sweep.

The published settings are run by ``experiment=<paper>/<name>`` (`settings_run`), until each is a
study of the above. Such an experiment is a module ``experiments/<paper>/<name>.py`` with

- ``Config``, a frozen dataclass of plain fields (``int``, ``float``, ``bool``, ``str``, or
  ``tuple[int, ...]`` and the like) whose defaults are the paper's settings. Its ``__post_init__``
  checks ranges and raises `ValueError` with a message that names the field;
- ``run(config, out) -> dict``, which writes figures and draws into the folder ``out`` and returns
  metrics that JSON can hold. ``table`` is a list of dicts with equal keys, which is printed, and
  ``figures`` a list of ``{"file": ...}``;
- optionally ``draw(metrics, out) -> figures``, which draws a run's figures from its metrics.

The rows of a run that is committed are in ``records/<paper>/<name>.csv`` (`experiments.tidy`),
what a paper claims in ``notes/<paper>.claims.yaml`` (`experiments.verdicts`), and the page of a
paper in ``notes/<paper>.md`` (`experiments.render`).

With ``checkpoint_seconds=60`` a killed run continues: calls of `fedmcmc.sample` by themselves, and
other long parts if `experiments.restarts.once` runs them.
"""
