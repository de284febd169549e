"""Tries that disturb the library in thousands of ways, and a table of what they found: `make soak`.

A kind of try is a module with a function `prepare(folder, name)`, which returns a function
`attempt(seed)`. An attempt disturbs something at random, drawn from its seed, and fails with an
`AssertionError`. It returns how many things it tried, such as kills. Attempts of one kind run one
after the other in a process of their own, so that memory is measured by kind and a crash is
counted. The same seed makes the same try again, up to the speed of the machine:

    python -m soak fuzz --seed 123
"""
