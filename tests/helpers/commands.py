"""Settings for commands that tests run."""

# A short run.
QUICK = ["model=linear", "clients=12", "cohort=3", "rounds=4", "eval_every=2"]
# A run in which no upload is finite.
WILD = ["client_lr=3e38", "local_work=5"]
