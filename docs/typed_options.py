"""An extension of Griffe, which reads the docstrings for the reference: it finds types that are not in a signature.

- Arguments in the docstring of a class without a constructor of its own get the types and defaults of the attributes.
- Several arguments in one entry, as in "rank, world_size: …", get the type of the first.
- Attributes made by `_setting(default, help)` get this default and this help.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


class TypedOptions(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        for option in cls.parameters:
            if is_setting(option.default):
                option.default = option.default.arguments[0]
        if cls.docstring:
            add_types(cls.docstring, dict(cls.attributes) | {one.name: one for one in cls.parameters})

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            add_types(func.docstring, {one.name: one for one in func.parameters})

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if is_setting(attr.value):
            attr.value, text = attr.value.arguments
            attr.docstring = griffe.Docstring(ast.literal_eval(str(text)), parent=attr, parser="google")


def is_setting(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function) == "_setting"


def add_types(docstring: griffe.Docstring, typed: dict[str, Any]) -> None:
    for section in docstring.parsed:
        for item in section.value if section.kind is griffe.DocstringSectionKind.parameters else ():
            source = typed.get(item.name.split(", ")[0])
            if source is not None and item.annotation is None:
                item.annotation = source.annotation
                item.value = getattr(source, "value", None) or getattr(source, "default", None)
