"""Translate the equations of the docstrings, which are plain text, into MathML.

The notation is small and strict: what the grammar does not know is an error, never text.

    run      := [relation] sum (relation sum)* [relation]      relation: = <- <= >= < > ..
    sum      := ["-"] product (("+" | "-") product)*
    product  := quotient ("*" quotient)*
    quotient := factor+ ("/" factor | factor)*                 "/" divides all factors before it
    factor   := atom ("^" atom | "²")*
    atom     := number | symbol | function(list) | (list) | sum_i factor+ | grad atom
    list     := run ("," run | ";" run)*                       words may stand in place of an atom

A symbol is a letter or the name of a Greek one, with a subscript (`N_i`, `t0`, `beta1`) and `+` for
a new value (`c_i+`); or the name of a setting.
"""

import re
from html import escape
from unicodedata import lookup

LETTERS = ("beta", "gamma", "eta", "kappa", "lambda", "mu", "nu", "sigma", "tau")
GREEK = {name: lookup(f"GREEK SMALL LETTER {name.replace('lambda', 'lamda')}") for name in LETTERS}
GREEK["eps"] = lookup("GREEK SMALL LETTER EPSILON")
MINUS = lookup("MINUS SIGN")
NAMES = {"client_lr", "server_lr", "dual_lr", "batch", "clients"}  # shown as they are
FUNCTIONS = {"sqrt", "max", "min", "clip", "sign"}
RELATIONS = {"=": "=", "<-": "←", "<=": "≤", ">=": "≥", "<": "<", ">": ">", "..": "…"}
SYMBOL = re.compile(rf"([a-zA-Z]|{'|'.join(GREEK)})(?:_([a-z])|([0-9]))?(\+?)")
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:e-\d+)?)|(?P<name>[A-Za-z][A-Za-z0-9_]*(?:\+(?=[\s),;]|$))?)"
    r"|(?P<mark><-|<=|>=|\.\.|[=<>+\-*/^²(),;]))"
)


class NotationError(Exception):
    """The text is not in the notation of this module."""


def is_symbol(name: str) -> bool:
    """Return whether a name is part of a formula. The others are words."""
    return name in NAMES | FUNCTIONS | {"sum_i", "grad"} or SYMBOL.fullmatch(name) is not None


def formula(text: str, is_block: bool) -> str:
    """Return the MathML element of a formula, with large fractions in a block.

    Raises:
        NotationError: The text is not in the notation.
    """
    parser = _Parser(text)
    body = parser.run()
    if parser.peek():
        raise NotationError(f"{text!r}: unexpected {parser.peek()!r}")
    # Markdown would take a paragraph that begins with <math> for a block of HTML.
    return f'<span><math displaystyle="{str(is_block).lower()}">{body}</math></span>'


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.tokens = text, 0, []
        place = 0
        while text[place:].strip():
            match = TOKEN.match(text, place)
            if match is None:
                raise NotationError(f"{text!r}: {text[place:]!r}")
            called = text[match.end() : match.end() + 1] == "("
            self.tokens.append((match.lastgroup or "", match[match.lastgroup or 0], called))
            place = match.end()
        self.depth = 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> tuple[str, str, bool]:
        if self.at == len(self.tokens) or (expected and self.peek() != expected):
            raise NotationError(f"{self.text!r}: expected {expected or 'more'} at {self.peek()!r}")
        self.at += 1
        return self.tokens[self.at - 1]

    def starts_factor(self) -> bool:
        return self.at < len(self.tokens) and (
            self.tokens[self.at][0] != "mark" or self.peek() == "("
        )

    def run(self) -> str:
        parts = []
        if self.peek() not in RELATIONS:
            parts.append(self.sum())
        while self.peek() in RELATIONS:
            parts.append(f"<mo>{escape(RELATIONS[self.take()[1]])}</mo>")
            if self.at < len(self.tokens) and self.peek() not in ("", ")", ",", ";"):
                parts.append(self.sum())
        return _row(parts)

    def sum(self) -> str:
        parts = []
        if self.peek() == "-":
            self.take()
            parts.append(f'<mo form="prefix">{MINUS}</mo>')
        parts.append(self.product())
        while self.peek() in ("+", "-"):
            parts.append(f"<mo>{'+' if self.take()[1] == '+' else MINUS}</mo>")
            parts.append(self.product())
        return _row(parts)

    def product(self) -> str:
        parts = [self.quotient()]
        while self.peek() == "*":
            self.take()
            parts += ["<mo>⋅</mo>", self.quotient()]
        return _row(parts)

    def quotient(self) -> str:
        factors = [self.factor()]
        while self.peek() == "/" or self.starts_factor():
            if self.peek() == "/":
                self.take()
                below = self.factor()
                above = factors[0] if len(factors) == 1 else _product(factors)
                factors = [f"<mfrac>{_bare(above)}{_bare(below)}</mfrac>"]
            else:
                factors.append(self.factor())
        return _product(factors)

    def factor(self) -> str:
        base = self.atom()
        while self.peek() in ("^", "²"):
            power = "<mn>2</mn>" if self.take()[1] == "²" else _bare(self.atom())
            if below := re.fullmatch(r"<msub>((?:(?!<msub>).)*)</msub>", base):
                base = f"<msubsup>{below[1]}{power}</msubsup>"
            else:
                base = f"<msup>{base}{power}</msup>"
        return base

    def atom(self) -> str:
        kind, text, called = self.take()
        if kind == "number":
            return f"<mn>{text}</mn>"
        if text == "(":
            return self.bracket()
        if kind != "name":
            raise NotationError(f"{self.text!r}: unexpected {text!r}")
        if text == "sum_i":
            terms = [self.factor()]
            while self.starts_factor():
                terms.append(self.factor())
            return f"<mrow><munder><mo>∑</mo><mi>i</mi></munder>{_product(terms)}</mrow>"
        if text == "grad":
            return f"<mrow><mo>∇</mo>{self.atom()}</mrow>"
        if not is_symbol(text):
            if not self.depth:
                raise NotationError(f"{self.text!r}: unknown name {text!r}")
            return self.words(text)
        if not called:
            if text in FUNCTIONS:
                raise NotationError(f"{self.text!r}: {text} wants an argument")
            return _symbol(text)
        self.take("(")
        if text == "sqrt":
            return f"<msqrt>{_bare(self.bracket())}</msqrt>"
        name = f"<mi>{text}</mi>" if text in FUNCTIONS else _symbol(text)
        return f"<mrow>{name}{self.bracket()}</mrow>"

    def words(self, first: str) -> str:
        found = [first]
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "name":
            if is_symbol(self.peek()):
                break
            found.append(self.take()[1])
        return f"<mtext>{escape(' '.join(found))}</mtext>"

    def bracket(self) -> str:
        self.depth += 1
        parts = [self.run()]
        while self.peek() in (",", ";"):
            parts += [f'<mo separator="true">{self.take()[1]}</mo>', self.run()]
        self.take(")")
        self.depth -= 1
        return f"<mrow><mo>(</mo>{_row(parts)}<mo>)</mo></mrow>"


def _symbol(name: str) -> str:
    if name in NAMES:
        return f'<mtext class="setting">{name}</mtext>'
    if name == "sigma2":  # the name of a setting: a variance
        return f"<msup><mi>{GREEK['sigma']}</mi><mn>2</mn></msup>"
    match = SYMBOL.fullmatch(name)
    if match is None:
        raise NotationError(f"unknown name {name!r}")
    base = f"<mi>{GREEK.get(match[1], match[1])}</mi>"
    below = f"<mi>{match[2]}</mi>" if match[2] else f"<mn>{match[3]}</mn>" if match[3] else ""
    if match[4]:
        return f"<msubsup>{base}{below}<mo>+</mo></msubsup>"
    return f"<msub>{base}{below}</msub>" if below else base


def _row(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"


def _product(factors: list[str]) -> str:
    return _row([part for factor in factors for part in ('<mspace width="0.22em"/>', factor)][1:])


def _bare(element: str) -> str:
    """Return what a bracket holds, where a fraction, root or power needs no bracket."""
    match = re.fullmatch(r"<mrow><mo>\(</mo>(.*)<mo>\)</mo></mrow>", element)
    # Of `(a) (b)` the first and the last bracket are not one pair.
    return match[1] if match and _is_balanced(match[1]) else element


def _is_balanced(text: str) -> bool:
    depth = 0
    for mark in re.findall(r"<mo>([()])</mo>", text):
        depth += 1 if mark == "(" else -1
        if depth < 0:
            return False
    return depth == 0
