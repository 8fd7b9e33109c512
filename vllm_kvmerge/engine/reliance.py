"""What the package relies on in vLLM, listed in ``reliance.txt``, and whether a release has it.

vLLM's source is read, not imported: a wheel need not be installed.
"""

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

LIST = Path(__file__).with_name("reliance.txt")

Definition = ast.FunctionDef | ast.AsyncFunctionDef

SHOWN_FAULTS = 3
"""Faults that a line of text names; the others are counted."""

HEAD = re.compile(r"(?P<module>[\w.]+)(:(?P<names>[\w.]+))?(?P<rest>.*)")


def installed() -> "Sources":
    """The vLLM of this environment. Raises ImportError: there is none."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    return Sources(Path(spec.submodule_search_locations[0]).parent)


def summary(faults: list[str]) -> str:
    """Faults in one line."""
    more = [f"{len(faults) - SHOWN_FAULTS} more (vllm-kvmerge doctor)"] if len(faults) > SHOWN_FAULTS else []
    return "; ".join([*faults[:SHOWN_FAULTS], *more]) or "it has all of it"


def listed() -> list[str]:
    """The lines of the list."""
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


@dataclass(frozen=True)
class Signature:
    """Names of a function's parameters. positional: those that need not be passed by name. rest: ``?`` or ``...``, what
    else a listed one may have; of a function ``*`` or ``**`` where it takes any arguments."""

    positional: tuple[str, ...]
    by_name: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    rest: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "Signature":
        """A listed one, without its parentheses."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        rest = frozenset(names) & {"?", "..."}
        names = [name for name in names if name not in rest]
        split = names.index("*") if "*" in names else len(names)
        return cls(tuple(names[:split]), tuple(names[split + 1 :]), rest=rest)

    @classmethod
    def of(cls, arguments: ast.arguments, skipped: int = 0) -> "Signature":
        positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        optional = positional[len(positional) - len(arguments.defaults) :]
        by_name = [one.arg for one in arguments.kwonlyargs]
        optional += [name for name, default in zip(by_name, arguments.kw_defaults, strict=True) if default is not None]
        stars = {"*": arguments.vararg, "**": arguments.kwarg}
        rest = frozenset(star for star, one in stars.items() if one)
        return cls(tuple(positional[skipped:]), tuple(by_name), frozenset(optional), rest)

    def has(self, wanted: "Signature") -> bool:
        """Whether a function of this signature does for the listed ``wanted``."""
        given = self.positional[: len(wanted.positional)]
        if wanted.positional[: len(given)] != given or (len(given) < len(wanted.positional) and "*" not in self.rest):
            return False
        others = [name for name in (*self.positional[len(given) :], *self.by_name) if name not in wanted.by_name]
        if "**" not in self.rest and not set(wanted.by_name) <= {*self.positional, *self.by_name}:
            return False
        if "..." in wanted.rest:
            return True
        if "?" in wanted.rest:
            return self.optional.issuperset(others)
        return not others and not self.rest

    def __str__(self) -> str:
        shown = [name + "=" * (name in self.optional) for name in self.positional]
        if "*" in self.rest or self.by_name:
            shown.append("*")
        shown += [name + "=" * (name in self.optional) for name in self.by_name]
        return f"({', '.join(shown + ['**'] * ('**' in self.rest))})"


class Module:
    """What the names of a module are bound to."""

    def __init__(self, name: str, is_package: bool, text: str) -> None:
        self.name = name
        self.package = name.split(".") if is_package else name.split(".")[:-1]
        self.bindings: dict[str, ast.stmt | tuple[str, str]] = {}
        """Definitions; of an imported name, its module and its name there, empty for the module itself."""
        self.star_imports: list[str] = []
        for statement in _statements(ast.parse(text).body):
            self._bind(statement)

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom):
            above = self.package[: len(self.package) - statement.level + 1] if statement.level else []
            source = ".".join([*above, *([statement.module] if statement.module else [])])
            for alias in statement.names:
                if alias.name == "*":
                    self.star_imports.append(source)
                else:
                    self.bindings[alias.asname or alias.name] = source, alias.name
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                first = alias.name.split(".")[0]
                self.bindings[alias.asname or first] = alias.name if alias.asname else first, ""
        elif isinstance(statement, Definition | ast.ClassDef):
            self.bindings[statement.name] = statement
        else:
            self.bindings |= dict.fromkeys(_assigned(statement), statement)


@dataclass(eq=False)
class Class:
    """A class, in the module that defines it."""

    module: Module
    node: ast.ClassDef

    @cached_property
    def members(self) -> dict[str, ast.stmt]:
        """Methods, and attributes that the body or methods assign to."""
        members: dict[str, ast.stmt] = {}
        for statement in _statements(self.node.body):
            if isinstance(statement, Definition):
                members[statement.name] = statement
            else:
                members |= dict.fromkeys(_assigned(statement), statement)
        for inner in ast.walk(self.node):
            if isinstance(inner, ast.stmt):
                for name in _assigned(inner, of="self"):
                    members.setdefault(name, inner)
        return members


Found = Module | Class | ast.stmt


class Sources:
    """Python packages below ``roots``, each a folder or a wheel, read as they are asked for."""

    def __init__(self, *roots: Path) -> None:
        self._folders = [root for root in roots if root.is_dir()]
        wheels = [zipfile.ZipFile(root) for root in roots if not root.is_dir()]
        self._zipped = {name: wheel for wheel in wheels for name in wheel.namelist()}
        self._modules: dict[str, Module | None] = {}
        self._classes: dict[ast.ClassDef, Class] = {}
        self._lineages: dict[Class, list[Class]] = {}

    def text(self, path: str) -> str | None:
        """A file's text; None: there is no such file."""
        for folder in self._folders:
            if (file := folder / path).is_file():
                return file.read_text()
        return self._zipped[path].read(path).decode() if path in self._zipped else None

    def module(self, name: str) -> Module | None:
        """A module of vLLM or of this package; None: there is none, or it is another package's."""
        if not name.startswith("vllm"):
            return None
        if name not in self._modules:
            path = name.replace(".", "/")
            text, package = self.text(f"{path}.py"), self.text(f"{path}/__init__.py")
            source = text if package is None else package
            self._modules[name] = None if source is None else Module(name, package is not None, source)
        return self._modules[name]

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have been read."""
        return [name for name, module in self._modules.items() if module is not None]

    def find(self, module: Module | None, name: str) -> Found | None:
        """What a module's ``name`` is, wherever it is defined; None: nothing, or of another package."""
        if module is None:
            return None
        bound = module.bindings.get(name)
        if isinstance(bound, tuple) and bound != (module.name, name):
            source, there = bound
            return self.find(self.module(source), there) if there else self.module(source)
        if isinstance(bound, ast.ClassDef):
            return self._classes.setdefault(bound, Class(module, bound))
        if isinstance(bound, ast.stmt):
            return bound
        for source in module.star_imports:
            if (found := self.find(self.module(source), name)) is not None:
                return found
        return self.module(f"{module.name}.{name}")

    def lineage(self, cls: Class) -> list[Class]:
        """The class and its bases of these packages."""
        if cls not in self._lineages:
            lineage = [cls]
            for base in cls.node.bases:
                found = self.named(cls.module, base)
                if isinstance(found, Class):
                    lineage += [one for one in self.lineage(found) if one not in lineage]
            self._lineages[cls] = lineage
        return self._lineages[cls]

    def named(self, module: Module, expression: ast.expr) -> Found | None:
        """What an expression names in a module: ``name``, ``module.name``, or either with a subscript."""
        if isinstance(expression, ast.Subscript):
            return self.named(module, expression.value)
        if isinstance(expression, ast.Name):
            return self.find(module, expression.id)
        if isinstance(expression, ast.Attribute):
            holder = self.named(module, expression.value)
            return self.find(holder, expression.attr) if isinstance(holder, Module) else None
        return None

    def member(self, cls: Class, name: str) -> ast.stmt | None:
        """A method or attribute of a class, its own or inherited."""
        found = (one.members.get(name) for one in self.lineage(cls))
        return next((one for one in found if one is not None), None)

    def abstract(self, cls: Class) -> list[str]:
        """Names of the abstract methods that the class leaves to classes derived from it."""
        names = dict.fromkeys(name for one in self.lineage(cls) for name in one.members)
        return [name for name in names if _is_marked(self.member(cls, name), "abstractmethod")]

    def signature(self, found: Found | None, is_method: bool = False) -> Signature | None:
        """Of a function, without the first parameter of a method, or of a class's constructor; None: of neither."""
        if isinstance(found, Class):
            if (constructor := self.member(found, "__init__")) is not None:
                return self.signature(constructor, is_method=True)
            fields = {
                name: node
                for one in reversed(self.lineage(found))
                for name, node in one.members.items()
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
            }
            optional = frozenset(name for name, node in fields.items() if node.value is not None)
            return Signature(tuple(fields), optional=optional)
        if not isinstance(found, Definition):
            return None
        return Signature.of(found.args, int(is_method and not _is_marked(found, "staticmethod")))

    def fault(self, line: str) -> str | None:
        """What is wrong with a line of the list; of alternatives, with the last one, if no other holds."""
        fault = None
        for alternative in line.split(" | "):
            if (fault := self._fault(alternative)) is None:
                break
        return fault

    def _fault(self, line: str) -> str | None:
        parts = HEAD.fullmatch(line)
        assert parts is not None, line
        name, names, rest = line.removesuffix(parts["rest"]), (parts["names"] or "").split("."), parts["rest"].strip()
        module = self.module(parts["module"])
        if module is None:
            return f"{parts['module']} is gone"
        if not names[0]:
            return None
        found, is_method = self.find(module, names[0]), len(names) > 1
        if is_method and isinstance(found, Class):
            found = self.member(found, names[1])
        if found is None:
            return f"{name} is gone"
        if rest.startswith("abstract"):
            known = rest.removeprefix("abstract").split()
            new = [one for one in self.abstract(found) if one not in known] if isinstance(found, Class) else []
            return f"{name} has new abstract methods: {', '.join(new)}" if new else None
        if rest:
            signature = self.signature(found, is_method)
            if signature is None:
                return f"{name} is no function any more"
            if not signature.has(Signature.parse(rest.strip("()"))):
                return f"{name} takes {signature}, not {rest}"
        return None

    @property
    def version(self) -> str:
        """Of vLLM; empty: its source does not say."""
        found = re.search(r"^__version__ = .*?['\"](.+?)['\"]", self.text("vllm/_version.py") or "", re.MULTILINE)
        return found[1] if found else ""

    def faults(self) -> list[str]:
        """What this vLLM lacks of the list, or has otherwise."""
        return list(dict.fromkeys(fault for line in listed() if (fault := self.fault(line)) is not None))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those that they hold without a scope of their own."""
    for statement in body:
        yield statement
        if not isinstance(statement, Definition | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, name, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _assigned(statement: ast.stmt, of: str | None = None) -> Iterator[str]:
    """Names that a statement assigns to or declares, or attributes ``of`` a variable."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif of is None and isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == of:
            yield target.attr


def _is_marked(found: ast.stmt | None, decorator: str) -> bool:
    marks = found.decorator_list if isinstance(found, Definition) else []
    return any(ast.unparse(mark).split(".")[-1] == decorator for mark in marks)
