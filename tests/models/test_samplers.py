"""Schedules and steps equal diffusers' schedulers, on random model outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dit_cases import arrays, diffusers, torch
from mxjax_models import samplers

EPS = 2.0**-23
SHAPE = (2, 4, 8, 8)

FLOWS = {
    "flux-dev": (dict(use_dynamic_shifting=True), 28, 3072),
    "schnell": (dict(shift=1.0), 4, None),
    "sana": (dict(shift=3.0), 20, None),
}


def flow(kind):
    options, steps, tokens = FLOWS[kind]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    if kind == "sana":  # its pipeline leaves the sigmas to the scheduler, FLUX.1's gives them
        scheduler.set_timesteps(steps)
        return scheduler, samplers.flow_schedule(steps, shift=3.0)
    sigmas = np.linspace(1.0, 1 / steps, steps)
    if tokens is None:
        scheduler.set_timesteps(sigmas=sigmas)
        return scheduler, samplers.flow_schedule(steps)
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    mu = samplers.flux_shift(tokens)
    assert mu == pytest.approx(calculate_shift(tokens, 256, 4096, 0.5, 1.15), rel=1e-14)
    scheduler.set_timesteps(sigmas=sigmas, mu=mu)
    return scheduler, samplers.flow_schedule(steps, mu=mu)


def dpm(steps=20):
    scheduler = diffusers.DPMSolverMultistepScheduler()  # what PixArt-Sigma's folders hold
    scheduler.set_timesteps(steps)
    return scheduler, samplers.dpm_schedule(steps)


@pytest.mark.parametrize("kind", FLOWS)
def test_flow_schedules_equal_diffusers(kind):
    """Float64 rounded once, against float32 and back: a few ulp."""
    scheduler, schedule = flow(kind)
    np.testing.assert_allclose(schedule.sigmas, scheduler.sigmas.numpy(), rtol=4 * EPS)
    np.testing.assert_allclose(schedule.timesteps, scheduler.timesteps.numpy(), rtol=4 * EPS)


@pytest.mark.parametrize("steps", [4, 20, 27])
def test_dpm_schedule_equals_diffusers(steps):
    """Products of up to 1000 factors that differ in the last ulp: sqrt(1000) eps, and 1 - alpha cancels at early times.

    sigma^2 = (1 - alpha) / alpha, so an error of eps in alpha is one of eps / (1 - alpha), (1 + sigma^2) / sigma^2.
    """
    scheduler, schedule = dpm(steps)
    np.testing.assert_array_equal(schedule.timesteps, scheduler.timesteps.numpy())
    want = scheduler.sigmas.numpy()
    assert want[-1] == schedule.sigmas[-1] == 0
    error = np.abs(np.asarray(schedule.sigmas)[:-1] / want[:-1] - 1)
    assert (error <= EPS * (32 + (1 + want[:-1] ** 2) / want[:-1] ** 2)).all()


def walk(scheduler, schedule, step, tolerance):
    """Every step from diffusers' own state, so that each is compared alone; then the whole run, inside ``scan``."""
    outputs = arrays(*[SHAPE] * len(scheduler.timesteps), seed=1)
    (start,) = arrays(SHAPE)
    x, memory, total = torch.tensor(start), None, 0.0
    for i, (t, output) in enumerate(zip(scheduler.timesteps, outputs, strict=True)):
        want = scheduler.step(torch.tensor(output), t, x, return_dict=False)[0]
        got, memory = step(schedule, i, jnp.asarray(x.numpy()), jnp.asarray(output), memory)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=tolerance(want.numpy()))
        x, total = want, total + tolerance(want.numpy())
    table, times = jnp.asarray(np.stack(outputs)), schedule.timesteps

    @jax.jit
    def run(x):
        return samplers.sample(lambda x, t: table[jnp.argmin(jnp.abs(times - t))], x, schedule)

    return np.asarray(run(start)), x.numpy(), total


@pytest.mark.parametrize("kind", FLOWS)
def test_flow_steps_equal_diffusers(kind):
    """x + dt v: a few roundings of numbers up to 5."""
    scheduler, schedule = flow(kind)
    got, want, atol = walk(scheduler, schedule, samplers.flow_step, lambda _: 5 * 8 * EPS)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_dpm_steps_equal_diffusers():
    """Every term is of the size of the result, and the sigmas in its coefficients agree to 64 eps (20 steps, above)."""
    scheduler, schedule = dpm()
    got, want, atol = walk(scheduler, schedule, samplers.dpm_step, lambda want: 64 * EPS * np.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def flow_dpm(steps):
    """SANA's scheduler_config.json."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0, solver_order=2
    )
    scheduler.set_timesteps(steps)
    return scheduler, samplers.flow_dpm_schedule(steps)


@pytest.mark.parametrize("steps", [4, 20])
def test_flow_dpm_schedule_equals_diffusers(steps):
    """The same float64 expression, rounded once."""
    scheduler, schedule = flow_dpm(steps)
    np.testing.assert_array_equal(schedule.timesteps, scheduler.timesteps.numpy())
    np.testing.assert_allclose(schedule.sigmas, scheduler.sigmas.numpy(), rtol=EPS)


def test_flow_dpm_steps_equal_diffusers():
    """diffusers takes steps of lambda as differences of logarithms up to 8, whose four roundings are 16 eps; the
    shortest step is 0.2, so its quotient h / 2 h' is off by some 128 eps, and it multiplies D - D', which is below 10.
    """
    scheduler, schedule = flow_dpm(20)
    got, want, atol = walk(scheduler, schedule, samplers.dpm_step, lambda _: 128 * EPS * 10)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_samplers_solve_what_they_should():
    """Data of one point: noise and velocity are known, and every sampler ends at it, first order or second."""
    (start,) = arrays(SHAPE)
    target = 0.3
    flow_schedule = samplers.flow_schedule(7, shift=3.0)
    times = flow_schedule.timesteps / 1000
    end = samplers.sample(lambda x, t: (x - target) / (t / 1000), start * times[0], flow_schedule)
    np.testing.assert_allclose(end, target, atol=1e-5)
    dpm_flow = samplers.flow_dpm_schedule(7)
    steps = dpm_flow.timesteps

    def velocity(x, t):  # timesteps lost their fraction: the schedule knows the time
        return (x - target) / dpm_flow.sigmas[jnp.argmin(jnp.abs(steps - t))]

    np.testing.assert_allclose(samplers.sample(velocity, start, dpm_flow), target, atol=1e-5)
    schedule = samplers.dpm_schedule(9)

    def noise(x, t):
        sigma = schedule.sigmas[jnp.argmin(jnp.abs(schedule.timesteps - t))]
        return (x * jnp.sqrt(1 + sigma**2) - target) / sigma

    # Errors of x are divided by alpha, 0.0064 at the start, when the data is predicted: 157 * a few eps.
    np.testing.assert_allclose(samplers.sample(noise, start, schedule), target, atol=157 * 64 * EPS)
