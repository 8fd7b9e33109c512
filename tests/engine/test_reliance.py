"""The list of what the package relies on in vLLM: complete, and what a release lacks of it is found."""

import ast
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm_kvmerge
from vllm_kvmerge.engine import reliance, support
from vllm_kvmerge.engine.reliance import Class, Definition, Module, Signature, Sources

pytestmark = pytest.mark.engine

PACKAGE = Path(vllm_kvmerge.__file__).parent
VLLM = Path(find_spec("vllm").origin).parent
MODULE = re.compile(r"vllm(\.\w+)+(:\w+)?")

LISTED = [alternative for line in reliance.listed() for alternative in line.split(" | ")]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(VLLM.parent, PACKAGE.parent)


def our_modules(sources: Sources) -> Iterator[tuple[Module, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = sources.module(name.removesuffix(".__init__"))
        assert module is not None
        yield module, ast.parse(file.read_text())


def vllm_class(sources: Sources, module: Module, expression: ast.expr) -> tuple[str, Class] | None:
    """The class of vLLM's that an expression names, as the module imports it; None: it names none."""
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    name = expression.id if isinstance(expression, ast.Name) else ""
    bound, cls = module.bindings.get(name), sources.find(module, name)
    if not isinstance(bound, tuple) or not isinstance(cls, Class) or bound[0].split(".")[0] != "vllm":
        return None
    return ":".join(bound), cls


def subclasses(sources: Sources) -> Iterator[tuple[Class, list[tuple[str, Class]]]]:
    """Our classes that derive from vLLM's, and the classes that these, or ours among their bases, derive from."""
    for module, _ in our_modules(sources):
        for name, bound in module.bindings.items():
            cls = sources.find(module, name) if isinstance(bound, ast.ClassDef) else None
            if isinstance(cls, Class):
                ours = [one for one in sources.lineage(cls) if one.module.name.startswith("vllm_kvmerge")]
                found = (vllm_class(sources, one.module, base) for one in ours for base in one.node.bases)
                if theirs := [one for one in found if one is not None]:
                    yield cls, theirs


def imported(sources: Sources) -> Iterator[str]:
    """Names that we import, and modules that strings name."""
    for _, tree in our_modules(sources):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from (f"{node.module}:{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
                yield node.value


def overridden(sources: Sources) -> Iterator[str]:
    """Members of vLLM's classes that ours define too, with the parameters that ours take."""
    for cls, theirs in subclasses(sources):
        for name, member in cls.members.items():
            found = ((path, sources.member(one, name)) for path, one in theirs)
            path, base = next((one for one in found if one[1] is not None), ("", None))
            if base is None or name.startswith("__"):
                continue
            ours = sources.signature(member, is_method=True)
            if ours is None:
                yield f"{path}.{name}"
            elif not ours.rest:
                yield f"{path}.{name}{str(sources.signature(base, is_method=True)).replace('=', '')}"
            elif ours.positional or ours.by_name:
                yield f"{path}.{name}({', '.join([*ours.positional, *['*'][: len(ours.by_name)], *ours.by_name])}, ...)"
            else:
                yield f"{path}.{name}"


def inherited(sources: Sources) -> Iterator[str]:
    """Members of vLLM's classes that ours read or call."""
    for cls, theirs in subclasses(sources):
        own = {
            name for one in sources.lineage(cls) if one.module.name.startswith("vllm_kvmerge") for name in one.members
        }
        for node in ast.walk(cls.node):
            if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
                continue
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr not in own
            if is_super or is_self:
                owners = [path for path, one in theirs if sources.member(one, node.attr) is not None]
                yield from (f"{path}.{node.attr}" for path in owners[:1])


def of_parameters(sources: Sources) -> Iterator[str]:
    """Attributes of parameters whose annotations say that they are of vLLM's classes."""
    for module, tree in our_modules(sources):
        for function in (node for node in ast.walk(tree) if isinstance(node, Definition)):
            classes = {}
            for one in (*function.args.args, *function.args.kwonlyargs):
                annotation = one.annotation
                if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                    annotation = ast.parse(annotation.value, mode="eval").body
                if annotation is not None and (found := vllm_class(sources, module, annotation)) is not None:
                    classes[one.arg] = found
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes:
                    path, cls = classes[node.value.id]
                    if sources.member(cls, node.attr) is not None:
                        yield f"{path}.{node.attr}"


def abstract(sources: Sources) -> Iterator[str]:
    """Abstract methods of vLLM's classes, which ours define."""
    for _, theirs in subclasses(sources):
        for path, cls in theirs:
            if names := sources.abstract(cls):
                yield f"{path} abstract {' '.join(names)}"


def is_listed(wanted: str, lines: list[str]) -> bool:
    """Whether a line is in the list, perhaps with other parameters; a module or class by any of its members."""
    name, kind, rest = re.fullmatch(r"([\w.:]+)([ (]?)(.*)", wanted).groups()
    if kind == " ":
        return any(set(wanted.split()) <= set(line.split()) for line in lines if line.startswith(f"{name} abstract"))
    if kind == "(":
        path, _, member = name.rpartition(".")
        abstract = (line for line in lines if line.startswith(f"{path} abstract"))
        return any(line.startswith(f"{name}(") for line in lines) or any(member in line.split() for line in abstract)
    return any(re.match(rf"{re.escape(name)}($|[.:( ])", line) for line in lines)


@pytest.mark.thin(5)
@pytest.mark.parametrize("reliances", [imported, overridden, inherited, of_parameters, abstract])
def test_the_list_is_complete(reliances: Callable[[Sources], Iterator[str]], sources: Sources) -> None:
    wanted = list(dict.fromkeys(reliances(sources)))
    assert len(wanted) >= 5
    missing = [line for line in wanted if not is_listed(line, LISTED)]
    assert not missing, f"add to {reliance.LIST.relative_to(PACKAGE.parent)}:\n" + "\n".join(missing)


def test_lines_are_sorted_and_each_there_once() -> None:
    assert reliance.listed() == sorted(set(reliance.listed()))


def test_the_installed_release_has_all() -> None:
    assert reliance.installed().faults() == []
    assert support.is_supported(reliance.installed().version)


def overlaid(folder: Path, path: str, *changes: tuple[str, str]) -> None:
    """Puts a changed file of vLLM's into a folder. changes: regular expressions, and what takes the place of what they
    find."""
    text = (VLLM.parent / path).read_text()
    for old, new in changes:
        text, count = re.subn(old, new, text)
        assert count, old
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


SCHEDULER, POOL = "vllm/v1/core/sched/scheduler.py", "vllm/v1/core/block_pool.py"


@pytest.mark.slow
def test_what_a_release_changes_is_named(tmp_path: Path) -> None:
    renamed = r"(def _free_request\(\s*self,\s*)request: Request", r"\1one: Request"
    overlaid(tmp_path, SCHEDULER, ("_reserve_prefill_lookahead", "_reserve"), renamed)
    required = r"(def get_new_blocks\(self, num_blocks: int)", r"\1, owner: str"
    overlaid(tmp_path, POOL, required, (r"def touch\(self, blocks", "def touch(self, one, blocks"))
    overlaid(tmp_path, "vllm/v1/request.py", ("num_in_flight_tokens", "in_flight"))
    overlaid(tmp_path, "vllm/v1/core/kv_cache_manager.py", ("class KVCacheBlocks", "class Blocks"))
    overlaid(tmp_path, "vllm/v1/outputs.py", (r"(@abstractmethod\s+def )get_output", r"\1wait(self): ...\n\n    \g<0>"))
    overlaid(tmp_path, "vllm/v1/metrics/prometheus.py", ("(?s).+", ""))
    overlaid(tmp_path, "vllm/envs.py", ("VLLM_API_KEY", "API_KEY"))
    faults = Sources(tmp_path, VLLM.parent).faults()
    assert [fault.split(", not")[0] for fault in faults] == [
        "vllm.envs:VLLM_API_KEY is gone",
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks takes (num_blocks, owner)",
        "vllm.v1.core.block_pool:BlockPool.touch takes (one, blocks)",
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks is gone",
        "vllm.v1.core.sched.scheduler:Scheduler._free_request takes (one, delay_free_blocks=)",
        "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead is gone",
        "vllm.v1.metrics.prometheus:get_prometheus_registry is gone",
        "vllm.v1.outputs:AsyncModelRunnerOutput has new abstract methods: wait",
        "vllm.v1.request:Request.num_in_flight_tokens is gone",
    ]
    assert reliance.summary(faults) == f"{'; '.join(faults[:3])}; 6 more (vllm-kvmerge doctor)"


@pytest.mark.slow
def test_changes_that_do_no_harm(tmp_path: Path) -> None:
    optional = r"(def get_new_blocks\(self, num_blocks: int)", r"\1, owner: int = 0"
    overlaid(tmp_path, POOL, optional, ("class BlockPool:", "class Pool:"), (r"\Z", "\nclass BlockPool(Pool): ...\n"))
    assert Sources(tmp_path, VLLM.parent).faults() == []


@pytest.mark.parametrize(
    ("function", "wanted", "has"),
    [
        ("a, b", "a, b", True),
        ("a, b", "a", False),
        ("a, b=0", "a", False),
        ("a, b=0", "a, ?", True),
        ("a, b", "a, ?", False),
        ("a, b", "a, ...", True),
        ("b, a", "a, ...", False),
        ("a, *, b", "a, *, b", True),
        ("a, b", "a, *, b", True),
        ("a, *, b", "a, b", False),
        ("a, *, b=0, c=0", "a, *, b, ?", True),
        ("a, *, b=0, c", "a, *, b, ?", False),
        ("a, **others", "a, *, b, ?", True),
        ("*others", "a, b, ?", True),
        ("a, *others", "a", False),
        ("a", "a, *, b, ...", False),
    ],
)
def test_signatures(function: str, wanted: str, has: bool) -> None:
    (definition,) = ast.parse(f"def f({function}): ...").body
    assert isinstance(definition, ast.FunctionDef)
    assert Signature.of(definition.args).has(Signature.parse(wanted)) is has


@pytest.mark.parametrize(("version", "refused"), [("0.33.0", False), ("0.33.1", True)])
def test_a_start_says_what_is_gone(version: str, refused: bool, tmp_path: Path, monkeypatch) -> None:
    overlaid(tmp_path, "vllm/envs.py", ("VLLM_API_KEY", "API_KEY"))
    monkeypatch.setattr(support, "installed", lambda: Sources(tmp_path, VLLM.parent))
    monkeypatch.setattr(support, "_vllm_version", lambda: version)
    if not refused:  # known to have all of it: not read
        support.check_vllm_version()
        return
    with pytest.raises(support.UnsupportedConfigError) as error:
        support.check_vllm_version()
    said = str(error.value)
    assert said.startswith(f"vllm {version} is not supported; allowed: >=0.32,<0.34, ") and "\n" not in said
    assert said.endswith("; what vllm-kvmerge relies on: vllm.envs:VLLM_API_KEY is gone")
