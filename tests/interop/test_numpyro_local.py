"""Local sites of NumPyro models: marks, parametrizations and errors."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import LocScaleReparam

import fedmcmc
from fedmcmc import from_numpyro

ROWS = {"x": np.array([0.1, -1.0, 2.0]), "y": np.array([0.5, 0.2, 1.9])}


def observe(mean, y):
    with numpyro.plate("rows", mean.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def marked(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    u = numpyro.sample("u", dist.Normal(mu, tau), infer={"local": True})
    numpyro.deterministic("double", 2 * u)
    numpyro.deterministic("half", mu / 2)
    observe(u + x, y)


def in_plate(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("client", 1):
        u = numpyro.sample("u", dist.Normal(mu, 1))
    observe(u[0] + x, y)


def by_name(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    observe(mu + rate * x, y)


def build(model, **settings):
    return from_numpyro(model, example=ROWS, check_rows=False, **settings)


def sum_log_densities(posterior, position, latent):
    """Return the log density of one group whose rows are ROWS."""
    local = posterior.local
    rows = jax.tree.map(jnp.asarray, ROWS)
    latents = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, *jnp.shape(leaf))), latent)
    return (
        posterior.logprior_fn(position)
        + local.logprior_fn(position, latent)
        + local.loglikelihood_fn(position, latents, rows).sum()
    )


@pytest.mark.parametrize("centered", [0.0, 1.0, {"u": 0.3}])
def test_densities_equal_the_model(centered):
    posterior = from_numpyro(marked, example=ROWS, centered=centered, check_rows=False)
    number = centered["u"] if isinstance(centered, dict) else centered
    name = "u" if number == 1 else "u_decentered"
    assert list(posterior.local.like.tree) == [name]
    assert posterior.loglikelihood_fn is None and posterior.resample_fn is None
    assert sorted(posterior.init_fn(jax.random.key(0))) == ["mu", "tau"]
    position, latent = {"mu": 0.4, "tau": -0.3}, {name: jnp.asarray(0.7)}
    tau = np.exp(-0.3)
    u = 0.4 + tau ** (1 - number) * (0.7 - number * 0.4)
    mean, scale = 0.4 * number, tau**number
    expected = (
        dist.Normal(0, 2).log_prob(0.4)
        + dist.HalfNormal(1).log_prob(tau)
        - 0.3
        + dist.Normal(mean, scale).log_prob(0.7)
        + dist.Normal(u + ROWS["x"], 1).log_prob(ROWS["y"]).sum()
    )
    np.testing.assert_allclose(sum_log_densities(posterior, position, latent), expected, rtol=1e-5)
    shown = posterior.local.constrain_fn(position, latent)
    assert sorted(shown) == ["double", "u"]
    np.testing.assert_allclose(shown["u"], u, rtol=1e-5)
    assert sorted(posterior.constrain_fn(position)) == ["half", "mu", "tau"]


def test_sites_are_local_by_mark_by_plate_or_by_name():
    assert list(build(in_plate).local.like.tree) == ["u_decentered"]
    assert build(by_name).local is None
    assert build(marked, local=[]).local is None
    assert build(in_event_plate, centered=1.0).local.like.tree["u"].shape == (4,)
    model = numpyro.handlers.reparam(marked, config={"u": LocScaleReparam(centered=0)})
    assert list(build(model, local=["u"]).local.like.tree) == ["u_decentered"]


def test_a_positive_site_has_its_jacobian():
    posterior = build(by_name, local=["rate"])
    assert list(posterior.local.like.tree) == ["rate"]  # without a location and a scale
    assert "one per group: rate" in str(posterior)
    actual = posterior.local.logprior_fn({"mu": 0.4}, {"rate": jnp.asarray(0.2)})
    expected = dist.Gamma(2, 1).log_prob(np.exp(0.2)) + 0.2
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_scale_around_a_local_site_applies_to_its_jacobian():
    def tempered(x, y):
        with numpyro.handlers.scale(scale=0.5):
            by_name(x, y)

    posterior = build(tempered, local=["rate"])
    actual = posterior.local.logprior_fn({"mu": 0.4}, {"rate": jnp.asarray(0.2)})
    expected = (dist.Gamma(2, 1).log_prob(np.exp(0.2)) + 0.2) / 2
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_mask_around_a_local_site_applies_to_its_jacobian():
    def half_masked(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.handlers.mask(mask=jnp.array([True, False])):
            rates = dist.Gamma(2, 1).expand([2])
            rate = numpyro.sample("rate", rates, infer={"local": True})
        observe(mu + rate[0] + rate[1] * x, y)

    posterior = build(half_masked)
    actual = posterior.local.logprior_fn({"mu": 0.4}, {"rate": jnp.array([0.2, 0.7])})
    expected = dist.Gamma(2, 1).log_prob(np.exp(0.2)) + 0.2
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("centered", [0.0, 1.0])
def test_a_scale_applies_to_a_reparametrized_site(centered):
    def tempered(x, y):
        with numpyro.handlers.scale(scale=0.5):
            marked(x, y)

    posterior = build(tempered, centered=centered)
    position = {"mu": 0.4, "tau": -0.3}
    (name,) = posterior.local.like.tree
    actual = posterior.local.logprior_fn(position, {name: jnp.asarray(0.7)})
    mean, spread = (0.4, np.exp(-0.3)) if centered else (0.0, 1.0)
    np.testing.assert_allclose(actual, dist.Normal(mean, spread).log_prob(0.7) / 2, rtol=1e-5)
    assert posterior.local.population is None  # sums of tempered latents have another distribution


def test_sites_of_a_scan_may_be_local():
    """A random walk per group; each row observes one step."""

    def walk(visit, y):
        spread = numpyro.sample("spread", dist.HalfNormal(1))

        def step(before, _):
            now = numpyro.sample("level", dist.Normal(before, spread))
            return now, now

        _, levels = scan(step, 0.0, None, length=4)
        with numpyro.plate("rows", len(visit)):
            numpyro.sample("y", dist.Normal(levels[visit], 1.0), obs=y)

    rows = {"visit": np.array([0, 2, 3]), "y": ROWS["y"]}
    posterior = from_numpyro(walk, example=rows, local=["level"], check_rows=False)
    level = jnp.array([0.3, -0.2, 0.5, 0.1])
    before, spread = jnp.append(0.0, level[:-1]), np.exp(0.2)
    actual = posterior.local.logprior_fn({"spread": 0.2}, {"level": level})
    expected = dist.Normal(before, spread).log_prob(level).sum()
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    latents = {"level": jnp.broadcast_to(level, (3, 4))}
    actual = posterior.local.loglikelihood_fn({"spread": 0.2}, latents, rows)
    expected = dist.Normal(level[rows["visit"]], 1.0).log_prob(rows["y"])
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def wrong_way(x, y):
    u = numpyro.sample("u", dist.Normal(0, 1))
    mu = numpyro.sample("mu", dist.Normal(u, 2))
    observe(mu + u + x, y)


def discrete(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    u = numpyro.sample("u", dist.Bernoulli(0.5), infer={"local": True})
    observe(mu * u + x, y)


def per_row(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("rows", len(x)):
        u = numpyro.sample("u", dist.Normal(mu, 1), infer={"local": True})
        numpyro.sample("y", dist.Normal(u + x, 1.0), obs=y)


def grows(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    effects = dist.Normal(mu, 1).expand([len(x)]).to_event(1)
    u = numpyro.sample("u", effects, infer={"local": True})
    observe(u + x, y)


def on_rows(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    u = numpyro.sample("u", dist.Normal(mu + x[0], 1), infer={"local": True})
    observe(u + 0 * x, y)


def in_event_plate(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("visits", 4):
        u = numpyro.sample("u", dist.Normal(mu, 1), infer={"local": True})
    observe(u.sum() + x, y)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (marked, {"local": ["v"]}, "'v', which is no site; the latent sites are mu, tau, u"),
        (marked, {"local": ["y"]}, "'y', which is an observed site"),
        (marked, {"local": ["half"]}, "'half', which is a deterministic site"),
        (marked, {"local": "u"}, "a list of names"),
        (by_name, {"local": ["mu", "rate"]}, "latent sites, mu, rate, are local.*share nothing"),
        (discrete, {}, "'u' is discrete"),
        (discrete, {"local": ["u"]}, "'u' is discrete"),
        (per_row, {}, "local site 'u' lies in the data plate 'rows'.*per group, not one per row"),
        (grows, {}, "local site 'u' grows with the number of rows.*per group, not one per row"),
        (on_rows, {}, "prior of the local site 'u' depends on the rows.*in the likelihood"),
        (on_rows, {"centered": 1.0}, "prior of the local site 'u' depends on the rows"),
        (wrong_way, {"local": ["u"]}, "'mu' depends on a local one"),
        (marked, {"centered": {"tau": 0.5}}, "centered names 'tau'"),
        (marked, {"centered": "auto"}, r"centered=fedmcmc.interop.numpyro.centering\(posterior"),
        (marked, {"centered": 1.5}, r"\[0, 1\], got 1.5"),
    ],
)
def test_invalid_local_sites_raise(model, settings, message):
    with pytest.raises(ValueError, match=message):
        from_numpyro(model, example=ROWS, **settings)


def test_outcomes_of_few_digits_warn():
    """The warning needs floats in single precision and group effects."""

    def counts(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        u = numpyro.sample("u", dist.Normal(mu, 1), infer={"local": True})
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(u) * x), obs=y)

    def shared(x, y):
        observe(numpyro.sample("mu", dist.Normal(0, 2)) + x, y)

    far = ROWS | {"y": ROWS["y"] - 123_456}
    data = fedmcmc.FederatedData.from_clients([ROWS, far])
    with pytest.warns(UserWarning, match=r"'y' .* up to 1\.23e\+05.* is 0\.0078") as caught:
        from_numpyro(marked, example=data)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_numpyro(marked, example=ROWS | {"y": ROWS["y"] - 9_000})
        from_numpyro(shared, example=data)
        from_numpyro(marked, example=data, check_rows=False)
        large = {"x": np.full(3, 1e5), "y": np.array([100_000, 99_000, 101_000])}
        from_numpyro(counts, example=fedmcmc.FederatedData.from_clients([large]))
        with jax.enable_x64(True):
            from_numpyro(marked, example=fedmcmc.FederatedData.from_clients([far]))


def test_an_effect_for_all_clients_warns_with_the_remedy():
    def model(x, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        u = numpyro.sample("u", dist.Normal(0, tau))
        observe(u + x, y)

    with pytest.warns(UserWarning, match=r"local=\['u'\]"):
        from_numpyro(model, example=ROWS)
    assert fedmcmc.marginal(build(model, local=["u"])).local is None


def nested(marks, plates=False):
    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        if plates:
            with numpyro.plate("client", 1):
                ward = numpyro.sample("ward", dist.Normal(mu, 1.0))
            with numpyro.plate("group", 1):
                u = numpyro.sample("u", dist.Normal(ward, 0.5))
        else:
            ward = numpyro.sample("ward", dist.Normal(mu, 1.0), infer={"local": marks[0]})
            u = numpyro.sample("u", dist.Normal(ward, 0.5), infer={"local": marks[1]})
        observe(u + x, y)

    return model


GROUPED = fedmcmc.FederatedData.from_clients([ROWS, ROWS], groups=[[0, 0, 1], [0, 1, 1]])


def test_only_the_marked_site_is_local():
    posterior = from_numpyro(nested((None, True)), example=GROUPED, centered=1.0, check_rows=False)
    assert list(posterior.local.like.tree) == ["u"]
    assert str(posterior).startswith("Posterior(shared by all clients: mu, ward; one per group: u")


def test_two_levels_of_local_sites_raise():
    remedy = "share_client_effects"
    with pytest.raises(ValueError, match=f"'ward' lies in a plate of clients.*{remedy}"):
        from_numpyro(nested((), plates=True), example=GROUPED)
    levels = {"client": ["ward"], "group": ["u"]}
    with pytest.raises(ValueError, match="local must be a list of names"):
        from_numpyro(nested((False, False)), example=GROUPED, local=levels)
    single_groups = build(nested((), plates=True))
    assert sorted(single_groups.local.like.tree) == ["u_decentered", "ward_decentered"]


@pytest.mark.parametrize("mark", ["client", "group", "patient", 2, ["client"]])
def test_invalid_marks_raise_with_their_value(mark):
    with pytest.raises(ValueError, match=rf"'u' has infer={{'local': {re.escape(repr(mark))}}}"):
        from_numpyro(nested((False, mark)), example=ROWS)
