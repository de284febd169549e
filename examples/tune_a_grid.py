"""Sixteen rates and two seeds, trained together in one compiled program."""

import fedda
from fedda import tasks
from fedda.tasks.config import Config


def main(rounds: int = 50) -> dict[str, float]:
    problem = tasks.load(Config(model="linear"))
    points = fedda.run_grid(
        "fedda-adagrad",
        problem.model,
        problem.shards,
        problem.loss,
        grid={"client_lr": [0.03, 0.1, 0.3, 1.0], "server_lr": [0.03, 0.1, 0.3, 1.0]},
        seeds=[0, 1],
        rounds=rounds,
    )
    losses: dict[str, list[float]] = {}
    for point in points:
        losses.setdefault(str(point.hyper), []).append(point.result.history[-1]["train_loss"])
    means = {values: sum(found) / len(found) for values, found in losses.items()}
    for values in sorted(means, key=lambda each: means[each])[:3]:
        print(f"{values}: training loss {means[values]:.4f}")
    return means


if __name__ == "__main__":
    main()
