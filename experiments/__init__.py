"""Experiments: any kernel on any model and data set, and the studies of four papers.

``python -m experiments.run data=... model=... kernel=...`` runs one kernel or a sweep, and
``study=<paper>/<name>`` a table or figure of a paper (``configs/README.md``). `arguments` reads the
command line, `wiring` checks and builds what a config names, `loaders` and `models` are the data
sets and models, `setup` computes what kernels need before their first round, `metrics` and
`comparisons` measure, `sweeping` runs the jobs of a sweep, `study` finishes a study, and modules of
`special` compute what is no grid of kernels.

Rows of committed runs are in ``records/<paper>/<name>.csv`` (`tidy`), claims of a paper in
``notes/<paper>.claims.yaml`` (`claims`), and its page in ``notes/<paper>.md`` (`render`).
"""
