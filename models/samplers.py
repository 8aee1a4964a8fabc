"""From noise to latents in pure JAX: flow-matching Euler (FLUX.1) and DPM-Solver++ 2M (PixArt; SANA's flow).

A sampler is a schedule, a NamedTuple of arrays made once, and a step, a pure function that runs inside ``jit`` and
``scan``; ``sample`` is the loop. All follow diffusers' schedulers step by step (``FlowMatchEulerDiscreteScheduler``;
``DPMSolverMultistepScheduler`` with its defaults, and as SANA's folders have it).

Papers: flow matching, arXiv:2210.02747; time shift, arXiv:2403.03206; DPM-Solver++, arXiv:2211.01095.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class FlowSchedule(NamedTuple):
    """Times of a flow from noise (1) to data (0): x_t = t noise + (1 - t) data, the model predicts noise - data."""

    sigmas: jax.Array  # (steps + 1,) float32, descending to 0

    @property
    def timesteps(self) -> jax.Array:
        """(steps,), 1000 times the sigmas. FLUX.1 is called with them over 1000, SANA with them as they are."""
        return self.sigmas[:-1] * 1000


def flux_shift(tokens: int, low: tuple[int, float] = (256, 0.5), high: tuple[int, float] = (4096, 1.15)) -> float:
    """FLUX.1-dev's ``mu`` for an image of so many tokens: the line through (256, 0.5) and (4096, 1.15)."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return tokens * slope + low[1] - slope * low[0]


def flow_schedule(steps: int, *, shift: float = 1.0, mu: float | None = None, sigmas: Any = None) -> FlowSchedule:
    """A schedule of ``steps`` times, shifted towards noise.

    Args:
        steps: how many times the model is called.
        shift: s' = shift s / (1 + (shift - 1) s): 3 for SANA, 1 for FLUX.1-schnell.
        mu: the shift as its logarithm, in its place: ``flux_shift(tokens)`` for FLUX.1-dev.
        sigmas: (steps,) times before the shift; default: evenly from 1 to 1/steps for FLUX.1 (as its pipeline does)
            where ``mu`` is given or ``shift`` is 1, else evenly in the shifted training times (as the scheduler does).

    Example::

        flow_schedule(28, mu=flux_shift(3072)).sigmas
    """
    if sigmas is None and mu is None and shift != 1.0:
        # The scheduler's own range is shifted already, and shifted again below, as SANA's pipeline has it.
        first, last = (shift * s / (1 + (shift - 1) * s) for s in (1.0, 1e-3))
        s = np.linspace(first, np.float32(last), steps)
    else:
        s = np.linspace(1.0, 1.0 / steps, steps) if sigmas is None else np.asarray(sigmas, np.float64)
    factor = math.exp(mu) if mu is not None else shift
    s = factor * s / (1 + (factor - 1) * s)
    return FlowSchedule(jnp.asarray(np.append(s, 0.0), jnp.float32))


def flow_step(schedule: FlowSchedule, i: Any, x: jax.Array, velocity: jax.Array, memory: Any = None):
    """x + (sigma_{i+1} - sigma_i) velocity, in float32; returns it in the velocity's dtype, and ``memory`` as it is."""
    dt = schedule.sigmas[i + 1] - schedule.sigmas[i]
    return (x.astype(jnp.float32) + dt * velocity).astype(velocity.dtype), memory


class DPMSchedule(NamedTuple):
    """Noise levels of a variance-preserving diffusion, x_t = alpha (data + sigma noise); the model predicts noise."""

    sigmas: jax.Array  # (steps + 1,) float32, descending to 0
    timesteps: jax.Array  # (steps,) int32, what the model is called with


def dpm_schedule(
    steps: int, *, beta_start: float = 1e-4, beta_end: float = 0.02, train_steps: int = 1000
) -> DPMSchedule:
    """PixArt's schedule: linear betas, times evenly spaced over the training steps.

    Example::

        dpm_schedule(20).timesteps   # 999, 949, ..., 50
    """
    betas = np.linspace(beta_start, beta_end, train_steps, dtype=np.float32)
    # Rounded to float32 at each product, as diffusers does it.
    alphas = np.cumprod(np.float32(1) - betas, dtype=np.float32)
    timesteps = np.linspace(0, train_steps - 1, steps + 1).round()[::-1][:-1].astype(np.int32)
    sigmas = (((1 - alphas) / alphas) ** 0.5)[timesteps]
    return DPMSchedule(jnp.asarray(np.append(sigmas, 0.0), jnp.float32), jnp.asarray(timesteps))


class FlowDPMSchedule(NamedTuple):
    """Levels of a flow, x_t = (1 - sigma) data + sigma noise, for DPM-Solver++; the model predicts noise - data."""

    sigmas: jax.Array  # (steps + 1,) float32, descending to 0
    timesteps: jax.Array  # (steps,) int32, what the model is called with


def flow_dpm_schedule(steps: int, *, shift: float = 3.0, train_steps: int = 1000) -> FlowDPMSchedule:
    """SANA's schedule: the shifted flow of its training, with DPM-Solver++ in place of Euler steps.

    diffusers' ``DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3)``.

    Args:
        steps: how many times the model is called.
        shift: s' = shift s / (1 + (shift - 1) s).
        train_steps: what timesteps count in.

    Example::

        flow_dpm_schedule(20).timesteps   # 999, 982, ..., 136
    """
    s = np.linspace(1, 1 / train_steps, steps + 1)
    s = np.flip(1 - s)
    s = (shift * s / (1 + (shift - 1) * s))[:-1]
    timesteps = (s * train_steps).astype(np.int32)  # diffusers cuts the fraction off, too
    return FlowDPMSchedule(jnp.asarray(np.append(s, 0.0), jnp.float32), jnp.asarray(timesteps))


def dpm_step(
    schedule: DPMSchedule | FlowDPMSchedule, i: Any, x: jax.Array, output: jax.Array, memory: jax.Array | None = None
):
    """One step of DPM-Solver++ 2M (arXiv:2211.01095, algorithm 2), first order at both ends.

    With x_t = alpha D + sigma noise, D the predicted data, D' that of the step before, and lambda = log(alpha / sigma):
    x' = (sigma' / sigma) x - alpha' (e^-h - 1) (D + (D - D') h / (2 h')), h and h' the steps of lambda.

    Args:
        schedule: from ``dpm_schedule`` or ``flow_dpm_schedule``.
        i: index of the step; may be traced.
        x: latents.
        output: what the model predicts at ``schedule.timesteps[i]``: noise, or the velocity of a flow.
        memory: D' as the step before returned it; None only at step 0.

    Returns:
        (x', D).
    """
    first, last = jnp.equal(i, 0), jnp.equal(i, schedule.timesteps.shape[0] - 1)
    levels = [schedule.sigmas[i], schedule.sigmas[i + 1], schedule.sigmas[jnp.maximum(i - 1, 0)]]
    y, output = x.astype(jnp.float32), output.astype(jnp.float32)
    if isinstance(schedule, FlowDPMSchedule):
        data = y - levels[0] * output
        alpha, alpha_after = 1 - levels[0], 1 - levels[1]
        ratio, after, before = (s / (1 - s) for s in levels)
    else:
        ratio, after, before = levels
        alpha, alpha_after = jax.lax.rsqrt(1 + ratio**2), jax.lax.rsqrt(1 + after**2)
        data = (y - ratio * alpha * output) / alpha
    # lambda = -log(ratio): steps of it are quotients. At both ends there is no second order: nothing came before the
    # first step, and the last goes to ratio 0, infinitely far. The 2 there only keeps the quotient finite.
    h, h_before = jnp.log(ratio / jnp.where(last, 1, after)), jnp.log(jnp.where(first, 2 * ratio, before) / ratio)
    slope = 0 if memory is None else jnp.where(first | last, 0, (h / (2 * h_before)) * (data - memory))
    shrink = after / ratio  # e^-h
    y = (alpha_after / alpha) * shrink * y - alpha_after * (shrink - 1) * (data + slope)
    return y.astype(x.dtype), data


Schedule = FlowSchedule | DPMSchedule | FlowDPMSchedule


def sample(predict: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, schedule: Schedule):
    """All steps of a schedule, one after the other in a ``scan``.

    Args:
        predict: ``predict(x, timestep)``, the model's velocity or noise, guidance already applied; timestep is scalar.
        x: noise, standard normal.
        schedule: from ``flow_schedule``, ``dpm_schedule`` or ``flow_dpm_schedule``.

    Returns:
        Latents like x.

    Example::

        def predict(x, t):                                         # PixArt, guided
            both = model(jnp.concatenate([x, x]), jnp.full((2 * B,), t), captions, masks)[:, :4]
            nothing, prompt = jnp.split(both, 2)
            return nothing + 4.5 * (prompt - nothing)

        latents = sample(predict, jax.random.normal(key, (B, 4, 128, 128)), dpm_schedule(20))
    """
    step: Any = flow_step if isinstance(schedule, FlowSchedule) else dpm_step
    timesteps = schedule.timesteps

    def body(carry: Any, i: jax.Array):
        x, memory = carry
        x, memory = step(schedule, i, x, predict(x, timesteps[i]).astype(x.dtype), memory)
        return (x, memory), None

    # At step 0 the memory is not looked at; zeros give the loop its shape.
    (x, _), _ = jax.lax.scan(body, (x, jnp.zeros(x.shape, jnp.float32)), jnp.arange(timesteps.shape[0]))
    return x
