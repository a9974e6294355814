"""torch.distributions of what depends on weights, with validate_args as it is: values and gradients are torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D

import mycel

W = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HALF = torch.tensor(0.5, dtype=torch.float64)


def positive(w):
    return F.softplus(w) + 0.1


def covariance(w):
    return w @ w.mT + torch.eye(len(w), dtype=w.dtype)


def squeezed(w):
    return D.TransformedDistribution(D.Independent(D.Normal(w, positive(w)), 1), [D.StickBreakingTransform()])


FAMILIES = {
    "bernoulli": lambda w: D.Bernoulli(torch.sigmoid(w)),
    "beta": lambda w: D.Beta(positive(w), positive(-w)),
    "binomial": lambda w: D.Binomial(5, logits=w),
    "categorical": lambda w: D.Categorical(w.softmax(-1)),
    "cauchy": lambda w: D.Cauchy(w, positive(w)),
    "chi2": lambda w: D.Chi2(positive(w)),
    "continuous_bernoulli": lambda w: D.ContinuousBernoulli(torch.sigmoid(w)),
    "dirichlet": lambda w: D.Dirichlet(positive(w)),
    "exponential": lambda w: D.Exponential(positive(w)),
    "fisher": lambda w: D.FisherSnedecor(positive(w), positive(-w)),
    "gamma": lambda w: D.Gamma(positive(w), positive(-w)),
    "geometric": lambda w: D.Geometric(torch.sigmoid(w)),
    "gumbel": lambda w: D.Gumbel(w, positive(w)),
    "half_cauchy": lambda w: D.HalfCauchy(positive(w)),
    "half_normal": lambda w: D.HalfNormal(positive(w)),
    "independent": lambda w: D.Independent(D.Normal(w, positive(w)), 1),
    "inverse_gamma": lambda w: D.InverseGamma(positive(w) + 2, positive(-w)),
    "kumaraswamy": lambda w: D.Kumaraswamy(positive(w), positive(-w)),
    "lkj": lambda w: D.LKJCholesky(4, positive(w[0, 0])),
    "laplace": lambda w: D.Laplace(w, positive(w)),
    "log_normal": lambda w: D.LogNormal(w, positive(w)),
    "low_rank": lambda w: D.LowRankMultivariateNormal(w[:, 0], w, positive(w[:, 1])),
    "mixture": lambda w: D.MixtureSameFamily(D.Categorical(logits=w[:, 0]), D.Independent(D.Normal(w, positive(w)), 1)),
    "multinomial": lambda w: D.Multinomial(5, logits=w),
    "normals": lambda w: D.MultivariateNormal(w[:, 0], covariance(w)),
    "normals_by_precision": lambda w: D.MultivariateNormal(w[:, 0], precision_matrix=covariance(w)),
    "negative_binomial": lambda w: D.NegativeBinomial(5, logits=w),
    "one_hot": lambda w: D.OneHotCategorical(logits=w),
    "pareto": lambda w: D.Pareto(positive(w), positive(-w)),
    "poisson": lambda w: D.Poisson(positive(w)),
    "relaxed_bernoulli": lambda w: D.RelaxedBernoulli(HALF, logits=w),
    "relaxed_one_hot": lambda w: D.RelaxedOneHotCategorical(HALF, logits=w),
    "student": lambda w: D.StudentT(positive(w) + 3, w, positive(w)),
    "squeezed": squeezed,
    "von_mises": lambda w: D.VonMises(w, positive(w)),
    "weibull": lambda w: D.Weibull(positive(w), positive(-w)),
    "wishart": lambda w: D.Wishart(positive(w[0, 0]) + 8, covariance(w)),
}


def agrees(fn):
    w = W.clone().requires_grad_()
    want = fn(w).sum()
    (want_grad,) = torch.autograd.grad(want, w)
    value, grad = mycel.value_and_grad(lambda w: fn(w).sum(), strict=True)(W)
    assert torch.allclose(value, want, rtol=1e-9)
    assert torch.allclose(grad, want_grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_densities(name):
    torch.manual_seed(0)
    samples = FAMILIES[name](W).sample((2,))
    agrees(lambda w: FAMILIES[name](w).log_prob(samples))


@pytest.mark.parametrize(
    "pair",
    [
        ("normals", "normals"),
        ("normals", "low_rank"),
        ("low_rank", "normals_by_precision"),
        ("wishart", "wishart"),
        ("gamma", "exponential"),
        ("beta", "beta"),
        ("dirichlet", "dirichlet"),
        ("binomial", "binomial"),
        ("normal", "laplace"),
        ("categorical", "categorical"),
    ],
)
def test_divergences(pair):
    known = {**FAMILIES, "normal": lambda w: D.Normal(w, positive(w))}
    agrees(lambda w: D.kl_divergence(known[pair[0]](w), known[pair[1]](0.5 * w)))


@pytest.mark.parametrize("name", ["gamma", "chi2", "inverse_gamma", "student", "dirichlet", "beta"])
def test_draws_that_have_a_gradient(name):
    """The mean of many draws has the gradient of the mean."""
    torch.manual_seed(0)
    w = W[:1, :3] + 2
    if name in ("student", "inverse_gamma"):  # far from where a variance ends
        w = w + 6
    draw = mycel.value_and_grad(lambda w: FAMILIES[name](w).rsample((200_000,)).mean(0).sum(), strict=True)
    value, grad = draw(w)
    own = w.clone().requires_grad_()
    mean = FAMILIES[name](own).mean.sum()
    (want,) = torch.autograd.grad(mean, own)
    assert torch.allclose(value, mean, rtol=0.02)
    assert torch.allclose(grad, want, rtol=0.05, atol=0.03)
