"""Effects of clients beside effects of groups in clients, against the exact Gaussian posterior."""

import pickle

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from benchmarks.timing import count_programs
from fedmcmc.interop.numpyro import share_client_effects

HOSPITAL_SD, PATIENT_SD, PRIOR_SD = 1.5, 0.7, 2.0
GROUPS = [[0, 0, 1, 1, 1], [0, 0], [0, 1, 1, 2], [5]]


def model(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD))
    hospital = numpyro.sample("hospital", dist.Normal(mu, HOSPITAL_SD), infer={"local": "client"})
    patient = numpyro.sample("patient", dist.Normal(0, PATIENT_SD), infer={"local": True})
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(hospital + patient, 1), obs=y)


def make_data(seed):
    rng = np.random.default_rng(seed)
    clients = [{"y": i + rng.normal(size=len(x)).astype(np.float32)} for i, x in enumerate(GROUPS)]
    return fedmcmc.FederatedData.from_clients(clients, groups=GROUPS)


def exact_moments(data):
    """Return means and sds of the mean and of the hospitals' effects, ``[1 + num_clients]``."""
    y, sizes = np.asarray(data.rows.values["y"], float), np.asarray(data.sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    patient = 10 * client + np.concatenate(GROUPS)
    patients = PATIENT_SD**2 * (patient[:, None] == patient)
    effects = np.column_stack([np.ones_like(y), client[:, None] == np.arange(len(sizes))])
    noise_precision = np.linalg.inv(np.eye(len(y)) + patients)
    prior = np.diag([PRIOR_SD**-2.0, *[HOSPITAL_SD**-2.0] * len(sizes)])
    covariance = np.linalg.inv(prior + effects.T @ noise_precision @ effects)
    return covariance @ (effects.T @ noise_precision @ y), np.sqrt(np.diagonal(covariance))


def test_posterior_of_two_levels_is_exact():
    for seed in range(2):
        shared, data = share_client_effects(model, make_data(seed))
        with count_programs() as programs:
            fitted = fedmcmc.fit(shared, data, rng_key=jax.random.key(0), progress=False)
        draws = fitted.samples.constrained
        effects = HOSPITAL_SD * draws["hospital_clients"].reshape(-1, len(GROUPS))
        draws = np.column_stack([draws["mu"].ravel(), effects])
        means, sds = exact_moments(data)
        np.testing.assert_allclose(draws.mean(0), means, atol=4 / 60 * sds.max())
        np.testing.assert_allclose(draws.std(0), sds, rtol=0.08)
    assert not programs  # a model with the same parts and shapes is not compiled again


def test_model_is_pickled_and_index_is_added():
    data = make_data(0)
    shared, new = share_client_effects(model, data, sites=["hospital"])
    assert pickle.loads(pickle.dumps(shared)) == shared == share_client_effects(model, data)[0]
    np.testing.assert_array_equal(
        new.rows.values["client_index"], np.repeat(range(4), [5, 2, 4, 1])
    )
    assert new.group_labels == data.group_labels


def test_errors():
    def wide(y=None):
        numpyro.sample("effect", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("scale", dist.Gamma(1, 1))

    data = make_data(0)
    for name, match in [("effect", "number.*Independent of shape"), ("scale", "Gamma")]:
        shared, new = share_client_effects(wide, data, sites=[name])
        with pytest.raises(ValueError, match=match):
            fedmcmc.from_numpyro(shared, example=new)
    with pytest.raises(ValueError, match="no site is marked"):
        share_client_effects(wide, data)
    with pytest.raises(ValueError, match="'other' is no latent"):
        share_client_effects(model, data, sites=["other"])
    with pytest.raises(ValueError, match="adds a column 'client_index'"):
        share_client_effects(*share_client_effects(model, data))
    with pytest.raises(ValueError, match="share_client_effects"):
        fedmcmc.from_numpyro(model, example=data)
