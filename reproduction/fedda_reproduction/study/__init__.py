"""The study of `reproduction/protocol.md`: FedDA and its controls under one rule (`fedda study`).

The modules, in reading order:

- `fedmoments`: an extension of FedDA, tried by the same rule.
- `design`: the conditions, the methods, the common coordinates of their settings, and the draws.
- `federations`: the data of a condition, in blocks: one for tuning and one for each seed.
- `training`: many runs in one program, and the endings of a run.
- `study`: tunes, widens, makes the final runs, and keeps a file for each condition.
- `analysis`: intervals, tests and verdicts, from these files alone.
- `page`, `figures`: the pages and figures.
"""
