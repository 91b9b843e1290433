"""The import rules of docs/design.md as data, checked against every file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("radix", "kernels", "runtime", "frontend_lang", "server")
STDLIB = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Rule:
    """What files under `path` may import: of ours (dotted prefixes) and of others (top-level)."""

    path: str
    ours: tuple[str, ...]
    others: tuple[str, ...]
    on_use: tuple[str, ...] = ()  # inside functions, or for type checking, only


SERVER_PUBLIC = tuple(
    f"sapwood.runtime.{name}"
    for name in (
        "answer_format",
        "answer_tokens",
        "async_engine",
        "build",
        "chat",
        "config",
        "constraints",
        "core",
        "engine",
        "errors",
        "hints",
        "outputs",
        "policy",
        "processing",
        "pull",
        "reasoning_block",
        "role_text",
        "sampling_params",
        "separated_reasoning",
        "tokenizer",
        "turns",
    )
)

SERVER_PACKAGES = (
    "fastapi",
    "starlette",
    "pydantic",
    "pydantic_core",
    "uvicorn",
    "prometheus_client",
    "typer",
    "rich",
    "httpx",
    "numpy",
)

# The values of runtime that a program is made of; none imports torch.
LANGUAGE_VALUES = tuple(
    f"sapwood.runtime.{name}"
    for name in (
        "constraints.explicit_regex",
        "constraints.notation",
        "constraints.output_types",
        "constraints.spec",
        "errors",
        "hints",
        "regex_syntax",
    )
)

RULES = (
    Rule("radix", ("sapwood.radix",), ("numpy", "sortedcontainers")),
    Rule("kernels", ("sapwood.kernels",), ("torch", "triton", "numpy")),
    Rule(
        "runtime",
        ("sapwood.runtime", "sapwood.radix", "sapwood.kernels"),
        ("torch", "numpy", "transformers", "tokenizers", "safetensors", "sortedcontainers"),
        on_use=(
            "gguf",
            "huggingface_hub",
            "tqdm",
            "jinja2",
            "outlines",
            "llguidance",
            "outlines_core",
            "xgrammar",
            "jsonschema",
            "referencing",
        ),
    ),
    Rule(
        "frontend_lang",
        ("sapwood.frontend_lang", *LANGUAGE_VALUES),
        (),
        on_use=("pydantic", "outlines"),
    ),
    Rule(
        "frontend_lang/backends",
        ("sapwood.frontend_lang", "sapwood.runtime"),
        (),
        on_use=("httpx",),
    ),
    Rule(
        "frontend_lang/examples",  # what a user's own program may import
        ("sapwood", "sapwood.frontend_lang.examples"),
        ("pydantic",),
    ),
    Rule("server", ("sapwood", "sapwood.server", *SERVER_PUBLIC), SERVER_PACKAGES),
    Rule(
        "server/cli",
        (
            "sapwood",
            "sapwood.server",
            "sapwood.frontend_lang",
            "sapwood.kernels.tuner",
            "sapwood.kernels.tuning",
            *SERVER_PUBLIC,
        ),
        SERVER_PACKAGES,
    ),
)

# These run in tests and trace replay with a virtual clock and no model.
TORCH_FREE = (
    "kernels/__init__.py",
    "kernels/ragged.py",
    "kernels/segments.py",
    "kernels/specialization.py",
    "kernels/tile_grouping.py",
    "kernels/tile_packing.py",
    "kernels/tile_shapes.py",
    "kernels/tile_splitting.py",
    "kernels/tiles.py",
    "kernels/tuning.py",
    "kernels/windows.py",
    "runtime/admission.py",
    "runtime/answer_format.py",
    "runtime/answer_tokens.py",
    "runtime/chat.py",
    "runtime/common_prefix.py",
    "runtime/config.py",
    "runtime/constraints/__init__.py",
    "runtime/constraints/argument_styles.py",
    "runtime/constraints/backends.py",
    "runtime/constraints/bounded_cache.py",
    "runtime/constraints/choices.py",
    "runtime/constraints/compile_errors.py",
    "runtime/constraints/compile_line.py",
    "runtime/constraints/compiler.py",
    "runtime/constraints/explicit_regex.py",
    "runtime/constraints/futures.py",
    "runtime/constraints/interface.py",
    "runtime/constraints/json_formats.py",
    "runtime/constraints/json_schema.py",
    "runtime/constraints/lark_text.py",
    "runtime/constraints/likely_cuts.py",
    "runtime/constraints/limits.py",
    "runtime/constraints/llguidance_backend.py",
    "runtime/constraints/llguidance_grammar.py",
    "runtime/constraints/llguidance_translator.py",
    "runtime/constraints/messages.py",
    "runtime/constraints/notation.py",
    "runtime/constraints/number_limit.py",
    "runtime/constraints/outlines_core_backend.py",
    "runtime/constraints/outlines_core_compile.py",
    "runtime/constraints/outlines_core_schema.py",
    "runtime/constraints/output_types.py",
    "runtime/constraints/reasoning.py",
    "runtime/constraints/regex_text.py",
    "runtime/constraints/schema_check.py",
    "runtime/constraints/schema_disjoint.py",
    "runtime/constraints/schema_graph.py",
    "runtime/constraints/schema_keywords.py",
    "runtime/constraints/schema_places.py",
    "runtime/constraints/schema_reader.py",
    "runtime/constraints/schema_text.py",
    "runtime/constraints/spec.py",
    "runtime/constraints/structural_tag.py",
    "runtime/constraints/structural_tag_lark.py",
    "runtime/constraints/token_automaton.py",
    "runtime/constraints/mask_bits.py",
    "runtime/constraints/token_table.py",
    "runtime/constraints/vocabulary.py",
    "runtime/constraints/watchdog.py",
    "runtime/constraints/xgrammar_compile.py",
    "runtime/constraints/xgrammar_documents.py",
    "runtime/control_tokens.py",
    "runtime/controlled_encoder.py",
    "runtime/detokenizer.py",
    "runtime/errors.py",
    "runtime/hints.py",
    "runtime/noise.py",
    "runtime/outputs.py",
    "runtime/plain_json.py",
    "runtime/policy.py",
    "runtime/programs.py",
    "runtime/reasoning.py",
    "runtime/reasoning_block.py",
    "runtime/regex_syntax.py",
    "runtime/request.py",
    "runtime/request_limits.py",
    "runtime/role_text.py",
    "runtime/sampling_params.py",
    "runtime/scheduler.py",
    "runtime/scoring.py",
    "runtime/segmenter.py",
    "runtime/separated_reasoning.py",
    "runtime/step_plan.py",
    "runtime/stop.py",
    "runtime/stop_regex.py",
    "runtime/template_meter.py",
    "runtime/tokenizer.py",
    "runtime/tool_use.py",
    "runtime/tools/__init__.py",
    "runtime/tools/answers.py",
    "runtime/tools/argument_schema.py",
    "runtime/tools/arguments.py",
    "runtime/tools/call_grammar.py",
    "runtime/tools/call_ids.py",
    "runtime/tools/call_syntax.py",
    "runtime/tools/detection.py",
    "runtime/tools/formats.py",
    "runtime/tools/generic.py",
    "runtime/tools/hermes.py",
    "runtime/tools/interface.py",
    "runtime/tools/json_scanner.py",
    "runtime/tools/llama3.py",
    "runtime/tools/mistral.py",
    "runtime/tools/python_arguments.py",
    "runtime/tools/pythonic.py",
    "runtime/tools/qwen3_coder.py",
    "runtime/tools/text_source.py",
    "runtime/tools/tool.py",
    "runtime/tools/xml_arguments.py",
    "runtime/turn_rules.py",
    "runtime/turns.py",
    "runtime/warm_prefixes.py",
)
CLOCKS = ("time", "datetime")
CLOCK_FREE = (
    *(name for name in TORCH_FREE if name.startswith("runtime/")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "radix").glob("*.py")),
    "runtime/core.py",
)


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    on_use: bool


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> Iterator[Import]:
    """Every absolute import of a file; those in functions or under TYPE_CHECKING are on use."""

    def visit(node: ast.AST, on_use: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, on_use) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno} imports relatively"
                yield Import(child.module or "", child.lineno, on_use)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from visit(child, on_use or lazy)

    yield from visit(ast.parse(path.read_text()), False)


def is_under(module: str, prefixes: tuple[str, ...]) -> bool:
    """`sapwood` itself stands for its public names, not for everything below it."""
    below = tuple(prefix + "." for prefix in prefixes if prefix != "sapwood")
    return module in prefixes or module.startswith(below)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.path)
def test_a_folder_imports_only_what_its_rule_allows(rule: Rule) -> None:
    wrong = []
    inner = [other.path for other in RULES if other.path.startswith(rule.path + "/")]
    for path in sources(rule.path):
        if any(path.is_relative_to(ROOT / folder) for folder in inner):
            continue  # it has a rule of its own
        for found in imports_of(path):
            top = found.module.split(".")[0]
            if top == "sapwood":
                allowed = is_under(found.module, rule.ours)
            else:
                allowed = top in STDLIB or top in rule.others
                allowed = allowed or (found.on_use and top in rule.on_use)
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{found.line} imports {found.module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_a_torch_free_file_imports_no_torch_whatever_it_pulls_in(name: str) -> None:
    module = "sapwood." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", CLOCK_FREE)
def test_a_clock_free_file_reads_no_clock(name: str) -> None:
    clocks = [found.module for found in imports_of(ROOT / name) if found.module in CLOCKS]
    assert not clocks


def test_every_link_leads_to_its_folder() -> None:
    for folder in FOLDERS:
        link = ROOT / "sapwood" / folder
        assert link.is_symlink(), f"{link} is not a link"
        assert link.readlink() == Path("..") / folder
        assert link.resolve() == ROOT / folder


def test_every_package_folder_has_a_rule_and_a_link() -> None:
    packages = {
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "sapwood"
    }
    assert packages - {"tests", "bench"} == set(FOLDERS)
    assert {rule.path.split("/")[0] for rule in RULES} == set(FOLDERS)


MUTABLE_CALLS = frozenset(
    {"dict", "list", "set", "bytearray", "defaultdict", "Counter", "deque", "OrderedDict"}
)
CACHES = frozenset({"cache", "lru_cache"})


def mutable_state_of(path: Path) -> Iterator[str]:
    """Module-level (and class-level) names bound to something that can change, and caches on
    functions, which are the same thing in disguise."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{path.relative_to(ROOT)}:{node.lineno} global {', '.join(node.names)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(target).split(".")[-1] in CACHES:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} caches {node.name}"
    bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        value = statement.value
        is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp) or (
            is_call and value.func.id in MUTABLE_CALLS  # type: ignore[union-attr]
        ):
            targets = ast.unparse(statement).split("=")[0].strip()
            if not targets.startswith(("__all__", "__slots__")):
                yield f"{path.relative_to(ROOT)}:{statement.lineno} {targets}"


def test_no_module_holds_mutable_state() -> None:
    found = [
        state
        for folder in (*FOLDERS, "sapwood")
        for path in sources(folder)
        for state in mutable_state_of(path)
    ]
    assert not found, "\n".join(found)


def test_importing_sapwood_imports_no_torch() -> None:
    code = "import sys, sapwood; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


MINIMAL = ("torch", "triton", "numpy", "sortedcontainers", "safetensors", "tokenizers")
CORE_MODULES = (
    "sapwood.radix",
    "sapwood.kernels.cpu",
    "sapwood.kernels.reference",
    "sapwood.runtime.engine",
    "sapwood.runtime.async_engine",
    "sapwood.runtime.models.llama",
    "sapwood.runtime.weights",
)


def test_the_core_imports_where_only_the_minimal_packages_are_installed() -> None:
    """Everything that is not named, needed by those or in the standard library is hidden."""
    hidden = (
        "fastapi starlette pydantic uvicorn prometheus_client typer rich httpx gguf jinja2 "
        "huggingface_hub outlines outlines_core llguidance transformers"
    ).split()
    code = "\n".join(
        [
            "import sys",
            f"for name in {hidden}: sys.modules[name] = None",
            f"for name in {list(CORE_MODULES)}: __import__(name)",
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
