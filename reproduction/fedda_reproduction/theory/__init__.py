"""The paper's view of federated optimisers as differential equations, measured.

Nothing here is needed to train. `problems` draws problems, `flows` has the equations and their
solutions; `exact`, `orders`, `deviation`, `growth` and `ratios` measure; `claims` says what
follows.
"""
