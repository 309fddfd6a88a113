"""Update rules, one per file."""

from __future__ import annotations

from ao_optim.rules.adagrad import ADAGRAD
from ao_optim.rules.adam import ADAM, ADAMW
from ao_optim.rules.ademamix import ADEMAMIX
from ao_optim.rules.base import Options, Rule, Slot, State
from ao_optim.rules.lamb import LAMB
from ao_optim.rules.lion import LION
from ao_optim.rules.muon import MUON
from ao_optim.rules.rmsprop import RMSPROP
from ao_optim.rules.sgd import SGD

__all__ = [
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "ADEMAMIX",
    "LAMB",
    "LION",
    "MUON",
    "RMSPROP",
    "SGD",
    "Options",
    "Rule",
    "Slot",
    "State",
]
