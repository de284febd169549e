"""The FedDA paper (Jin et al., ICML 2022): its numbers, its experiments, and our results.

- `published`: the numbers of the paper, from `tables/`; `methods`: names, and published settings.
- `experiments`: the runs of each table and figure, from `experiments.toml`.
- `cells`: one file for each finished run; `training`: makes runs, and continues unfinished ones.
- `comparison`: compares finished runs; `verdicts`: checks the claims of the paper.
- `tables`: finished runs as tables.
- `page`: fills in `README.md` of a results folder; `report`: makes a web page of it, with figures.
"""
