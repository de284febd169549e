"""Fifty hospitals: a table with missing values, text and an outcome that depends on both."""

import csv

import numpy as np

HOSPITALS = 50
NUMBERS = ("age", "pressure", "creatinine", "income")
TEXTS = ("sex", "ward")
WARDS = ("cardiology", "geriatrics", "oncology", "surgery")


def columns(rows: int = 3000, seed: int = 0) -> dict[str, list]:
    """Return the columns of the table. None is a missing value.

    Numbers have scales from 0.1 to 10,000. Hospitals differ in size, in their patients' age and in
    how often the outcome is `ill`.
    """
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(HOSPITALS, 4.0))
    hospital = np.concatenate(
        [np.arange(HOSPITALS), rng.choice(HOSPITALS, rows - HOSPITALS, p=shares)]
    )
    rng.shuffle(hospital)
    older, sicker = rng.normal(0, 8, HOSPITALS), rng.normal(0, 0.5, HOSPITALS)
    age = 55 + older[hospital] + rng.normal(0, 12, rows)
    pressure = 120 + 0.3 * (age - 55) + rng.normal(0, 15, rows)
    creatinine = np.exp(rng.normal(0, 0.3, rows))
    income = 30_000 + rng.normal(0, 10_000, rows)
    sex, ward = rng.choice(["F", "M"], rows), rng.choice(WARDS, rows)
    risk = (
        (age - 55) / 12
        + (pressure - 120) / 15
        + 2 * (creatinine - 1) / 0.3
        + np.where(ward == "oncology", 2.0, 0)
        - np.where(sex == "F", 1.0, 0)
        + sicker[hospital]
    )
    ill = rng.random(rows) < 1 / (1 + np.exp(-2 * risk))
    table = {
        "hospital": [f"hospital {number:02}" for number in hospital],
        "age": age.round(1).tolist(),
        "pressure": pressure.round().tolist(),
        "creatinine": creatinine.round(3).tolist(),
        "income": income.round().tolist(),
        "sex": sex.tolist(),
        "ward": ward.tolist(),
        "outcome": np.where(ill, "ill", "well").tolist(),
    }
    for name, share in (("pressure", 0.1), ("creatinine", 0.2), ("ward", 0.05)):
        absent = rng.random(rows) < share
        table[name] = [None if a else v for a, v in zip(absent, table[name], strict=True)]
    return table


def write_csv(path, rows: int = 3000, seed: int = 0, delimiter: str = ",") -> None:
    """Write the table as a CSV file in which missing values are empty."""
    table = columns(rows, seed)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
