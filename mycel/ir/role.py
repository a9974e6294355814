"""What an input of a program is, and of what: its role.

    parameter model.layers.0.q_proj.weight       a tensor the model holds and an optimiser may change
    buffer bn.running_mean                       a tensor the model holds besides
    variable table                               a tensor the code reaches by a variable
    batch input_ids                              an argument of the call
    key                                          what random numbers are drawn from
    state exp_avg of layers.0.q_proj.weight      what the optimiser keeps of a parameter
    hyper lr of group 0                          a number of an optimiser's group
    counter skipped                              a number the step keeps
    gradient of layers.0.q_proj.weight           where the step puts it, for others to read
    count tokens                                 a number of the whole batch that a microbatch is divided by
    error of layers.0.q_proj.weight over dp      what compressing a message left behind, sent with the next
    velocity of layers.0.q_proj.weight over dp   momentum of a rank's own gradients, of what it has not sent
    delayed of layers.0.q_proj.weight over dp    a gradient that the next step is taken with
    outer momentum of layers.0.q_proj.weight     state of an optimiser around the optimiser
    rounded of layers.0.q_proj.weight            a parameter in 8 bits …
    scale of layers.0.q_proj.weight              … and what 1 stands for in each of its rows

An input without a role is an argument of its own name.  Positions of inputs mean nothing: whoever gives values to a
program, or asks which input is which, does so by role.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# what stands behind a kind: fields in capitals, other words as they are
FORMS = {
    "parameter": ("NAME",),
    "buffer": ("NAME",),
    "variable": ("NAME",),
    "batch": ("NAME",),
    "key": (),
    "state": ("NAME", "of", "OF"),
    "hyper": ("NAME", "of", "group", "OF"),
    "counter": ("NAME",),
    "gradient": ("of", "OF"),
    "count": ("NAME",),
    "error": ("of", "OF", "over", "OVER"),
    "velocity": ("of", "OF", "over", "OVER"),
    "delayed": ("of", "OF", "over", "OVER"),
    "outer": ("NAME", "of", "OF"),
    "rounded": ("of", "OF"),
    "scale": ("of", "OF"),
}
HELD = ("parameter", "buffer", "variable")  # lives outside of the call, and is read at each

_PLAIN = re.compile(r"\d+|(?:\d+(?:\.\w+)*\.)?[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)  # a name or a number of the text
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"]+')


@dataclass(frozen=True, slots=True)
class Role:
    """`kind`, and what the kind speaks of: its own name, whose it is (`of`), and the mesh axis it belongs to
    (`over`)."""

    kind: str
    name: str = ""
    of: str = ""
    over: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise ValueError(f"no role {self.kind!r}: one of {', '.join(FORMS)}")

    def __str__(self) -> str:
        return " ".join(
            [self.kind, *(_shown(getattr(self, w.lower())) if w.isupper() else w for w in FORMS[self.kind])]
        )

    @staticmethod
    def parse(text: str) -> Role:
        """The role whose text this is."""
        return Role.of_words([unquoted(w) if w.startswith('"') else w for w in _WORD.findall(text)])

    @staticmethod
    def of_words(words: Sequence[str]) -> Role:
        """The role of these words, already unquoted; ValueError if they are none."""
        kind, rest = (words[0], words[1:]) if words else ("", ())
        form = FORMS.get(kind)
        if form is None:
            raise ValueError(f"no role {kind!r}: one of {', '.join(FORMS)}")
        if len(rest) != len(form) or any(w != f for w, f in zip(rest, form, strict=True) if not f.isupper()):
            raise ValueError(f"{' '.join(words)!r} is no role: {' '.join([kind, *form])}")
        return Role(kind, **{f.lower(): w for w, f in zip(rest, form, strict=True) if f.isupper()})


def quoted(text: str) -> str:
    """As a string of the text."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def unquoted(text: str) -> str:
    """What `quoted` wrote."""
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text[1:-1])


def _shown(name: str) -> str:
    """Plain where the text can hold it as a name, else quoted."""
    return name if _PLAIN.fullmatch(name) and name not in ("inf", "nan") else quoted(name)
