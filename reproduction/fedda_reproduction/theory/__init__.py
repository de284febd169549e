"""The theory of the FedDA paper, checked by numerical experiments (`fedda theory`).

The paper reads federated optimisers as differential equations. The modules, in reading order:

- `problems`: random quadratics and classifiers, and networks that learn the digits.
- `equations`: the optimisers as differential equations, solved exactly or by Euler's scheme.
- `identities`: what the paper claims to be exactly equal (F1, F2).
- `convergence`: orders of approximation, as powers of the step size and of the local steps.
- `deviation`: distance of FedDA's and of local momentum from the centralised one (F3, F4).
- `equivalence`, `lag_figures`: FedDA's momentum as FedAvgM's with a lag (`docs/momentum.md`).
- `adam_ratios`: the entries of m-hat / sqrt(v-hat) in FedDA+Adam (F13).
- `fits`: power laws, exponential rates and confidence intervals.
- `measure`: runs all of these and returns one record of plain numbers, `theory.json`.
- `verdicts`, `page`, `figures`: what follows from the record. The text is written by hand in
  `claims.toml` and `page.md`.
"""
