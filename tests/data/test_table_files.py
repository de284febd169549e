"""Tables in CSV and Parquet files give the federation that pandas would give."""

import re

import numpy as np
import pandas as pd
import pytest

import fedda
from fedda.data.columns import MISSING
from fedda.errors import InputError
from helpers import hospitals

TABLE = pd.DataFrame(hospitals.columns(rows=600))
NAMES = {"client": "hospital", "label": "outcome"}


def assert_same(one, other):
    assert (one.names, one.classes, one.features) == (other.names, other.classes, other.features)
    assert one.preparation == other.preparation
    for split in ("clients", "test"):
        for own, others in zip(getattr(one, split), getattr(other, split), strict=True):
            np.testing.assert_array_equal(own[0], others[0])
            np.testing.assert_array_equal(own[1], others[1])


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_csv_files_are_read_as_by_pandas(tmp_path, delimiter, encoding):
    table = TABLE.assign(
        ward=TABLE.ward.replace("surgery", 'a "ward", with;\tall | of ünicode\nin two lines')
    )
    path = tmp_path / "visits.csv"
    table.to_csv(path, sep=delimiter, encoding=encoding, index=False)
    found = fedda.federation(path, **NAMES)
    assert_same(found, fedda.federation(table, **NAMES))
    options = {"sep": delimiter, "encoding": encoding, "na_values": list(MISSING)}
    read = pd.read_csv(path, keep_default_na=False, **options)
    assert_same(found, fedda.federation(read, **NAMES))


def test_an_index_that_pandas_wrote_is_no_feature(tmp_path):
    TABLE.to_csv(tmp_path / "visits.csv")
    expected = fedda.federation(TABLE, **NAMES)
    assert_same(fedda.federation(tmp_path / "visits.csv", **NAMES), expected)
    pytest.importorskip("pyarrow")
    TABLE.set_index(np.arange(600) * 2).to_parquet(tmp_path / "visits.parquet")
    assert_same(fedda.federation(str(tmp_path / "visits.parquet"), **NAMES), expected)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_folder_of_files_is_one_table(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    for number, rows in enumerate((TABLE[:100], TABLE[100:350], TABLE[350:])):
        path = tmp_path / f"{number}.{suffix}"
        if suffix == "csv":
            rows.to_csv(path, index=False)
        else:
            rows.to_parquet(path, index=False)
    assert_same(fedda.federation(tmp_path, **NAMES), fedda.federation(TABLE, **NAMES))


def test_every_file_of_a_folder_is_a_client_if_no_column_is(tmp_path):
    for name, own in TABLE.groupby("hospital"):
        own.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv", index=False)
    found = fedda.federation(tmp_path, label="outcome")
    by_hospital = TABLE.sort_values("hospital", kind="stable")
    assert_same(found, fedda.federation(by_hospital, **NAMES))


def test_train_and_test_folders_are_the_splits(tmp_path):
    for split, rows in (("train", TABLE[:400]), ("test", TABLE[400:])):
        (tmp_path / split).mkdir()
        rows.to_csv(tmp_path / split / "visits.csv", index=False)
    found = fedda.federation(tmp_path, **NAMES)
    expected = fedda.federation(TABLE[:400], test=None, **NAMES)
    assert found.preparation == expected.preparation
    assert sum(len(y) for _, y in found.test) == 200


def csv(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_numbers_text_and_missing_values_of_a_csv_file(tmp_path):
    text = (
        "client,label,whole,float,text,mixed,under,gaps\n"
        " 007 ,0,1,1.5,a,1,1_000,1\n"
        "7,1, 2 ,-2e3,b,x,2_000,NA\n"
        "\n"
        "007,0,3,.5,a,2,1_000,\n"
        "7,1,4,+1,b,3,2_000,nan\n"
    )
    found = fedda.federation(csv(tmp_path / "t.csv", text), test=None)
    assert found.names == ["007", "7"]  # the text, and not the number
    assert found.classes == [0, 1]
    kinds = {column.name: column.kind for column in found.preparation.columns}
    numbers = {name for name, kind in kinds.items() if kind == "number"}
    assert numbers == {"whole", "float", "gaps"}
    assert kinds.keys() - numbers == {"text", "mixed", "under"}
    assert found.features[-1] == "gaps missing"


LINES = "client,label,f\na,0,1\nb,1,2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv is empty, expected a line with the names of the columns"),
        ("\n\n", "t.csv is empty"),
        ("client,label,f\n", "there are no rows"),
        (LINES + "c,1\n", "t.csv, line 4: got 2 cells, expected 3, as in the first line"),
        (LINES + "c,1,2,3\n", "t.csv, line 4: got 4 cells, expected 3"),
        (LINES + '"c\nd",1,2\ne,1\n', "t.csv, line 6: got 2 cells, expected 3"),
        (LINES + 'c,1,"2', "t.csv, line 4: unexpected end of data"),
        (LINES + "c,,2\n", "column 'label' has no value in"),
        (LINES + ",1,2\n", "column 'client' has no value in"),
        ("client,label,f,f\na,0,1,2\n", "t.csv has more than one column 'f'"),
        ("client;lable;f\na;0;1\n", "unknown column 'label'. Did you mean lable?"),
        (LINES + "c,1,inf\n", "column 'f' has inf in"),
    ],
)
def test_a_wrong_csv_file_is_refused(tmp_path, text, message):
    path = csv(tmp_path / "t.csv", text)
    with pytest.raises(InputError, match=re.escape(message)):
        fedda.federation(path)


def test_another_encoding_is_refused_with_advice(tmp_path):
    path = csv(tmp_path / "t.csv", LINES + "é,1,2\n", "latin-1")
    with pytest.raises(
        InputError, match=r"t\.csv is not UTF-8: it has an unexpected byte 0xe9\..*iconv"
    ):
        fedda.federation(path)


def test_a_path_without_a_table_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no table to train on\. Expected a table"):
        fedda.federation(tmp_path)
    with pytest.raises(InputError, match=r"nowhere\.csv does not exist"):
        fedda.federation(tmp_path / "nowhere.csv")


def test_a_column_of_text_in_one_file_is_text_in_all(tmp_path):
    csv(tmp_path / "1.csv", "client,label,f\na,0,1\nb,1,2\n")
    csv(tmp_path / "2.csv", "client,label,f\na,0,x\nb,1,2\n")
    assert fedda.federation(tmp_path, test=None).features == ["f=1", "f=2", "f=x"]
