"""The equations of the docstrings are typeset: the translator, against Python's own arithmetic."""

import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from fedda.algorithms import registry
from helpers.pages import ROOT

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import docstrings
from mathml import NotationError, formula

VALUES = {"a": 1.7, "b": 0.3, "c": 2.5, "d": 0.9, "β": 0.6, "client_lr": 0.2, "r": 3.0}


def value(element) -> float:
    """The number that a formula in MathML shows, by the rules of presentation MathML."""
    kids = list(element)
    match element.tag:
        case "math" | "span":
            return value(kids[0])
        case "mi" | "mtext":
            return VALUES[element.text]
        case "mn":
            return float(element.text)
        case "mfrac":
            return value(kids[0]) / value(kids[1])
        case "msqrt":
            return math.sqrt(math.prod(map(value, kids)))
        case "msup":
            return value(kids[0]) ** value(kids[1])
        case "msubsup":
            return value(kids[0]) ** value(kids[2])
        case "msub":
            return value(kids[0])
        case "mrow":
            return row(kids)
    raise AssertionError(element.tag)


def row(kids) -> float:
    """A row: sums of products; a bracket is a row of its own."""
    if kids[0].text == "(" and kids[-1].text == ")":
        return row(kids[1:-1])
    total, sign, product, is_empty = 0.0, 1.0, 1.0, True
    for kid in kids:
        if kid.tag == "mo" and kid.text in ("+", "\N{MINUS SIGN}"):
            if not is_empty:
                total += sign * product
            sign, product, is_empty = (1.0 if kid.text == "+" else -1.0), 1.0, True
        elif kid.tag != "mspace" and kid.text != "\N{DOT OPERATOR}":
            product, is_empty = product * value(kid), False
    return total + sign * product


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a - b c / (d + a)", "a - b * c / (d + a)"),
        ("a / b (c - d)", "a / b * (c - d)"),
        ("(a - b) / (c - d)", "(a - b) / (c - d)"),
        ("a - (b - (c - d)) / a", "a - (b - (c - d)) / a"),
        ("client_lr * (a / (1 - beta^(r+1))) / (sqrt(b / (1 - b^2)) + c)",
         "client_lr * (a / (1 - β ** (r + 1))) / (sqrt(b / (1 - b**2)) + c)"),
        ("beta1 a + (1 - beta1) b²", "β * a + (1 - β) * b**2"),
        ("-a + b * c", "-a + b * c"),
        ("a (b + c) (c + d)", "a * (b + c) * (c + d)"),
        ("(a + b) (c + d) / a", "(a + b) * (c + d) / a"),
        ("beta1^r a", "β**r * a"),
    ],
)  # fmt: skip
def test_a_formula_has_the_value_of_its_text(text, same):
    shown = value(ElementTree.fromstring(formula(text, is_block=True)))
    assert shown == pytest.approx(eval(same, {"sqrt": math.sqrt}, VALUES), rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["W << W", "a +", "a / / b", "unknown_name", "(a", "sqrt a", "f(a", "some words", "a % b"],
)
def test_what_the_notation_does_not_know_is_refused(text):
    with pytest.raises(NotationError):
        formula(text, is_block=True)


def test_symbols_are_those_of_mathematics():
    assert "<msub><mi>β</mi><mn>1</mn></msub>" in formula("beta1", is_block=False)
    assert "<munder><mo>∑</mo><mi>i</mi></munder>" in formula("sum_i N_i h_i", is_block=False)
    assert "<msubsup><mi>c</mi><mi>i</mi><mo>+</mo></msubsup>" in formula("c_i+", is_block=False)


@pytest.mark.parametrize("module", registry.modules(), ids=lambda each: each.__name__)
def test_no_equation_of_an_algorithm_is_left_as_text(module):
    shown = docstrings.markdown(module.__doc__.partition("\n")[2])
    assert shown.count("<math") >= 6
    prose = ElementTree.fromstring(f"<p>{shown.replace('&', '&amp;')}</p>")
    for element in prose.iter():
        if element.tag in ("p", "span", "dd", "dl", "dt"):
            for text in (element.text, *(kid.tail for kid in element)):
                assert not set("^²") & set(text or ""), text
                assert "<-" not in (text or "")
