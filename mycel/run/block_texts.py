"""Generated source, taken apart: each block with what it refers to, in a form that forgets what compilers do not ask.

    def layer_backward_3(w, g, x):           def block_0(value_0, value_1, value_2):
        h = torch.mul(g, x)           =>         value_3 = torch.mul(value_0, value_1)        order (1, 2, 0)
        del g, x                                 del value_0, value_1
        return (h.mm(w),)                        return (value_3.mm(value_2),)

Names are numbers in the order of their first use, and inputs stand in that order.  So layers that differ in the order
of their inputs alone are compiled once (the backward of a layer whose input another one keeps: in BERT, in ResNet),
and a block that was compiled is found again whatever its module is called and whatever stands around it.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Collection
from dataclasses import dataclass

CONST = "CONST_"


@dataclass(frozen=True)
class CanonicalBlock:
    """A block's function `name` in `source`: its inputs are those of the block at `order`, and the constants `consts`
    have the names `own_consts`."""

    source: str
    name: str
    order: tuple[int, ...]
    consts: tuple[str, ...]

    @property
    def own_consts(self) -> tuple[str, ...]:
        return tuple(f"{CONST}{i}" for i in range(len(self.consts)))


class BlockTexts:
    """Generated source by name; `blocks`: which of its functions are blocks, whose names nobody else knows."""

    def __init__(self, source: str, blocks: Collection[str]) -> None:
        self.blocks = blocks
        self.head: list[str] = []
        self.nodes: dict[str, ast.stmt] = {}
        self.refers: dict[str, list[str]] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.head.append(ast.unparse(node))
                continue
            name = getattr(node, "name", None) or ast.unparse(node.targets[0])  # type: ignore[attr-defined]
            self.nodes[name] = node
            self.refers[name] = list(dict.fromkeys(x.id for x in ast.walk(node) if isinstance(x, ast.Name)))

    @property
    def consts(self) -> list[str]:
        return [name for name in self.nodes if name.startswith(CONST)]

    def canonical(self, name: str) -> CanonicalBlock:
        """A block with the blocks, functions and constants that it needs."""
        reached = self._reached(name)
        names = {x: f"block_{i}" for i, x in enumerate(x for x in reached if x in self.blocks)}
        consts = [x for x in reached if x.startswith(CONST)]
        names |= {x: f"{CONST}{i}" for i, x in enumerate(consts)}
        texts, order = list(self.head), tuple[int, ...]()
        for x in reversed(reached):  # callers behind what they call; the block itself is the last
            node = self.nodes[x]
            if x in self.blocks and isinstance(node, ast.FunctionDef):
                order = _order(node) if x == name else tuple(range(len(node.args.args)))
                node = _renamed(node, names, order)
            if x not in consts:
                texts.append(ast.unparse(node))
        return CanonicalBlock("\n".join(texts), names[name], order, tuple(consts))

    def _reached(self, name: str) -> list[str]:
        """A function and what must stand beside it, in the order in which they are referred to."""
        reached = [name]
        for x in reached:
            reached += [more for more in self.refers[x] if more in self.nodes and more not in reached]
        return reached


def _first_uses(node: ast.FunctionDef) -> dict[str, int]:
    """Where each name stands first in a function's body."""
    first: dict[str, int] = {}
    for i, x in enumerate(y for statement in node.body for y in ast.walk(statement)):
        if isinstance(x, ast.Name | ast.arg):
            first.setdefault(x.id if isinstance(x, ast.Name) else x.arg, i)
    return first


def _order(node: ast.FunctionDef) -> tuple[int, ...]:
    """Positions of a function's inputs, by first use; those it does not use are the last."""
    first, names = _first_uses(node), [x.arg for x in node.args.args]
    return tuple(sorted(range(len(names)), key=lambda k: first.get(names[k], math.inf)))


def _renamed(node: ast.FunctionDef, others: dict[str, str], order: tuple[int, ...]) -> ast.FunctionDef:
    """A block's function with its inputs in an order, and names that are numbers."""
    inputs = [node.args.args[k].arg for k in order]
    inside = [x for statement in node.body for x in ast.walk(statement)]
    bound = {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    bound |= {x.arg for x in inside if isinstance(x, ast.arg)}
    first = _first_uses(node)
    inner = sorted(bound.difference(inputs), key=lambda name: first[name])
    names = others | {name: f"value_{i}" for i, name in enumerate((*inputs, *inner))}
    renamed = copy.deepcopy(node)
    renamed.name, renamed.args.args = names[node.name], [renamed.args.args[k] for k in order]
    return _Rename(names).visit(renamed)


class _Rename(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.names.get(node.arg, node.arg))

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        """del b, a  =>  del a, b"""
        return ast.Delete(sorted((self.visit(x) for x in node.targets), key=_number))


def _number(target: ast.expr) -> int:
    assert isinstance(target, ast.Name)
    return int(target.id.rpartition("_")[2])
