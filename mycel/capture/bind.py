"""The call of a captured function: check that the arguments are those it was captured for, read the state, run, build
the result.

All of it is one generated Python function, so that a call costs a few microseconds:

    def call(args, kwargs):
        if len(args) != 1 or kwargs: return MISS
        (t0,) = args
        if type(t0) not in TENSORS or t0.dtype is not D0 or t0.shape != S0 or t0.device != DEVICE: return MISS
        now, (before, state) = versions(), SEEN[0]
        if now == before:
            s0, = state
            if held.changed() and not held.remember(s0): return MISS
        else:
            SEEN[0] = NEVER
            for box, key, value in LINKS:
                if box[key] is not value: return MISS
            if any(HOOKS): return MISS
            if m0['training'] is not True: return MISS
            s0 = c0['weight']
            if not held(s0): return MISS
            SEEN[0] = now, (s0, )
        y0, = run(t0, s0)
        return y0

MISS means: capture again, for these arguments.  What lies in dicts is looked at where one of them changed
(`versions.py`): then all of it is.  What lies elsewhere (lists, closure cells, slots), globals, and what the program
itself rebinds is looked at by every call.
"""

from __future__ import annotations

import cmath
import operator
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture.counters import NumberSlots
from mycel.capture.function import Captured
from mycel.capture.locations import Guarded, Location, holds, is_there
from mycel.capture.slot_holders import owner
from mycel.capture.sparse import form_of, parts_of
from mycel.capture.state import is_static, shadowed_by
from mycel.capture.tree import Tree, as_leaf, attributes, has_slots, maker
from mycel.capture.versions import DICTS_TELL, TENSORS_TELL, TensorTypes, dict_of, dict_versions, dict_word, is_plain
from mycel.ops.effects import texts_of

MISS = object()
NEVER = (None, ())  # versions of dicts, and the state they held, where they were never looked at
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def bind(captured: Captured, run: Callable[..., Any]) -> tuple[Call, Call]:
    """The guarded call around `run`, which takes the program's inputs and returns its outputs; and the guards alone
    (None or MISS)."""
    return _GuardWriter(captured, run).functions()


class _GuardWriter:
    def __init__(self, captured: Captured, run: Callable[..., Any]) -> None:
        self.c = captured
        self.lines: list[str] = []
        self.env: dict[str, Any] = {
            "run": run,
            "MISS": MISS,
            "TENSORS": _TENSORS,
            "as_leaf": as_leaf,
            "draw_key": draw_key,
        }
        self.names: dict[int, str] = {}
        self.leaves = iter(captured.leaves)
        self.types = {v.name: v.type for v in captured.program.inputs}
        self.values: dict[str, str] = {}  # what holds the value of an input, by the input's name
        self.autocast = False  # captured under autocast: the program holds the casts
        self.anchors: list[Any] = []  # keeps objects alive whose ids are in `names`
        self.walk: list[str] = []  # what is done where a dict changed
        self.dicts: list[dict[Any, Any]] = []  # whose changes are noticed
        self.things: list[Any] = []  # objects that may be given other dicts
        self.rebound = {id(owner(place.container)) for place, _ in captured.effects}  # by every call
        self.remembered: list[str] = []  # state that is read in the walk alone

    def functions(self) -> tuple[Call, Call]:
        c = self.c
        self.env["DEVICE"] = c.device
        self.context()
        args, kwargs = c.arguments.children
        self.guard(f"len(args) != {len(args.children)} or len(kwargs) != {len(kwargs.children)}")
        for i, child in enumerate(args.children):
            self.unpack(child, f"args[{i}]")
        if kwargs.children:
            keys = kwargs.key[1]
            self.guard(" or ".join(f"{k!r} not in kwargs" for k in keys))
            for key, child in zip(keys, kwargs.children, strict=True):
                self.unpack(child, f"kwargs[{key!r}]")
        self.links()
        self.modules()
        self.state()
        self.walked()
        inputs = self.inputs()
        for facts in c.facts:
            holds = self.constant(facts.hold, "facts")
            self.guard(f"not {holds}({', '.join(self.values[name] for name in facts.inputs)})")
        guards = [
            "try:",
            *("    " + line for line in self.lines),
            "except (AttributeError, KeyError, IndexError, ValueError): return MISS",
        ]
        self.lines = []
        self.results(inputs)
        source = _define("call", guards + self.lines) + _define("fits", guards)
        exec(compile(source, "<mycel call>", "exec"), self.env)
        return self.env["call"], self.env["fits"]

    def constant(self, value: Any, hint: str) -> str:
        """A name for an object in the generated function."""
        if id(value) not in self.names:
            self.names[id(value)] = f"{hint}{len(self.names)}"
            self.env[self.names[id(value)]] = value
            self.anchors.append(value)
        return self.names[id(value)]

    def guard(self, miss: str) -> None:
        self.lines.append(f"if {miss}: return MISS")

    # -- arguments --------------------------------------------------------------------------------------------

    def unpack(self, tree: Tree, expr: str) -> None:
        """Guards for one argument; its tensors become t0, t1, …"""
        name = f"a{len(self.lines)}"
        match tree.kind:
            case "leaf":
                return self.tensor(expr)
            case "static":
                self.lines.append(f"{name} = {expr}")
                return self.static(tree.key, name)
            case "tuple" | "list" | "named" | "struct":
                cls = {"tuple": "tuple", "list": "list"}.get(tree.kind) or self.constant(tree.key, "cls")
                self.lines.append(f"{name} = {expr}")
                self.guard(f"type({name}) is not {cls} or len({name}) != {len(tree.children)}")
                for i, child in enumerate(tree.children):
                    self.unpack(child, f"{name}[{i}]")
            case "dict" | "output":
                template, keys = tree.key
                cls = self.constant(template if isinstance(template, type) else type(template), "cls")
                self.lines.append(f"{name} = {expr}")
                self.guard(f"type({name}) is not {cls} or len({name}) != {len(keys)}")
                for key, child in zip(keys, tree.children, strict=True):
                    k = repr(key) if isinstance(key, (str, int)) else self.constant(key, "key")
                    self.guard(f"{k} not in {name}")
                    self.unpack(child, f"{name}[{k}]")
            case "sparse":
                self.lines.append(f"{name} = {expr}")
                self.guard(f"{self.constant(form_of, 'form_of')}({name}) != {self.constant(tree.key, 'form')}")
                self.lines.append(f"{name} = {self.constant(parts_of, 'parts_of')}({name})")
                for i, child in enumerate(tree.children):
                    self.unpack(child, f"{name}[{i}]")
            case "object":
                cls, fields = tree.key
                self.lines.append(f"{name} = {expr}")
                self.guard(f"type({name}) is not {self.constant(cls, 'cls')}")
                read = self.constant(attributes, "attributes") if has_slots(cls) else "vars"
                self.lines.append(f"{name} = {read}({name})")
                self.guard(f"{name}.keys() != {self.constant(frozenset(fields), 'names')}")
                for f, child in zip(fields, tree.children, strict=True):
                    self.unpack(child, f"{name}[{f!r}]")

    def tensor(self, expr: str) -> None:
        input_ = next(self.leaves)
        if input_ in self.values:  # the same tensor was passed twice
            return self.guard(f"{expr} is not {self.values[input_]}")
        self.values[input_] = name = f"t{len(self.values)}"
        self.lines.append(f"{name} = {expr}")
        self.typed(name, input_)

    def typed(self, name: str, input_: str) -> None:
        """Guards for the value of an argument, called `name` in here."""
        t, where = self.types[input_], self.c.devices[input_]
        wrong = f"{name}.dtype is not {self.constant(t.dtype, 'D')} or {name}.shape != {t.shape!r}"
        if where is not None:
            wrong += f" or {name}.device != {'DEVICE' if where == self.c.device else self.constant(where, 'E')}"
        self.guard(f"type({name}) not in TENSORS and ({name} := as_leaf({name})) is None or {wrong}")

    def static(self, value: Any, name: str) -> None:
        if value is None or isinstance(value, bool):
            self.guard(f"{name} is not {value!r}")
        elif type(value) in (float, complex) and (
            value == 0 or cmath.isnan(value)
        ):  # nan equals itself here, 0.0 is not -0.0
            self.guard(f"repr({name}) != {repr(value)!r}")
        elif is_static(value):
            self.guard(
                f"type({name}) is not {self.constant(type(value), 'T')} or {name} != {self.constant(value, 'V')}"
            )
        else:
            self.guard(f"{name} is not {self.constant(value, 'V')}")

    # -- modules and state -----------------------------------------------------------------------------------------

    def context(self) -> None:
        """The ambient settings that decide dtypes."""
        device, get = self.c.device.type, torch.get_autocast_dtype
        self.env.update(default_dtype=torch.get_default_dtype, autocast=torch.autocast)
        self.env.update(is_autocast=torch.is_autocast_enabled, autocast_dtype=get)
        for name, value in self.c.environment:
            self.env["variable"] = os.environ.get
            self.guard(f"variable({name!r}) != {value!r}")
        for logger, level, answer in self.c.log_levels:
            asked = "getEffectiveLevel()" if level is None else f"isEnabledFor({level!r})"
            self.guard(f"{self.constant(logger, 'L')}.{asked} != {answer!r}")
        for params, recorded in self.c.recorded:
            self.env["grad_mode"] = (lambda: True) if self.c.differentiated else torch.is_grad_enabled
            self.guard(
                f"(grad_mode() and any(p.requires_grad for p in {self.constant(params, 'V')})) is not {recorded}"
            )
        self.guard(f"default_dtype() is not {self.constant(torch.get_default_dtype(), 'D')}")
        if device != "meta":
            self.autocast = torch.is_autocast_enabled(device)
            wrong = f" or autocast_dtype({device!r}) is not {self.constant(get(device), 'D')}" if self.autocast else ""
            self.guard(f"is_autocast({device!r}) is not {self.autocast}{wrong}")

    def links(self) -> None:
        """Objects on the way to state are where they were, plain values are what they were.  What differs already, with
        no code of the user run since the capture, is a library's own and no guard (a cache that grew meanwhile)."""
        c = self.c
        sizes = [(held, size) for held, size in c.sizes if len(held) == size]
        statics = [*filter(holds, c.statics)]
        locations = [
            *(p for places in c.state.values() for p in places),
            *(s.place for s in statics),
            *(p for p, _ in c.effects),
        ]
        ends = [*filter(is_there, c.links), *(place.inside for place in locations)]
        chain: dict[int, Guarded] = {}
        for link in ends:
            way = []
            while link is not None and id(link) not in chain:
                way.append(link)
                link = link.place.inside
            chain.update((id(x), x) for x in reversed(way))
        for lines, name, some in self.split("SIZES", sizes, lambda held: held[0]):
            self.env[name] = some
            lines += [f"for held, size in {name}:", "    if len(held) != size: return MISS"]
        self.owners([*chain.values(), *statics], locations)
        self.watch("LINKS", [*chain.values()], "{0} is not {1}")
        self.watch("STATICS", statics, "{0} is not {1} and (type({0}) is not type({1}) or {0} != {1})")

    def owners(self, links: Sequence[Guarded], locations: Sequence[Location]) -> None:
        """Objects whose attributes are looked at have the dicts they had."""
        places = [*(link.place for link in links), *locations]
        inside = [(place.inside.value, owner(place.container)) for place in places if place.inside is not None]
        pairs = [*inside, *((module, vars(module)) for module in self.c.modules)]
        things = {id(thing): thing for thing, held in pairs if getattr(thing, "__dict__", None) is held}
        known = [x for x in things.values() if DICTS_TELL and dict_word(x) is not None]
        self.things = known
        unknown = [x for x in things.values() if not DICTS_TELL or dict_word(x) is None]
        for lines, name, some in ((self.walk, "OWNERS", known), (self.lines, "OTHER_OWNERS", unknown)):
            if some:
                self.env[name] = [(thing, vars(thing)) for thing in some]
                lines += [f"for thing, held in {name}:", "    if thing.__dict__ is not held: return MISS"]

    def watch(self, name: str, links: Sequence[Guarded], miss: str) -> None:
        """One guard for each link: written out for closure cells, one loop for all others."""
        for link in links:
            if isinstance(link.place.container, types.CellType):
                self.guard(miss.format(self.read(link.place), self.constant(link.value, "V")))
        others = [link for link in links if not isinstance(link.place.container, types.CellType)]
        for lines, loop, some in self.split(name, others, lambda link: link.place.container):
            self.env[loop] = [(s.place.container, s.place.key, s.value) for s in some]
            lines.append(f"for box, key, value in {loop}:")
            lines.append(f"    if {miss.format('box[key]', 'value')}: return MISS")

    def split(
        self, name: str, guarded: Sequence[Any], container: Callable[[Any], Any]
    ) -> list[tuple[list[str], str, list[Any]]]:
        """Those every call looks at and those looked at where a dict changed: the lines they belong to, a name."""
        always = [x for x in guarded if not self.is_versioned(container(x))]
        sometimes = [x for x in guarded if self.is_versioned(container(x))]
        both = [(self.lines, name, always), (self.walk, f"{name}_IN_DICTS", sometimes)]
        return [part for part in both if part[2]]

    def is_versioned(self, container: Any) -> bool:
        """Does a dict's version tell that nothing in the container changed?"""
        if type(container) is tuple:  # which never does
            return DICTS_TELL
        held = dict_of(owner(container)) if DICTS_TELL else None
        if held is None or id(held) in self.rebound:
            return False
        self.dicts.append(held)
        return True

    def modules(self) -> None:
        """Train mode, submodules, hooks and forward methods as they were."""
        without: list[Any] = []
        for module in self.c.modules:
            slots = self.constant(vars(module), "m")
            wrong = [f"{slots}['training'] is not {module.training!r}"] if "training" in vars(module) else []
            if "forward" not in vars(module):
                wrong.append(f"'forward' in {slots}")
            if hidden := shadowed_by(module) - {"forward"}:
                wrong.append(f"not {self.constant(hidden, 'names')}.isdisjoint({slots})")
            own = [name for name in ("_parameters", "_buffers", "_modules") if vars(module).get(name)]
            wrong += [f"{slots}[{name!r}] is not {self.constant(vars(module)[name], 'n')}" for name in own]
            lines = self.walk if self.is_versioned(vars(module)) else self.lines
            all_hooks = (module._forward_hooks, module._forward_pre_hooks)
            for hooks in (*all_hooks, module._backward_hooks, module._backward_pre_hooks):
                lines = lines if self.is_versioned(hooks) else self.lines
                if hooks:
                    name = self.constant(hooks, "h")
                    wrong.append(f"[*{name}.values()] != {self.constant([*hooks.values()], 'V')}")
                else:
                    without.append(hooks)
            if module._modules and isinstance(module._modules, dict):  # those of a module of torch.jit stay
                lines = lines if self.is_versioned(module._modules) else self.lines
                children = self.constant(module._modules, "n")
                wrong.append(f"len({children}) != {len(module._modules)}")
                wrong += [f"{children}.get({k!r}) is not {self.constant(m, 'sub')}" for k, m in module._modules.items()]
            if wrong:
                lines.append(f"if {' or '.join(wrong)}: return MISS")
        for lines, name, some in self.split("HOOKS", without, lambda hooks: hooks):
            self.env[name] = some
            lines.append(f"if any({name}): return MISS")

    def state(self) -> None:
        """Reads state: in the walk what lies in dicts alone."""
        for i, (input_, places) in enumerate(self.c.state.items()):
            self.values[input_] = name = f"s{i}"
            in_dicts = all(self.is_versioned(place.container) for place in places)
            self.remembered += [input_] if in_dicts else []
            lines = self.walk if in_dicts else self.lines
            lines.append(f"{name} = {self.read(places[0])}")
            lines += [f"if {self.read(other)} is not {name}: return MISS" for other in places[1:]]

    def walked(self) -> None:
        """What is done where a dict changed, and else what is remembered of the last time."""
        if not self.dicts:
            self.lines += self.walk
            self.remembered = []
            return
        self.env.update(versions=dict_versions(self.dicts, self.things), SEEN=[NEVER], NEVER=NEVER)
        state, remembered = ", ".join(self.values[k] for k in self.remembered), ["pass"]
        if self.remembered:
            held = self.held(self.remembered)
            self.walk.append(f"if not {held}({state}): return MISS")
            again = f"if {held}.changed() and not {held}.remember({state}): return MISS"
            remembered = [f"{state}, = state", again]
        self.lines += [
            "now, (before, state) = versions(), SEEN[0]",
            "if now == before:",
            *("    " + line for line in remembered),
            "else:",
            "    SEEN[0] = NEVER",
            *("    " + line for line in self.walk),
            f"    SEEN[0] = now, ({state}{', ' if state else ''})",
        ]

    def held(self, state: Sequence[str]) -> str:
        wanted = [(self.types[k].dtype, self.types[k].shape, self.c.devices[k]) for k in state]
        return self.constant(HeldTypes(wanted), "held")

    def inputs(self) -> list[str]:
        """What holds the value of each of the program's inputs."""
        if self.c.differentiated:
            self.parameter_hooks()
        if read := [k for k in self.c.state if k not in self.remembered]:
            self.guard(f"not {self.held(read)}({', '.join(self.values[k] for k in read)})")
        for input_, recorded in self.c.recorded_arguments:
            self.env["is_grad_enabled"] = torch.is_grad_enabled
            self.guard(f"{self.values[input_]}.requires_grad is not {recorded}")
            self.guard(f"is_grad_enabled() is not {self.c.grad_mode}")
        for input_, place in self.c.aliases:
            self.guard(f"{self.read(place)} is not {self.values[input_]}")
        for inside in self.c.inside:
            self.guard(f"not {self.constant(inside.holds, 'inside')}()")
        self.values.update((v.name, "draw_key(DEVICE)") for v in self.c.program.inputs_of("key"))
        return [self.values[v.name] for v in self.c.program.inputs]

    def parameter_hooks(self) -> None:
        """Hooks on parameters as they were."""
        without = []
        for input_, places in self.c.state.items():
            if isinstance(parameter := places[0].read(), torch.nn.Parameter):
                name = self.values[input_]
                if hooks := [*(parameter._backward_hooks or {}).values()]:
                    own = f"{name}._backward_hooks"
                    self.guard(f"not {own} or [*{own}.values()] != {self.constant(hooks, 'V')}")
                else:
                    without.append(name)
        if without:
            self.env["hooks_of"] = operator.attrgetter("_backward_hooks")
            self.guard(f"any(map(hooks_of, ({', '.join(without)}, )))")

    def read(self, place: Location) -> str:
        box = self.constant(place.container, "c")
        if isinstance(place.container, types.CellType):
            return f"{box}.cell_contents"
        plain = type(place.key) in (str, int, bool)
        return f"{box}[{place.key!r}]" if plain else f"{box}[{self.constant(place.key, 'k')}]"

    # -- results ----------------------------------------------------------------------------------------------

    def results(self, inputs: list[str]) -> None:
        program = self.c.program
        n = len(program.main.outputs)
        outs = [f"y{i}" for i in range(n)]
        call = f"run({', '.join(inputs)})"
        n_updates, n_effects = len(program.updates), sum(len([*tree.paths("")]) for _, tree in self.c.effects)
        n_results = n - n_updates - n_effects
        numbers = [(k, place) for k, (place, *_) in self.c.state.items() if isinstance(place.container, NumberSlots)]
        if n == 1 and self.c.out.kind == "leaf" and not (self.autocast or self.c.effects or self.c.copies or numbers):
            self.lines.append(f"return {call}[0]")
            return
        run = f"{''.join(o + ', ' for o in outs)}= {call}" if outs else call
        self.lines.append(f"with autocast({self.c.device.type!r}, enabled=False): {run}" if self.autocast else run)
        by_name = {v.name: x for v, x in zip(program.inputs, inputs, strict=True)}
        if n_updates:
            self.lines.append("with no_grad():")
            self.env["no_grad"] = torch.no_grad
            self.lines += [
                f"    if {y} is not {by_name[k]}: {by_name[k]}.copy_({y})"
                for k, y in zip(program.updates, outs[n - n_updates :], strict=True)
            ]
            # a result that is the new value of an input is that input
            new = dict(zip(program.main.outputs[n - n_updates :], (by_name[k] for k in program.updates), strict=True))
            for i, x in enumerate(program.main.outputs[:n_results]):
                outs[i] = new.get(x, outs[i])
        outs = [f"{y}.clone()" if i in self.c.copies else y for i, y in enumerate(outs)]
        self.lines += [f"{self.read(place)} = {self.values[input_]}" for input_, place in numbers]
        rest = iter(outs[n_results:])
        for place, tree in self.c.effects:
            self.lines.append(f"{self.read(place)} = {self.build(tree, rest, numbers=True)}")
        self.lines.append(f"return {self.build(self.c.out, iter(outs[:n_results]))}")

    def build(self, tree: Tree, outs: Any, numbers: bool = False) -> str:
        """An expression for the result; `numbers`: rows that are Python's numbers are such."""
        if tree.kind == "leaf":
            return next(outs)
        if tree.kind == "number":
            return f"{next(outs)}.item()"
        if tree.kind == "static":
            return self.constant(tree.key, "V")
        parts = [self.build(c, outs, numbers) for c in tree.children]
        match tree.kind:
            case "tuple":
                return "(" + "".join(p + ", " for p in parts) + ")"
            case "list":
                return "[" + ", ".join(parts) + "]"
            case "named":
                return f"{self.constant(tree.key, 'cls')}({', '.join(parts)})"
            case "struct":
                return f"{self.constant(tree.key, 'cls')}(({', '.join(parts)},))"
            case "maybe":
                return f"*([{parts[0]}] if {parts[1]} else ())"
            case "rows":
                rows = f"{parts[0]}[{parts[1]}]"
                return f"*{rows}.tolist()" if tree.key.keywords["is_number"] and numbers else f"*{rows}.unbind()"
            case "sparse":
                return f"{self.constant(tree.key.build, 'build')}(({', '.join(parts)},))"
            case "text":
                texts = f"{self.constant(texts_of, 'texts_of')}(({', '.join(parts)},), *{self.constant(tree.key, 'T')})"
                return f"''.join({texts})"
        template, keys = tree.key
        if template is dict or type(template) is dict:
            return f"dict(zip({self.constant(keys, 'keys')}, ({''.join(p + ', ' for p in parts)})))"
        return f"{self.constant(maker(tree), 'made')}(({''.join(p + ', ' for p in parts)}))"


class HeldTypes:
    """Are all these tensors of the types they were?  torch's compiler has a check of many at once, which also says no
    where just strides or requires_grad differ: then they are looked at one by one, and it is made anew.  Of tensors
    that are still the same objects, what tells their types is remembered (`versions.py`)."""

    def __init__(self, wanted: Sequence[tuple[torch.dtype, tuple[int, ...], torch.device | None]]) -> None:
        self.wanted = wanted
        self.at_once: Callable[..., bool] | None = None
        self.seen: TensorTypes | None = None

    def __call__(self, *tensors: torch.Tensor) -> bool:
        self.seen = None
        return self.fits(tensors)

    def changed(self) -> bool:
        """May a tensor that was remembered be of another type now?"""
        return self.seen is None or self.seen.changed()

    def remember(self, *tensors: torch.Tensor) -> bool:
        """The check; and where they fit, by what a change is noticed."""
        self.seen = None
        types = TensorTypes(tensors) if TENSORS_TELL and all(map(is_plain, tensors)) else None
        if not self.fits(tensors):
            return False
        self.seen = types
        return True

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        if self.at_once is not None and self.at_once(*tensors):
            return True
        for x, (dtype, shape, device) in zip(tensors, self.wanted, strict=True):
            if x.dtype is not dtype or x.shape != shape or (device is not None and x.device != device):
                return False
        guards: Any = torch._C._dynamo.guards
        self.at_once = guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
        return True


def _define(name: str, lines: list[str]) -> str:
    return f"def {name}(args, kwargs):\n" + "".join(f"    {line}\n" for line in lines)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def draw_key(device: torch.device) -> torch.Tensor:
    """A fresh key from torch's default generator, so that torch.manual_seed decides what is drawn."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
