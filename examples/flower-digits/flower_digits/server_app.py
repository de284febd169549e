"""The server: a run's configuration says which algorithm it trains, and for how long."""

from pathlib import Path

from fedda.flower import Settings, serve
from fedda.simulate.devices import start_up
from fedda.tasks import config
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_digits.problem import TASK, test_set

start_up()
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    given = context.run_config
    test = test_set()
    serve(
        grid,
        Settings(
            algorithm=str(given["algorithm"]),
            chosen=config.parse(str(given["settings"]).split()),
            task=TASK,
            example=test,
            test=test,
            rounds=int(given["rounds"]),
            cohort=int(given["cohort"]),
            nodes=int(given["nodes"]),
            seed=int(given["seed"]),
            deadline=float(given["deadline"]),
            directory=Path(str(given["out"])) if given["out"] else None,
        ),
    )
