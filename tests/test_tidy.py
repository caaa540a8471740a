"""The rules of how this code reads that a program can check: sizes, imports, docstrings, numbers, broad excepts, the map.

Each check returns the places that break it, so that one run shows them all.
"""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.cli.main import COMMANDS

HERE = Path(__file__).resolve().parent.parent
LINKED = ("tiers", "clients", "kernels", "proto")  # top-level folders, imported as kvstore.<name>
MAX_FUNCTION_LINES = 60  # lines: what fits on a screen
MAX_FILE_LINES = 350  # lines: what one reads in a sitting
MAX_MAP_LINES = 200  # lines: ARCHITECTURE.md is read once, in whole

# Who may import whom: a package, and the packages or modules that may. These are for all, and import only each other:
FOUNDATION = (
    "errors",
    "hashing",
    "geometry",
    "capacity",
    "config",
    "proto",
    "dtypes",
    "model_config",
    "checksum",
    "digests",
    "service_links",
)
MAY_BE_IMPORTED_BY = {
    "cache": ("daemon", "replay", "bench", "testing", "worker.standalone"),
    "tiers": ("daemon", "bench", "testing", "cli.fsck", "worker.gpu", "clients.vllm_device"),  # these pin their maps of the arena
    "kernels": ("tiers", "worker", "clients", "bench", "testing"),
    "native": ("hashing", "cache", "daemon", "tiers", "kernels", "clients", "bench"),  # hashing: a prompt's chain is on each lookup's way
    "clients": ("worker", "cli", "bench"),
    "daemon": ("cli",),
    "worker": ("cli", "bench"),
    "front": ("cli",),
    "replay": ("cli",),
    "bench": ("cli",),
    "testing": ("bench",),
    "cli": ("testing.fake_gpu_daemon",),  # it runs the real command, over a driver for tests
}
CACHE_NEVER_IMPORTS = {"time", "random", "asyncio", "threading", "os", "socket", "logging"}
HEAVY = {"torch", "transformers", "cupy"}  # not in a base install
LIGHT = ("daemon", "cache", *FOUNDATION)  # what never imports them, not even inside a function
EDGES = ("clients", "tiers", "kernels", "cli")
# What is imported by users, by name at run time, or run as a script, rather than by another module.
ENTRY_POINTS = (
    r"kvstore\.cli\.\w+|kvstore\.bench\.[a-z]+|kvstore\.bench\.(peers|load)\.drive\w+|kvstore(\.\w+)*\.__main__|kvstore\.testing\.\w+|kvstore\.proto\.generate"
    r"|kvstore\.clients\.(client|aio|vllm|vllm_tier|sglang|transformers)|kvstore\.kernels\.(decode|copying|writing|host|cuda|cpu)"
    r"|kvstore\.tiers\.(hbm|hbm_socket|pinned)|kvstore\.clients\.(hbm|promotion)|kvstore\.worker\.tails"
)
# A unit in a name: one of these words, or the plural of what is counted. In a comment: one, or what is counted and a colon.
UNIT_WORDS = r"(?i)\b(bytes?|[kmgt]ib|s|ms|seconds?|minutes?|days?|bits?|tokens?|blocks?|slots?|units?|lines?|status|version|port|mode)\b"
UNIT_IN_NAME = re.compile(UNIT_WORDS + r"|\b\w+[^\Ws]s\b")
UNIT_IN_COMMENT = re.compile(UNIT_WORDS + r"|^[\w /,-]+: ")


@dataclass(frozen=True)
class Module:
    """One source file under its import name."""

    name: str
    path: Path

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def unit(self) -> str:
        """The part of the import table that it belongs to: `cache` for kvstore.cache.state."""
        return self.name.split(".")[1] if "." in self.name else ""

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path.relative_to(HERE)}:{getattr(node, 'lineno', 1)}: {what}"


def _is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def _named(root: Path, prefix: str) -> Iterator[Module]:
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        linked = prefix == "kvstore" and inside.parts[0] in LINKED
        if not linked and "__pycache__" not in inside.parts and not _is_generated(path):
            parts = [*inside.parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
            yield Module(".".join([prefix, *parts]), path)


PRODUCT = [*_named(HERE / "kvstore", "kvstore"), *(module for name in LINKED for module in _named(HERE / name, f"kvstore.{name}"))]
TESTS = list(_named(HERE / "tests", "tests"))
NAMES = {module.name for module in PRODUCT}


def _imported(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Every import, also inside functions and under TYPE_CHECKING, by the module that it reaches."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".") if module.path.stem == "__init__" else module.name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield node, f"{base}.{alias.name}" if f"{base}.{alias.name}" in NAMES else base


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(module.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _commented(module: Module, line: int) -> str:
    """The comment on a line, or in the lines just above it; empty where there is none."""
    lines = module.text.splitlines()
    if "  # " in lines[line - 1]:
        return lines[line - 1].partition("  # ")[2]
    return lines[line - 2].partition("# ")[2] if line > 1 and lines[line - 2].lstrip().startswith("#") else ""


def test_functions_fit_on_a_screen() -> None:
    long = [
        module.at(node, f"{node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines")
        for module in PRODUCT + TESTS
        for node in _functions(module)
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_files_are_read_in_a_sitting() -> None:
    sizes = {module.path.relative_to(HERE): module.text.count("\n") for module in PRODUCT + TESTS}
    long = [f"{path}: {lines} lines" for path, lines in sizes.items() if lines > MAX_FILE_LINES]
    assert not long, "\n".join(long)


def test_imports_follow_the_table() -> None:
    wrong = []
    for module in PRODUCT:
        inside = module.name.removeprefix("kvstore.")
        for node, target in _imported(module):
            unit = target.split(".")[1] if target.startswith("kvstore.") else module.unit
            allowed = MAY_BE_IMPORTED_BY.get(unit, ())
            if unit not in (module.unit, *FOUNDATION) and not any(f"{inside}.".startswith(f"{user}.") for user in allowed):
                wrong.append(module.at(node, f"{module.unit or 'kvstore'} may not import {target}"))
    assert not wrong, "\n".join(wrong)


def test_every_package_is_in_the_table() -> None:
    assert {module.unit for module in PRODUCT} - {"", *FOUNDATION, *MAY_BE_IMPORTED_BY} == set()


def test_no_import_goes_in_a_circle() -> None:
    graph = {module.name: {target for _, target in _imported(module) if target in NAMES} - {module.name} for module in PRODUCT}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_cache_core_does_no_input_or_output() -> None:
    wrong = [
        module.at(node, f"cache imports {target}")
        for module in PRODUCT
        for node, target in _imported(module)
        if module.unit == "cache" and target.split(".")[0] in CACHE_NEVER_IMPORTS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_daemon_never_imports_torch() -> None:
    wrong = [
        module.at(node, f"{module.unit} imports {target}")
        for module in PRODUCT
        for node, target in _imported(module)
        if module.unit in LIGHT and target.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_public_functions_at_an_edge_have_docstrings() -> None:
    bare = [
        module.at(node, f"{node.name} has no docstring")
        for module in PRODUCT
        for node in _public(module.tree.body)
        if module.unit in EDGES and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public functions, and those of public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node


def test_every_module_says_what_it_is() -> None:
    bare = [str(module.path.relative_to(HERE)) for module in PRODUCT if not ast.get_docstring(module.tree)]
    assert not bare, "\n".join(bare)


def test_every_function_is_annotated() -> None:
    bare = []
    for module in PRODUCT + TESTS:
        for node in _functions(module):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            missing = [each.arg for each in arguments if each and not each.annotation and each.arg not in ("self", "cls")]
            if missing or node.returns is None:
                bare.append(module.at(node, f"{node.name}: {', '.join(missing) or 'its result'}"))
    assert not bare, "\n".join(bare)


def test_module_level_numbers_have_a_unit_and_a_reason() -> None:
    bare = []
    for module in PRODUCT:
        for node in module.tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and _is_number(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                name = " ".join(ast.unparse(target) for target in targets)
                reason = _commented(module, node.lineno)
                has_unit = UNIT_IN_NAME.search(name.replace("_", " ").lower()) or UNIT_IN_COMMENT.search(reason)
                if not reason or not (has_unit or name.startswith("_")):
                    bare.append(module.at(node, f"{name}: say its unit and why it is so much"))
    assert not bare, "\n".join(bare)


def _is_number(value: ast.expr) -> bool:
    """Whether an expression is a number, or several, written in digits and calculated from nothing but numbers and names."""
    parts = [node for node in ast.walk(value) if not isinstance(node, (ast.operator, ast.unaryop, ast.expr_context))]
    digits = [node for node in parts if isinstance(node, ast.Constant) and type(node.value) in (int, float)]
    others = [node for node in parts if not isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Tuple, ast.Name)) and node not in digits]
    return bool(digits) and not others


def test_broad_excepts_say_why() -> None:
    bare = []
    for module in PRODUCT + TESTS:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"BaseException"}
                passed_on = isinstance(node.body[-1], ast.Raise)
                if kinds & {"Exception", "BaseException"} and not passed_on and not _commented(module, node.lineno):
                    bare.append(module.at(node, "a broad except without its reason"))
    assert not bare, "\n".join(bare)


def test_no_module_is_imported_by_nobody() -> None:
    imported = {target for module in PRODUCT for _, target in _imported(module) if target != module.name}
    packages = {module.name for module in PRODUCT if module.path.stem == "__init__"}
    unused = [name for name in NAMES - imported - packages if not re.fullmatch(ENTRY_POINTS, name)]
    assert not unused, "\n".join(sorted(unused))


def test_every_command_module_is_in_the_list() -> None:
    modules = {path.stem for path in (HERE / "kvstore" / "cli").glob("*.py")} - {"__init__", "main"}
    offering = {name for name in modules if "\nNAME = " in (HERE / "kvstore" / "cli" / f"{name}.py").read_text(encoding="utf-8")}
    assert offering == set(COMMANDS)


def test_every_path_on_the_map_exists() -> None:
    text = (HERE / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w.*-]+(?:/[\w.*-]*)+|[\w-]+\.(?:py|md|toml|yml|proto))`", text)
    missing = [path for path in named if not any(HERE.glob(path.rstrip("/")))]
    assert not missing, "\n".join(missing)
    assert text.count("\n") <= MAX_MAP_LINES
