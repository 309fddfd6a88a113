"""The steps of Adam and Lion: their kernels pass the suite, and kernels that are wrong do not."""

from __future__ import annotations

import pytest
import torch

from ao_core import Kernel
from ao_core.testing import KernelSuite
from ao_core.testing.base import run
from ao_core.testing.registered import registered
from ao_optim.adam import adam_step
from ao_optim.calls import StepCall
from ao_optim.lion import lion_step


class TestReference(KernelSuite):
    kernel = "reference_adam_step"


class TestLionReference(KernelSuite):
    kernel = "reference_lion_step"


class TestTorch(KernelSuite):
    kernel = "torch_adam_step"


def no_step(params, grads, exp_avgs, exp_avg_sqs, **options):
    pass


def no_decay(params, grads, exp_avgs, exp_avg_sqs, **options):
    adam_step(params, grads, exp_avgs, exp_avg_sqs, **{**options, "weight_decay": 0.0})


def no_second_moment(params, grads, exp_avgs, exp_avg_sqs, **options):
    adam_step(params, grads, exp_avgs, [moment.clone() for moment in exp_avg_sqs], **options)


def negated_gradients(params, grads, exp_avgs, exp_avg_sqs, **options):
    if options["maximize"]:
        torch._foreach_neg_(grads)
    adam_step(params, grads, exp_avgs, exp_avg_sqs, **{**options, "maximize": False})


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (no_step, "parameters are off"),
        (no_decay, "parameters are off"),
        (no_second_moment, "a moment is off"),
        (negated_gradients, "changed gradients"),
    ],
)
def test_wrong_kernels_fail(fn, text):
    class Wrong(KernelSuite):
        records = (Kernel("wrong_adam_step", "adam_step", "flat", "cpu", fn, 0),)
        kernel = "wrong_adam_step"

    with registered(*Wrong.records), pytest.raises(AssertionError, match=text):
        run(Wrong, "test_results")


def sign_of_gradients(params, grads, exp_avgs, **options):
    lion_step(
        params, [grad.clone() for grad in grads], exp_avgs, **{**options, "betas": (0.0, 0.99)}
    )


def test_a_wrong_lion_fails():
    class Wrong(KernelSuite):
        records = (Kernel("wrong_lion_step", "lion_step", "flat", "cpu", sign_of_gradients, 0),)
        kernel = "wrong_lion_step"

    with registered(*Wrong.records), pytest.raises(AssertionError, match="parameters are off"):
        run(Wrong, "test_results")


def test_a_call_has_the_formats_of_all_moments():
    specs = TestReference().trial.specs[2]
    call = StepCall("adam_step", specs, 700, torch.float32, torch.float32, "cpu")
    assert call.layout == "flat"
    assert len({call, StepCall("adam_step", specs, 700, torch.float32, torch.float32, "cpu")}) == 1
