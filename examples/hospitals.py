"""Fifty hospitals in a CSV file with missing values and text: a model for all of them.

The first function writes such a file. Its hospitals differ in size and in their patients. With your
own file, start at `main`.
"""

import csv

import fedda
import numpy as np


def write_visits(path: str, rows: int = 3000) -> None:
    """Write a table of patients: an outcome that depends on age, pressure and ward."""
    rng = np.random.default_rng(0)
    hospital = rng.choice(50, rows, p=rng.dirichlet(np.full(50, 4.0)))
    age = 55 + rng.normal(0, 8, 50)[hospital] + rng.normal(0, 12, rows)
    pressure = rng.normal(120, 15, rows)
    ward = rng.choice(["cardiology", "oncology", "surgery"], rows)
    risk = (age - 55) / 12 + (pressure - 120) / 15 + 2 * (ward == "oncology") - 1
    ill = rng.random(rows) < 1 / (1 + np.exp(-2 * risk))
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "age", "pressure", "ward", "outcome"])
        for i in range(rows):
            measured = f"{pressure[i]:.0f}" if rng.random() < 0.9 else ""  # a tenth is missing
            outcome = "ill" if ill[i] else "well"
            table.writerow([f"hospital {hospital[i]}", f"{age[i]:.1f}", measured, ward[i], outcome])


def main() -> fedda.Result:
    write_visits("visits.csv")
    hospitals = fedda.federation("visits.csv", client="hospital", label="outcome")
    print(hospitals)
    print(hospitals.preparation)
    model = fedda.models.mlp(hospitals.num_features, 32, hospitals.num_classes)
    metrics = [fedda.losses.accuracy]
    result = fedda.run(
        "fedda-adam", model, hospitals, fedda.losses.cross_entropy, metrics=metrics, rounds=50
    )
    print(result)
    print(fedda.evaluate(model, result.params, hospitals, metrics, per_client=True))
    patient = {"age": 71, "pressure": None, "ward": "oncology"}
    print(hospitals.classes[int(result.predict(patient).argmax())])
    return result


if __name__ == "__main__":
    main()
