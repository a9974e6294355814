"""Text -> Program: a hand-written recursive descent over the grammar in `text.py`.  Nothing is evaluated.

A malformed text gives TextError with line and column; a well-formed text that is no consistent program, IRError from
the checker.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mycel.errors import IRError, TextError
from mycel.ir.check import check
from mycel.ir.op import OPS
from mycel.ir.program import NAN, PHASES, RESERVED, Atom, Block, Eqn, Params, Program, Ref, Var
from mycel.ir.role import Role, unquoted
from mycel.ir.types import DEVICE, DTYPES, HOST, Type

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<newline>\n)|(?P<comment>\#[^\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]*)
    |(?P<dotted>\d+(?:\.\w+)*\.[A-Za-z_]\w*(?:\.\w+)*)
    |(?P<number>-?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+|inf\b|nan\b))
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<ref>@[A-Za-z_]\w*(?:\.\w+)*)
    |(?P<name>[A-Za-z_]\w*(?:\.\w+)*)
    |(?P<mark>[()\[\],:=])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    column: int


def parse(text: str, consts: Mapping[str, torch.Tensor]) -> Program:
    """The program of this text, checked."""
    parser = _Parser(text)
    try:
        program = parser.program(consts)
    except RecursionError:
        parser.fail("nested too deeply")
    return check(program)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens: list[_Token] = list(self._scan(text))
        self.at = 0

    def _scan(self, text: str) -> Iterator[_Token]:
        line, start, at = 1, 0, 0
        while at < len(text):
            m = _TOKEN.match(text, at)
            if m is None:
                column = at - start + 1
                raise TextError(f"cannot read {text[at]!r}", line, column, self.lines[line - 1])
            kind = "name" if m.lastgroup == "dotted" else m.lastgroup or ""  # "0.weight" is a name, as in a state dict
            if kind == "newline":
                line, start = line + 1, m.end()
            elif kind != "space":
                yield _Token(kind, m[0], line, at - start + 1)
            at = m.end()
        yield _Token("end", "", line, at - start + 1)

    # -- tokens ---------------------------------------------------------------------------------------------

    def peek(self) -> _Token:
        at = self.at
        while self.tokens[at].kind == "comment":
            at += 1
        return self.tokens[at]

    def next(self) -> _Token:
        while self.tokens[self.at].kind == "comment":
            self.at += 1
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def fail(self, what: str, token: _Token | None = None) -> NoReturn:
        token = token or self.peek()
        raise TextError(what, token.line, token.column, self.lines[token.line - 1])

    def expect(self, text: str) -> _Token:
        if self.peek().text != text:
            self.fail(f"expected {text!r}, found {self.peek().text or 'the end'!r}")
        return self.next()

    def take(self, text: str) -> bool:
        if self.peek().text != text or self.peek().kind == "string":
            return False
        self.next()
        return True

    def name(self, what: str) -> _Token:
        if self.peek().kind != "name":
            self.fail(f"expected {what}, found {self.peek().text or 'the end'!r}")
        return self.next()

    def listed(self, close: str, item: Callable[[], Any]) -> list[Any]:
        items = []
        while not self.take(close):
            items.append(item())
            if not self.take(","):
                self.expect(close)
                break
        return items

    # -- grammar --------------------------------------------------------------------------------------------

    def program(self, consts: Mapping[str, torch.Tensor]) -> Program:
        blocks: dict[str, Block] = {}
        updates: tuple[str, ...] = ()
        roles: dict[str, Role] = {}
        name = ""
        while self.peek().kind != "end":
            if updates or roles:
                self.fail("only the last block, the entry, may update inputs and say what they are")
            token, block, updates, roles = self.block()
            name = token.text
            if name in blocks:
                self.fail(f"block {name} is defined twice", token)
            blocks[name] = block
        if not blocks:
            self.fail("no block: a program has at least one `def`")
        return Program(blocks, name, updates, dict(consts), roles)

    def block(self) -> tuple[_Token, Block, tuple[str, ...], dict[str, Role]]:
        self.expect("def")
        name = self.name("a block name")
        self.expect("(")
        scope: dict[str, Var] = {}
        roles: dict[str, Role] = {}
        inputs = tuple(self.listed(")", lambda: self.input(scope, roles)))
        self.expect(":")
        eqns = []
        while self.peek().text != "return":
            eqns.append(self.equation(scope))
        row = self.next().line
        outputs: list[Atom] = []
        updates: list[str] = []
        more = self.peek().line == row and self.peek().kind != "end"
        while more:
            token = self.peek()
            if token.kind == "name" and self._follows("="):
                updates.append(self.next().text)
                self.expect("=")
            elif updates:
                self.fail("results come before updates")
            outputs.append(self.atom(scope))
            more = self.take(",")
        return name, Block(inputs, tuple(eqns), tuple(outputs)), tuple(updates), roles

    def input(self, scope: dict[str, Var], roles: dict[str, Role]) -> Var:
        """A value and, behind an equals sign, its role."""
        var = self.var(scope)
        if self.take("="):
            first, words = self.peek(), []
            while self.peek().kind in ("name", "number", "string"):
                token = self.next()
                words.append(unquoted(token.text) if token.kind == "string" else token.text)
            try:
                roles[var.name] = Role.of_words(words)
            except ValueError as e:
                self.fail(str(e), first)
        return var

    def _follows(self, text: str) -> bool:
        """Is this the token after the next?"""
        at, seen = self.at, 0
        while self.tokens[at].kind != "end":
            seen += self.tokens[at].kind != "comment"
            if seen == 2:
                break
            at += 1
        return self.tokens[at].text == text

    def equation(self, scope: dict[str, Var]) -> Eqn:
        fresh: dict[str, Var] = {}
        if self.peek().kind == "name" and self._follows("("):
            outputs: list[Var] = []
        else:
            outputs = [self.var(fresh)]
            while self.take(","):
                outputs.append(self.var(fresh))
            self.expect("=")
        token = self.name("an operator")
        if token.text not in OPS:
            close = difflib.get_close_matches(token.text, OPS, 1)
            self.fail(f"no operator named {token.text}" + (f"; did you mean {close[0]}?" if close else ""), token)
        op = OPS[token.text]
        self.expect("(")
        inputs: list[Atom] = []
        params: dict[str, Any] = {}

        def argument() -> None:
            if self.peek().kind == "name" and self._follows("="):
                key = self.next()
                if key.text in params:
                    self.fail(f"param {key.text} is given twice", key)
                self.expect("=")
                params[key.text] = self.value()
            elif params:
                self.fail("inputs come before params")
            else:
                inputs.append(self.atom(scope))

        self.listed(")", argument)
        for name, var in fresh.items():
            if name in scope:
                self.fail(f"{name} is defined twice", token)
            scope[name] = var
        phase = self.phase()
        return Eqn(op, tuple(inputs), Params(params), tuple(outputs), self.source(), phase)

    def phase(self) -> str:
        if not self.take("["):
            return "forward"
        token = self.name("a phase")
        if token.text not in PHASES:
            self.fail(f"no phase named {token.text}: one of {', '.join(PHASES)}", token)
        self.expect("]")
        return token.text

    def source(self) -> str:
        """The comment behind the equation just read."""
        token = self.tokens[self.at]
        if token.kind == "comment" and token.line == self.tokens[self.at - 1].line:
            return token.text[1:].strip()
        return ""

    def var(self, scope: dict[str, Var]) -> Var:
        token = self.name("a value")
        self.expect(":")
        if token.text in scope:
            self.fail(f"{token.text} is defined twice", token)
        scope[token.text] = Var(token.text, self.type())
        return scope[token.text]

    def type(self) -> Type:
        token = self.name("a type")
        if token.text == "stack":
            self.expect("(")
            inner = self.type()
            self.expect(")")
            if inner.space != DEVICE:
                self.fail(f"a stack of values on the {inner.space}", token)
            return Type(inner.dtype, inner.shape, inner.depth + 1)
        if token.text == HOST:
            self.expect("(")
            inner = self.type()
            self.expect(")")
            if inner.space != DEVICE or inner.depth:
                self.fail(f"{inner} on the host", token)
            return inner.on(HOST)
        if token.text not in DTYPES:
            self.fail(f"no dtype named {token.text}", token)
        self.expect("[")
        return Type(DTYPES[token.text], tuple(self.listed("]", self.size)))

    def size(self) -> int:
        token = self.next()
        if token.kind != "number" or not token.text.isdigit():
            self.fail(f"expected a size, found {token.text or 'the end'!r}", token)
        return int(self.number(token))

    def number(self, token: _Token) -> int | float:
        if not re.fullmatch(r"-?\d+", token.text, re.ASCII):
            return NAN if token.text.endswith("nan") else float(token.text)
        if len(token.text) > 1000:
            self.fail(f"a number of {len(token.text)} digits", token)
        return int(token.text)

    def atom(self, scope: dict[str, Var]) -> Atom:
        token = self.peek()
        if token.kind == "name" and token.text not in RESERVED:
            if token.text not in scope:
                self.fail(f"{token.text} is not defined")
            return scope[self.next().text]
        value = self.value()
        if value is not None and not isinstance(value, (bool, int, float, complex)):
            self.fail(f"{token.text!r} cannot be an input", token)
        return value

    def value(self) -> Any:
        token = self.next()
        match token.kind:
            case "number":
                return self.number(token)
            case "string":
                return unquoted(token.text)
            case "ref":
                return Ref(token.text[1:])
            case "name" if token.text in _WORDS:
                return _WORDS[token.text]
            case "name" if token.text == "complex":
                self.expect("(")
                parts = self.listed(")", self.value)
                if len(parts) != 2 or not all(isinstance(p, (int, float)) for p in parts):
                    self.fail("complex takes two numbers", token)
                return complex(*parts)
            case "name" if token.text in DTYPES:
                return DTYPES[token.text]
            case "mark" if token.text == "(":
                return tuple(self.listed(")", self.value))
        self.fail(f"expected a value, found {token.text or 'the end'!r}", token)


_WORDS = {"True": True, "False": False, "None": None}

__all__ = ["IRError", "parse"]
