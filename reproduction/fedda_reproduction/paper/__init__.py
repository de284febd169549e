"""The FedDA paper (Jin et al., ICML 2022) as data: its numbers, its experiments, our results.

`published` reads the numbers that were printed, `experiments` says which runs stand against them,
`cells` keeps one file for each finished run, `claims` lets several processes fill one folder,
`tables` puts the two side by side, `verdicts` says what becomes of the paper's claims (`rivals` and
`conduct` judge them, by `evidence`), and `readme` and `web` write it all down.
"""
