"""What went wrong in a process that compiles, as the error that a request gets."""

from importlib.util import find_spec

from sapwood.runtime.constraints.bounded_process import Outcome, WorkError
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.spec import ConstraintKind


def require(package: str) -> None:
    """Raises ModuleNotFoundError, with the way out, for a package that is not installed."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"the constraint backend needs the package {package}, which is not installed; pip "
            f"install {package}, or choose another backend",
            name=package,
        )


def grammar_error(error: WorkError, backend: str) -> GrammarError:
    """With the fact, the limit and the way out."""
    match error.outcome:
        case Outcome.REFUSED:
            return GrammarError(str(error), keyword=error.keyword)
        case Outcome.TIMEOUT | Outcome.MEMORY:
            return GrammarError(
                f"{backend} could not compile the constraint: {error}; make it smaller (fewer "
                "alternatives, shorter repetitions) or choose another backend"
            )
    return GrammarError(
        f"{backend} could not compile the constraint: {error}; send it again, or choose another "
        "backend"
    )


def kind_refused(
    kind: ConstraintKind, backend: str, kinds: tuple[ConstraintKind, ...]
) -> GrammarError:
    return GrammarError(
        f"{backend} does not take {kind.value}, only {', '.join(kinds)}; choose another backend"
    )
