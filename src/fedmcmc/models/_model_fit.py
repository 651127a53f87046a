"""Result of a formula model: draws, verdict, and tables that are computed from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fedmcmc import criticism, hierarchy
from fedmcmc.data import FederatedData, row_values
from fedmcmc.diagnostics import Verdict
from fedmcmc.fitting import Fitted
from fedmcmc.models import _effects, _tables, _text
from fedmcmc.models._columns import split_tables
from fedmcmc.models._draws import MAX_DRAWS, EffectDraws, Values, local_term, named_draws, thin
from fedmcmc.models._joint import joint_posterior, row_groups
from fedmcmc.models._predict import predict_rows
from fedmcmc.models._saving import store_model_fit
from fedmcmc.models._weights import robust_samples
from fedmcmc.records import Samples, write_netcdf
from fedmcmc.types import Posterior


@dataclass(frozen=True, eq=False, repr=False)
class ModelFit:
    """Fit of a formula model, from `glm`, `glmm` or `survival`.

    Attributes
    ----------
    fitted
        Result of `fedmcmc.fit`, with draws of the shared parameters.
    model
        NumPyro model.
    posterior
        Posterior of the model from `fedmcmc.from_numpyro`, with the effects of groups in ``.local``
        (`fitted` has the posterior after they are integrated out).
    data
        Rows of all clients in a simulation; ``None`` after `fedmcmc.load`.
    design, family, priors
        Design of the matrices, family of the outcome, and prior of each parameter by name.
    formula
        Text of the formula.
    tables
        Client to table of its rows, in a simulation; used by `effects`.
    settings
        Other arguments of the call that `save` stores.
    """

    fitted: Fitted
    model: Callable[..., Any]
    posterior: Posterior
    data: FederatedData | None
    design: Any
    family: Any
    priors: Mapping[str, Any]
    formula: str = ""
    tables: Mapping[Any, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> Samples:
        """Draws of the shared parameters, of equal weight."""
        return self.fitted.samples

    @property
    def verdict(self) -> Verdict:
        """Verdict on the draws."""
        return self.fitted.verdict

    @property
    def report(self) -> "_text.ModelReport":
        """Report on the fit, with tables of the model: ``fit.report.save("report.html")``."""
        return _text.make_report(self)

    @cached_property
    def draws(self) -> dict[str, np.ndarray]:
        """Draws ``[num_chains, num_draws]`` by the names of `summary`."""
        return named_draws(self.samples.constrained, self.design, self.family)

    @cached_property
    def effect_draws(self) -> EffectDraws:
        """At most 1,000 draws of shared parameters, each with effects drawn for all groups.

        Clients draw effects given shared parameters and their own rows. At real sites these draws
        stay with their owner, so this works in a simulation only.
        """
        shared = self._shared_draws(MAX_DRAWS)
        if local_term(self.design) is None:
            return shared
        latents = hierarchy.local_draws(
            self.posterior, self._data(), shared.positions, rng_key=jax.random.key(0)
        )
        return shared._replace(latents=latents)

    def _shared_draws(self, num: int) -> EffectDraws:
        values: Values = thin(self.samples.constrained, num)
        positions = jax.tree.map(lambda leaf: leaf[None], thin(self.samples.draws, num))
        return EffectDraws(positions, values, None)

    def _data(self) -> FederatedData:
        if self.data is None:
            raise ValueError(
                "This fit has no rows, because a saved fit contains none. Rows and effects of "
                "groups stay with their owner: call fit.with_data(tables) where the rows are."
            )
        return self.data

    def with_data(self, tables: Any) -> "ModelFit":
        """Return the fit with rows, for a fit from `fedmcmc.load`.

        Parameters
        ----------
        tables
            Table of each client, or one table, as in the call of `glm`.
        """
        tables = split_tables(tables, self.design.schema.client)
        return replace(self, tables=tables, data=self.design.data(tables))

    def summary(
        self, *, exponentiate: bool = False, prob: float = 0.9, robust: bool = False
    ) -> Any:
        """Return a `pandas.DataFrame` with a row per parameter.

        Parameters
        ----------
        exponentiate
            If true, return only coefficients, as ratios of odds (logit), rates (log) or hazards:
            draws are exponentiated, then summarized.
        prob
            Probability of the central intervals.
        robust
            If true, draws have the spread of the sandwich estimator (HC0), which holds if the
            family is wrong; with sampling weights, all draws have. Needs the rows (a simulation).

        Returns
        -------
        pandas.DataFrame
            Mean, median, sd, interval, probability of a positive coefficient, effective draws,
            and R-hat of chains or k-hat of weighted draws. The intercept refers to the user's
            columns, although the model is sampled with centered ones.

        Raises
        ------
        ValueError
            If coefficients of the link are not logarithms of ratios, or if `robust` is true and
            the model has random effects.
        """
        ratio = ""
        if exponentiate:
            ratio = _text.ratio_of(self.family)
            if not ratio:
                raise ValueError(
                    "exponentiate=True needs coefficients that are logarithms of ratios (links "
                    f"logit, log and cloglog); this model has the link {self.family.link!r}."
                )
        names = ["Intercept", *self.design.names]
        draws = self.draws
        if robust:
            formula = self.design.formula
            samples = robust_samples(self.samples, self.posterior, self._data(), formula)
            draws = named_draws(samples.constrained, self.design, self.family)
        return _tables.summary_table(draws, names, self.verdict, prob, ratio)

    def varcorr(self, *, prob: float = 0.9) -> Any:
        """Return sds and correlations of random effects as a `pandas.DataFrame`."""
        return _tables.spread_table(self.draws, self.design, prob)

    def ranef(self, *, prob: float = 0.9) -> Any:
        """Return the effects of all groups, as differences from the average, in a simulation.

        At real sites effects of groups stay with their owner: each site draws its own by
        `fedmcmc.local_draws`, and the server never receives them.

        Returns
        -------
        pandas.DataFrame
            Term, client, group or level, name, mean, median, sd and interval, a row per effect.
        """
        labels = None if self.data is None else self.data.labels
        return _tables.effect_table(self.design, self.effect_draws, labels, prob)

    def forest(
        self, effect: str = "Intercept", *, exponentiate: bool = False, prob: float = 0.9
    ) -> "_tables.Forest":
        """Plot each group's coefficient, the population's and a new group's.

        The intercept is the linear predictor at average covariates. In a simulation only; see
        `ranef`.

        Parameters
        ----------
        effect
            Name of an effect of the local term, such as ``"Intercept"``.
        exponentiate, prob
            See `summary`.

        Returns
        -------
        Forest
            ``.figure`` (matplotlib) and ``.table``.
        """
        return _text.forest(self, effect, exponentiate, prob)

    def predict(
        self,
        new: Any,
        *,
        client: Any = "new",
        kind: Literal["mean", "outcome"] = "mean",
        prob: float = 0.9,
        summary: bool = True,
        seed: int = 0,
    ) -> Any:
        """Predict outcomes of the rows of a table.

        Parameters
        ----------
        new
            Table with the columns of the formula's right side.
        client
            ``"new"`` for a client that is not in the study: the mean integrates over its effect,
            and the interval includes the differences between clients. ``None`` for effects of
            zero, which is another number if the link is not linear. A label of a client for its
            own effects (in a simulation).
        kind
            ``"mean"`` for expected outcomes, ``"outcome"`` for outcomes.
        prob, summary, seed
            Probability of the intervals; if `summary` is false, draws ``[num_draws, num_rows]``
            are returned; seed of the draws.

        Returns
        -------
        pandas.DataFrame or numpy.ndarray
            Mean, median, sd and interval, a row per row of `new` (and category of an ordinal
            outcome).

        Raises
        ------
        ValueError
            If `client` is no label of the study, or a column is missing.
        """
        if kind not in ("mean", "outcome"):
            raise ValueError(f"kind must be 'mean' or 'outcome', got {kind!r}.")
        in_study = client is not None and not (isinstance(client, str) and client == "new")
        clients = self.design.schema.clients
        if in_study and str(client) not in clients:
            names = ", ".join(map(repr, clients))
            raise ValueError(f"client must be 'new', None or one of {names}; got {client!r}.")
        rows = self.design.rows(new, client, outcome=False)
        num_missing = _tables.num_rows(new) - len(rows["x"])
        if num_missing:
            raise ValueError(
                f"{num_missing} rows of the table have missing values, and no prediction. Remove "
                f"these rows."
            )
        if kind == "outcome" and self.design.formula.trials is not None:
            raise ValueError(
                "kind='outcome' needs numbers of trials, which predictions do not read; "
                "kind='mean' returns probabilities."
            )
        effects = self.effect_draws if in_study else self._shared_draws(MAX_DRAWS)
        places = {term.label: self._place(term, rows, client) for term in self.design.terms}
        mean, draws = predict_rows(self.design, self.family, effects, rows, places, seed, kind)
        return _tables.prediction_table(mean, draws, prob) if summary else draws

    def effects(
        self,
        column: str,
        *,
        values: Sequence[Any] | None = None,
        contrast: Literal["difference", "ratio"] = "difference",
        prob: float = 0.9,
    ) -> Any:
        """Compare average expected outcomes if all rows had the same value of a column.

        Each client sums expected outcomes over its rows, with its own effects, for each value and
        draw (g-computation, or standardization); the server divides the sums. Without confounding
        beyond the covariates this is the average causal effect in the study's patients. The tables
        of all clients are needed (a simulation).

        Parameters
        ----------
        column
            Name of a column of the formula, such as ``"trt"``.
        values
            Values to compare with the first of them; by default the column's levels, or 0 and 1
            for numbers.
        contrast
            ``"difference"`` or ``"ratio"`` of averages: for a binary outcome, the risk difference
            or the risk ratio.
        prob
            Probability of the intervals.

        Returns
        -------
        pandas.DataFrame
            A row per value and per contrast: mean, median, sd, interval, and the probability of a
            contrast above zero (difference) or one (ratio).

        Raises
        ------
        ValueError
            If a covariate of the model may be missing.
        """
        if getattr(self.design, "covariates", ()):
            raise ValueError(
                "Average effects need complete covariates, and this model has missing= covariates."
            )
        if self.tables is None:
            self._data()  # raises
        assert self.tables is not None
        arms = _effects.arms_of(column, self.design, values)
        effects, term = self.effect_draws, local_term(self.design)
        data, sums, total = self._data(), [], 0.0
        groups = np.split(row_groups(data), np.cumsum(np.asarray(data.size))[:-1])
        for arm in arms:
            parts = []
            for i, label in enumerate(data.labels):
                rows = self.design.rows(_effects.set_column(self.tables[label], column, arm), label)
                local = None if term is None else (term, effects.of_term(term)[:, i], groups[i])
                parts.append(
                    _effects.client_sums(self.design, self.family, effects.values, local, rows)
                )
            total = sum(weight for _, weight in parts)
            sums.append(sum(part for part, _ in parts))
        means = [np.asarray(x) / total for x in sums]
        return _effects.effect_rows(column, arms, means, contrast, prob)

    def loo(self, *, groups: bool = False, secure_sum: bool = True, **settings: Any) -> Any:
        """Estimate leave-one-out predictive densities, of rows or of groups.

        Parameters
        ----------
        groups
            If true, all rows of a group are left out together: how well are rows of a new group
            predicted? Otherwise single rows are left out, and the effect of their group is known
            from its other rows.
        secure_sum, **settings
            See `fedmcmc.criticism.loo`.

        Returns
        -------
        fedmcmc.criticism.Loo
            Sums with standard errors and the number of unreliable terms.
        """
        data = self._data()
        if groups:
            posterior = self.fitted.posterior
            if posterior.local is not None:
                raise ValueError(
                    "groups=True integrates effects out by quadrature, for at most "
                    f"{hierarchy.MAX_DIMENSIONS} effects per group."
                )
            unit = "client" if local_term(self.design) is None else "group"
            # A group often changes the posterior much.
            settings = {"unit": unit, "refine": True, "secure_sum": secure_sum, **settings}
            return criticism.loo(posterior, data, self.fitted, **settings)
        _refuse_weights(data)
        model, rows, draws = joint_posterior(self.model, data, self.effect_draws)
        return criticism.loo(model, rows, draws, unit="row", secure_sum=secure_sum, **settings)

    def pp_check(
        self, statistics: Any = None, *, seed: int = 0, secure_sum: bool = True, **settings: Any
    ) -> Any:
        """Compare sums over rows with sums over outcomes drawn from the model.

        Replicated outcomes have the effects of the study's groups, drawn given their rows.

        Parameters
        ----------
        statistics
            Functions of rows by name; by default the outcome, its square, and zeros of counts.
        seed, secure_sum, **settings
            Seed of the outcomes; see `fedmcmc.criticism.predictive_check`.

        Returns
        -------
        fedmcmc.criticism.PredictiveCheck
            Observed and replicated sums with p-values.
        """
        _refuse_weights(self._data())
        model, rows, draws = joint_posterior(self.model, self._data(), self.effect_draws)
        chosen = _effects.default_statistics(self.family) if statistics is None else statistics
        key = jax.random.key(seed)
        try:
            return criticism.predictive_check(
                key, model, rows, draws, chosen, secure_sum=secure_sum, **settings
            )
        except NotImplementedError as error:
            raise ValueError(
                f"No outcomes can be drawn from the model, because {error}."
            ) from error

    def methods_text(self) -> str:
        """Return a paragraph for the methods section of a paper."""
        return _text.methods(self)

    def save(self, path: str | Path) -> Path:
        """Write the fit to a NetCDF file, for `fedmcmc.load` and ArviZ.

        The file has draws, formula, schema (sums over all sites), priors, verdict, report and
        versions, but no rows.

        Parameters
        ----------
        path
            Path of the file, such as ``"trial.nc"``; missing folders are created.

        Raises
        ------
        ImportError
            If the extra ``arviz`` is not installed.
        ValueError
            If a prior is not a distribution of NumPyro.
        """
        coords: dict[str, Any] = {}
        dims: dict[str, Any] = {}
        if "b" in self.samples.constrained:
            coords["coefficient"], dims["b"] = list(self.design.names), ["coefficient"]
        for term in self.design.terms:
            coords[f"{term.label} effect"] = list(term.names)
            dims[f"sd_{term.label}"] = [f"{term.label} effect"]
        datatree = self.samples.to_datatree(coords=coords, dims=dims)
        return write_netcdf(path, store_model_fit(self), datatree)

    def __repr__(self) -> str:
        """Return the formula, the verdict and the summary."""
        header = f"{self.formula} ({_text.describe_family(self.family)})"
        return (
            f"{header}\n{self.verdict}\n\n{self.summary().to_string(float_format='{:.3g}'.format)}"
        )

    def _repr_html_(self) -> str:
        """Return the report as HTML, for notebooks."""
        return self.report.page().body

    def _place(self, term: Any, rows: Mapping[str, Any], client: Any) -> np.ndarray | None:
        """Return the index of the effect of each row for `predict_rows`."""
        num_rows = len(rows["x"])
        if client is None:
            return None
        index = rows.get(f"index_{term.label}")
        is_new = isinstance(client, str) and client == "new"
        if term.kind == "shared":
            is_unknown = is_new and self.design.schema.client in term.label.split(":")
            return np.full(num_rows, -1) if index is None or is_unknown else np.asarray(index)
        if is_new:
            return np.full(num_rows, -1)
        number = list(map(str, self._data().labels)).index(str(client))
        group_labels = self._data().group_labels
        if group_labels is None:
            return np.full(num_rows, number)
        groups = rows.get(f"group_{term.label}")
        if groups is None:
            return np.full(num_rows, -1)
        numbers = {str(label): i for i, label in enumerate(group_labels[number])}
        start = number * self._data().group_mask.shape[1]
        return np.array([start + numbers[x] if x in numbers else -1 for x in map(str, groups)])


def _refuse_weights(data: FederatedData) -> None:
    if "weights" in row_values(data.rows):
        raise ValueError(
            "Rows have weights, and this check counts each row once: repeat rows in place of "
            "weights."
        )
