"""Programs of rules: they do what the rules do, and what cannot be one says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_optim import rules
from ao_optim.programs import OPERATIONS, Program, Update

VALUES = {
    "scale": lambda s, a: s * a,
    "shift": lambda s, a: a + s,
    "add": lambda s, a, b: a + s * b,
    "multiply": lambda s, a, b: a * b,
    "divide": lambda s, a, b: a / b,
    "over": lambda s, a: s / a,
    "add_product": lambda s, a, b, c: a + s * b * c,
    "add_ratio": lambda s, a, b, c: a + s * b / c,
    "root": lambda s, a: a.sqrt(),
    "sign": lambda s, a: a.sign(),
    "magnitude": lambda s, a: a.abs(),
    "at_least": lambda s, a: a.clamp(min=s),
    "at_most": lambda s, a: a.clamp(max=s),
    "constant": lambda s: torch.tensor(s, dtype=torch.float64),
    "above": lambda s, a: (a > s).double(),
    "choose": lambda s, a, b, c: torch.where(a != 0, b, c),
    "norm": lambda s, a: a.norm(),
}


def run_program(program, *inputs):
    """What each output is, in float64."""
    registers = dict(enumerate(inputs))
    for operation, result, operands, number in program.steps:
        registers[result] = VALUES[operation](number, *(registers[place] for place in operands))
    assert set(registers) <= set(range(program.registers))
    return [registers[place] for place in program.outputs]


def random_inputs(rule, options):
    generator = torch.Generator().manual_seed(0)
    param, grad, *moments = (
        torch.randn(50, generator=generator, dtype=torch.float64)
        for _ in range(2 + len(rule.slots(options)))
    )
    slots = rule.slots(options)
    # large enough for a centered second moment
    moments = [m if slot.signed else 9 + m.square() for m, slot in zip(moments, slots, strict=True)]
    return param, grad, *moments


def check(rule, options, step, maximize=False):
    """A rule's program compared with its update, both in float64."""
    options = {**rule.defaults, **options}
    program = Update(rule, options, step, maximize).program
    assert isinstance(program, Program), program
    param, grad, *moments = random_inputs(rule, options)
    found = run_program(program, param, grad, *moments)
    names = [slot.name for slot in rule.slots(options)]
    state = {name: moment.clone() for name, moment in zip(names, moments, strict=True)}
    rule.update(param, -grad if maximize else grad, state, options, step)
    for one, other in zip(found, [param, *(state[name] for name in names)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_operations_are_known_by_all():
    assert set(VALUES) == set(OPERATIONS)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (rules.ADAMW, {}),
        (rules.ADAM, {"weight_decay": 0.1}),
        (rules.LION, {"weight_decay": 0.1}),
        (rules.SGD, {"momentum": 0.0}),
        (rules.SGD, {"nesterov": True, "weight_decay": 0.1}),
        (rules.SGD, {"dampening": 0.5}),
        (rules.RMSPROP, {}),
        (rules.RMSPROP, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
        (rules.ADAGRAD, {"lr_decay": 0.1}),
        (rules.ADEMAMIX, {"t_alpha": 10, "t_beta3": 10}),
        (rules.LAMB, {}),
    ],
)
def test_programs_do_what_rules_do(rule, options):
    check(rule, options, 1)
    check(rule, options, 7, maximize=True)


def custom(update, **fields):
    return replace(rules.SGD, name="custom", update=update, **fields)


def test_a_rule_of_anyone_may_use_operators_and_functions():
    def update(param, grad, state, options, step):
        velocity = state["momentum_buffer"]
        velocity *= 0.5
        velocity += 2 - grad / 3
        size = torch.sqrt(torch.clamp(velocity.clone() ** 2, min=1e-3)) + abs(grad)
        state["momentum_buffer"] = 1 / size
        param -= options["lr"] * velocity.addcdiv(grad, size, value=0.5).neg_()

    check(custom(update), {}, 3)


def test_a_change_in_place_reaches_what_has_the_same_memory():
    def update(param, grad, state, options, step):
        state["momentum_buffer"].detach().mul_(0.5).add_(grad)
        copy = param.clone()
        param.detach().sub_(state["momentum_buffer"])
        param.add_(copy)

    check(replace(rules.SGD, update=update), {}, 1)


def test_outputs_that_are_one_value_have_registers_of_their_own():
    def update(param, grad, state, options, step):
        state["momentum_buffer"].copy_(param.copy_(grad))

    check(custom(update), {}, 1)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (lambda p, g, s, o, t: p.sub_(g.sum()), "custom cannot be traced: it uses sum, which no program"),
        (lambda p, g, s, o, t: p.sub_((g / g.norm()).norm()), "norm of what depends on another norm"),
        (lambda p, g, s, o, t: p.sub_(g.norm(1)), "takes 1 positional argument"),
        (lambda p, g, s, o, t: p.sub_((g > 0) * p), "it uses multiply with a _Mask"),
        (lambda p, g, s, o, t: p.sub_(g) if g > 0 else p, "it looks at values"),
        (lambda p, g, s, o, t: p.sub_(g) if g.sqrt() else p, "it looks at values"),
        (lambda p, g, s, o, t: p.sub_(g) if g == 0 else p, "it looks at values"),
        (lambda p, g, s, o, t: p.copy_(torch.where(g, p, g)), "it uses where, which no program"),
        (lambda p, g, s, o, t: p.mul_(torch.ones(())), "it uses multiply with a Tensor"),
        (lambda p, g, s, o, t: p.lerp_(g, torch.ones(())), "it uses lerp with a Tensor"),
        (lambda p, g, s, o, t: p.copy_(torch.ones(()) * g), "torch.mul on something else"),
        (lambda p, g, s, o, t: p.div_(0.0), "it divides by 0.0"),
        (lambda p, g, s, o, t: p.mul_(float("nan")), "it uses scale with nan"),
        (lambda p, g, s, o, t: s.update(momentum_buffer=torch.ones(50)), "it makes a moment a Tensor"),
        (lambda p, g, s, o, t: s["other"], "'other'"),
    ],
)  # fmt: skip
def test_what_has_no_program_says_why(update, text):
    rule = custom(update)
    assert text in Update(rule, rule.defaults, 1).program


def test_rules_that_compare_choose_element_by_element():
    def update(param, grad, state, options, step):
        both = (grad > 0) & (param < 0.5)
        param.copy_(torch.where(both, param, 2.0) + torch.zeros_like(param))

    check(custom(update), {}, 1)


def test_rules_that_ask_for_shapes_have_none():
    program = Update(rules.MUON, rules.MUON.defaults, 1).program
    assert program == "the rule muon cannot be traced: it uses shape, which no program has"
